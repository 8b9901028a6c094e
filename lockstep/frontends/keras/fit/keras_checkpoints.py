"""The checkpoints of a Keras model's ``fit``, which begin and end with Keras's callbacks."""

from collections.abc import Callable, Iterator
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
from lockstep.train.checkpointing.memory_checkpoints import MemoryCheckpoints
from lockstep.train.history import History
from lockstep.train.resume.fit_checkpoints import FitCheckpoints
from lockstep.train.resume.fit_facts import Facts


class KerasCheckpoints(FitCheckpoints):
    """The checkpoints of a Keras model's ``fit``."""

    @contextmanager
    def around_fit(
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
        runner, is_chief = self._runner, self._runner.is_chief
        files = None if checkpoint is None else checkpoint.files
        with self.kept(
            files, None, memory, options.epochs, options.restarts, shows=verbose
        ) as writer:
            if writer is None:
                yield None
                return
            if writer.found is not None and not is_chief:  # callbacks are on host 0
                own_part = replace(writer.found.state, callbacks=[])
                writer.found = replace(writer.found, state=own_part)
            epochs = 0 if options.initial_epoch else runner.epochs_trained
            steps = int(runner.front_end.optimizer._iterations.value)
            self.state.callbacks = checkpointed_callbacks(callbacks) if is_chief else []
            try:
                yield self.resume_found(writer, make_facts, epochs, steps)
            finally:
                self.state.callbacks, self.state.resumed = [], None

    def begin_callbacks(self, restarts: int) -> None:
        """Callbacks' ``on_train_begin`` has been called."""
        for each in self.state.callbacks:
            assert isinstance(each, CheckpointedCallback)
            each.begin()
        if self.state.resumed is None and restarts:
            self.keep_beginning()

    def _needs_local(self, restarts: int) -> bool | None:
        """See the base; copies are taken only for restarts.

        Raises:
            OptionError: every replica has its own optimizer.
        """
        traits = self._runner.maker().traits
        if not (restarts or traits.outlives_servers):
            return None
        if traits.is_local_sgd:
            raise OptionError(
                "Every replica has an optimizer of its own, and copies for restarts have only one.",
                received="Restarts under LocalSGDStrategy",
                fix="Use MirroredStrategy; or a Checkpoint, and start the script again.",
            )
        return super()._needs_local(restarts)
