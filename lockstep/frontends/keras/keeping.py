"""A runner of Keras models that writes checkpoints, and goes on from them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from lockstep.frontends.keras.checkpoints import Checkpoint, KeptCallback, kept
from lockstep.train.callbacks import Callback
from lockstep.train.checkpoints import FitRecord, Found, Keeper
from lockstep.train.ensemble import Resume
from lockstep.train.feeding import SharedStream
from lockstep.train.history import History
from lockstep.train.intake import Feed
from lockstep.train.interrupt import held_termination
from lockstep.train.likeness import said
from lockstep.train.persistence import PersistentRunner
from lockstep.train.same_data import fingerprint
from lockstep.train.training_state import TrainingState


class KeepingRunner(PersistentRunner):
    """A runner whose ``fit`` may be kept.

    Attributes:
        keeper: writes the checkpoints of the ``fit`` under way; None without.
    """

    model: Any
    callbacks: list[Callback]
    schedule = None
    keeper: Keeper | None = None

    @property
    def stop_training(self) -> bool:
        """Whether a callback wants training to end."""
        return bool(self.model.model.stop_training)

    @contextmanager
    def kept(
        self, checkpoint: Checkpoint | None, make_record: Callable[[], FitRecord], callbacks: Any
    ) -> Iterator[History | None]:
        """Within the block a ``fit`` is kept; gives its history, where it had ended before.

        Args:
            checkpoint: where; None to keep nothing.
            make_record: says what it is asked to do.
            callbacks: Keras's list of them.

        Raises:
            CheckpointError: what is there is of another ``fit``, or not whole.
        """
        if checkpoint is None:
            yield None
            return
        with ExitStack() as stack:
            is_alone = self._job_context.hosts is None
            keeper = Keeper(
                checkpoint.files, stack.enter_context(held_termination(is_alone=is_alone))
            )
            tree = stack.enter_context(keeper.opened()) if self._is_chief else None
            tree = self._job_context.from_chief(tree)
            found = None if tree is None else Found.of(tree)
            keeper.record = record = make_record()
            keeper.set_trainer(self)  # type: ignore[arg-type]  # it has what a keeper asks for
            self.keeper, self.callbacks = keeper, kept(callbacks) if self._is_chief else []
            try:
                if found is not None:
                    found.record.check_same(record)
                    self._take_up(self._own_part(found.state))
                    if found.record.is_finished:
                        yield History(found.record.history, found.record.epoch)
                        return
                if self._resumed is not None:
                    keeper.begin_at(self._resumed.position["steps"] - record.steps)
                yield None
            finally:
                self.keeper, self.callbacks, self._resumed = None, [], None

    def _own_part(self, state: TrainingState) -> TrainingState:
        """Callbacks are on host 0."""
        return state if self._is_chief else replace(state, callbacks=[])

    def begin_kept(self) -> None:
        """Callbacks' ``on_train_begin`` has been called."""
        for each in self.callbacks:
            assert isinstance(each, KeptCallback)
            each.begin()

    def finish_kept(self, history: History) -> None:
        """Callbacks' ``on_train_end`` has been called: write the last checkpoint."""
        if self.keeper is not None:
            parts = self._copied_parts()
            if self._is_chief:
                self.keeper.finish(parts, history, self._plan)

    def _read_again(self, start: Resume, first: int, feed: Feed, others: Sequence[Any]) -> None:
        """Read a stream up to where it was left.

        Args:
            start: where that is.
            first: the first epoch of the ``fit``.
            feed: the training data.
            others: what else was read, as the stream and the epochs after which.

        Raises:
            DataError: it gives something else.
        """
        used = None if self._resumed is None else self._resumed.position["fit"].get("read")
        for epoch in range(first, start.epoch):  # in turns: they may draw from one generator
            if isinstance(feed.source, SharedStream):
                feed.source.skip(epoch)
            for stream, epochs in others:
                if epoch in epochs and isinstance(stream, SharedStream):
                    stream.skip(epoch)
        if isinstance(feed.source, SharedStream) and used is not None:
            feed.source.skip(start.epoch, start.batch)
            feed.source.check_used(used)


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
