"""A runner of Keras models that writes checkpoints, and resumes from them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from lockstep.errors import OptionError
from lockstep.frontends.keras.fit.checkpoints import (
    Checkpoint,
    CheckpointedCallback,
    checkpointed_callbacks,
)
from lockstep.frontends.keras.fit_options import FitOptions
from lockstep.frontends.keras.optim.optimizer_copy import options_of, set_options
from lockstep.plan.makers.data_parallel import Maker
from lockstep.train.callbacks.callback import Callback
from lockstep.train.callbacks.interrupt import held_termination
from lockstep.train.checkpointing.checkpoints import CheckpointWriter
from lockstep.train.checkpointing.memory_checkpoints import MemoryCheckpoints
from lockstep.train.checkpointing.training_state import TrainingState
from lockstep.train.fault_tolerance.lost_hosts import check_host_restarts, resumed_from_newest
from lockstep.train.fault_tolerance.run_record import RunRecord
from lockstep.train.history import History
from lockstep.train.logging.progress import OutputConsole
from lockstep.train.resume.differences import Difference
from lockstep.train.resume.fit_facts import Facts
from lockstep.train.resume.fit_record import Found
from lockstep.train.resume.resuming_runner import ResumingRunner


class CheckpointRunner(ResumingRunner):
    """A runner whose ``fit`` may have checkpoints.

    Attributes:
        keeper: writes the checkpoints of the current ``fit``; None without.
        record: of that ``fit``; None without.
    """

    model: Any
    callbacks: list[Callback]
    schedule = None
    keeper: CheckpointWriter | None = None
    record: RunRecord | None = None

    @property
    def stop_training(self) -> bool:
        """Whether a callback has ended training."""
        return bool(self.model.model.stop_training)

    @contextmanager
    def checkpointed(
        self,
        checkpoint: Checkpoint | None,
        make_facts: Callable[[], Facts],
        callbacks: Any,
        options: FitOptions,
        memory: MemoryCheckpoints,
        verbose: Any,
    ) -> Iterator[History | None]:
        """Within the block a ``fit`` has checkpoints; gives its history if it had ended before.

        Args:
            checkpoint: where they are written; None for none.
            make_facts: returns the facts of this call of ``fit``.
            callbacks: Keras's list of them.
            options: of ``fit``.
            memory: checkpoints of this process in memory.
            verbose: 0 is silent.

        Raises:
            CheckpointError: the checkpoint is of another ``fit``, or not complete.
            OptionError: training could not be resumed after a process was lost.
        """
        context, restarts = self._job_context, options.restarts
        has_checkpoint = checkpoint is not None
        check_host_restarts(
            context.hosts, restarts, has_checkpoint=has_checkpoint, reach=context.reach
        )
        with ExitStack() as stack:
            stack.enter_context(self._recorded(checkpoint))
            if checkpoint is None:
                yield None
                return
            is_chief = self._is_chief
            tell = OutputConsole(quiet=not (verbose and is_chief)).tell
            termination = stack.enter_context(held_termination())
            keeper = CheckpointWriter(checkpoint.files, termination, memory, options.epochs, tell)
            stack.enter_context(
                resumed_from_newest(keeper, context.hosts, restarts, is_chief=is_chief)
            )
            epochs = 0 if options.initial_epoch else self._epochs_trained
            steps = int(self.model.model.optimizer._iterations.value)
            keeper.record = record = self._record_of(memory, make_facts, epochs, steps)
            keeper.set_trainer(self)  # type: ignore[arg-type]  # it has the attributes that are used
            self.keeper, self.callbacks = (
                keeper,
                checkpointed_callbacks(callbacks) if self._is_chief else [],
            )
            try:
                if (ended := self._resume_found(keeper)) is not None:
                    yield ended
                    return
                if self._resumed is not None:
                    keeper.begin_at(self._resumed.position["steps"] - record.steps)
                yield None
            finally:
                self.keeper, self.callbacks, self._resumed = None, [], None

    @contextmanager
    def _recorded(self, checkpoint: Checkpoint | None) -> Iterator[None]:
        """Within the block a record is written, beside the checkpoints or where the user says."""
        self.record = self._record_in(
            None, None if checkpoint is None else checkpoint.files.directory
        )
        try:
            with self.record.kept(self.strategy):
                yield
        finally:
            self.record = None

    def _set_new_options(self, found: Found, asked: Facts, taken: Sequence[Difference]) -> None:
        optimizer = self.model.model.optimizer
        names = {one.option for one in taken if one.name.startswith("optimizer.")}
        new = {name: asked[f"optimizer.{name}"] for name in options_of(optimizer) if name in names}
        set_options(optimizer, {**options_of(optimizer), **new})
        self.seed = asked["seed"]

    def _own_part(self, state: TrainingState) -> TrainingState:
        """Callbacks are on host 0."""
        return state if self._is_chief else replace(state, callbacks=[])

    def begin_checkpoints(self, restarts: int) -> None:
        """Callbacks' ``on_train_begin`` has been called."""
        for each in self.callbacks:
            assert isinstance(each, CheckpointedCallback)
            each.begin()
        if self.keeper is not None and self._resumed is None and restarts:
            self._keep_beginning(self.keeper)

    def finish_checkpoints(self, history: History) -> None:
        """Callbacks' ``on_train_end`` has been called: write the last checkpoint."""
        if self.keeper is not None:
            self._finish(self.keeper, history)


def check_restartable(maker: Maker) -> None:
    """Check that one process has the whole training, which copies in memory need.

    Args:
        maker: of its Plan.

    Raises:
        OptionError: every replica has its own optimizer.
    """
    if maker.trains_apart:
        raise OptionError(
            "Every replica has an optimizer of its own, and copies for restarts have only one.",
            received="Restarts under LocalSGDStrategy",
            fix="Use MirroredStrategy; or a Checkpoint, and start the script again.",
        )
