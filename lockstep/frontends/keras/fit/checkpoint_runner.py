"""A runner of Keras models that writes checkpoints, and resumes from them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from lockstep.train.checkpointing.memory_checkpoints import MemoryCheckpoints
from lockstep.train.checkpointing.training_state import TrainingState
from lockstep.train.fault_tolerance.lost_hosts import check_host_restarts
from lockstep.train.history import History
from lockstep.train.resume.differences import Difference
from lockstep.train.resume.fit_facts import Facts
from lockstep.train.resume.fit_record import Found
from lockstep.train.resume.resuming_runner import ResumingRunner


class CheckpointRunner(ResumingRunner):
    """A runner whose ``fit`` may have checkpoints."""

    model: Any
    callbacks: list[Callback]
    schedule = None

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
        files = None if checkpoint is None else checkpoint.files
        with (
            self._recorded(None, files),
            self._checkpointed(files, memory, options.epochs, restarts, shows=verbose) as keeper,
        ):
            if keeper is None:
                yield None
                return
            epochs = 0 if options.initial_epoch else self._epochs_trained
            steps = int(self.model.model.optimizer._iterations.value)
            self.callbacks = checkpointed_callbacks(callbacks) if self._is_chief else []
            try:
                yield self._resume_found(keeper, make_facts, epochs, steps)
            finally:
                self.callbacks, self._resumed = [], None

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
        if self._resumed is None and restarts:
            self._keep_beginning()

    def finish_checkpoints(self, history: History) -> None:
        """Callbacks' ``on_train_end`` has been called: write the last checkpoint."""
        self._finish(history)


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
