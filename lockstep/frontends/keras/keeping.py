"""A runner of Keras models that writes checkpoints, and goes on from them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from lockstep.errors import OptionError
from lockstep.frontends.keras.checkpoints import Checkpoint, KeptCallback, kept
from lockstep.plan.makers import Maker
from lockstep.train.callbacks import Callback
from lockstep.train.checkpoints import FitRecord, Keeper
from lockstep.train.history import History
from lockstep.train.intake import Feed
from lockstep.train.interrupt import held_termination
from lockstep.train.likeness import said
from lockstep.train.lost_hosts import check_restarts_on, going_on
from lockstep.train.memory_checkpoints import MemoryCheckpoints
from lockstep.train.persistence import PersistentRunner
from lockstep.train.run_record import RunRecord
from lockstep.train.same_data import fingerprint
from lockstep.train.training_state import TrainingState


class KeepingRunner(PersistentRunner):
    """A runner whose ``fit`` may be kept.

    Attributes:
        keeper: writes the checkpoints of the ``fit`` under way; None without.
        record: of that ``fit``; None without.
    """

    model: Any
    callbacks: list[Callback]
    schedule = None
    keeper: Keeper | None = None
    record: RunRecord | None = None

    @property
    def stop_training(self) -> bool:
        """Whether a callback wants training to end."""
        return bool(self.model.model.stop_training)

    @contextmanager
    def kept(
        self,
        checkpoint: Checkpoint | None,
        make_record: Callable[[], FitRecord],
        callbacks: Any,
        restarts: int,
        memory: MemoryCheckpoints,
    ) -> Iterator[History | None]:
        """Within the block a ``fit`` is kept; gives its history, where it had ended before.

        Args:
            checkpoint: where; None to keep nothing.
            make_record: says what it is asked to do.
            callbacks: Keras's list of them.
            restarts: how often to go on after a loss.
            memory: what this process has of it in memory.

        Raises:
            CheckpointError: what is there is of another ``fit``, or not whole.
            OptionError: after a loss nobody could go on.
        """
        context = self._job_context
        has_checkpoint = checkpoint is not None
        check_restarts_on(
            context.hosts, restarts, has_checkpoint=has_checkpoint, reach=context.reach
        )
        with ExitStack() as stack:
            stack.enter_context(self._recorded(checkpoint))
            if checkpoint is None:
                yield None
                return
            keeper = Keeper(checkpoint.files, stack.enter_context(held_termination()), memory)
            is_chief = self._is_chief
            stack.enter_context(going_on(keeper, context.hosts, restarts, is_chief=is_chief))
            keeper.record = record = make_record()
            keeper.set_trainer(self)  # type: ignore[arg-type]  # it has what a keeper asks for
            self.keeper, self.callbacks = keeper, kept(callbacks) if self._is_chief else []
            try:
                if (ended := self._take_up_found(keeper)) is not None:
                    yield ended
                    return
                if self._resumed is not None:
                    keeper.begin_at(self._resumed.position["steps"] - record.steps)
                yield None
            finally:
                self.keeper, self.callbacks, self._resumed = None, [], None

    @contextmanager
    def _recorded(self, checkpoint: Checkpoint | None) -> Iterator[None]:
        """Within the block a record is kept, beside the checkpoints or as the user's always."""
        self.record = self._record_in(
            None, None if checkpoint is None else checkpoint.files.directory
        )
        try:
            with self.record.kept(strategy=type(self.strategy).__name__):
                yield
        finally:
            self.record = None

    def _own_part(self, state: TrainingState) -> TrainingState:
        """Callbacks are on host 0."""
        return state if self._is_chief else replace(state, callbacks=[])

    def begin_kept(self, restarts: int) -> None:
        """Callbacks' ``on_train_begin`` has been called."""
        for each in self.callbacks:
            assert isinstance(each, KeptCallback)
            each.begin()
        if self.keeper is not None and self._resumed is None and restarts:
            self._keep_beginning(self.keeper)

    def finish_kept(self, history: History) -> None:
        """Callbacks' ``on_train_end`` has been called: write the last checkpoint."""
        if self.keeper is not None:
            self._finish(self.keeper, history)


def check_copied(maker: Maker) -> None:
    """See that one process has all of a training, which copies in memory need.

    Args:
        maker: of its Plan.

    Raises:
        OptionError: replicas train apart.
    """
    if maker.trains_apart:
        raise OptionError(
            "Replicas that train apart have optimizers of their own, of which no copy is kept.",
            received="Restarts under LocalSGDStrategy",
            fix="Use MirroredStrategy; or a Checkpoint, and start the script anew.",
        )


def record_of(
    runner: PersistentRunner, feed: Feed, validation: Feed | None, **asked: Any
) -> FitRecord:
    """What a checkpoint knows of a ``fit`` beside its state.

    Args:
        runner: which is going to train.
        feed: the training data.
        validation: what is evaluated after epochs.
        asked: arguments of the ``fit``.
    """
    model: Any = runner.model.model
    loss = None if model._compile_loss is None else said(model._compile_loss._user_loss)
    return FitRecord(
        epochs=0 if asked["initial_epoch"] else runner._epochs_trained,
        steps=int(model.optimizer._iterations.value),
        asked={
            **asked,
            "batch_size": feed.batch_size,
            "steps_per_epoch": feed.steps_per_epoch,
            "seed": runner.seed,
            "data": fingerprint(feed.source),
            "validation_data": None if validation is None else fingerprint(validation.source),
            "loss": loss,
            "optimizer": type(model.optimizer).__name__,
        },
    )
