"""What a Trainer's users do with its state: save, load and resume it, and undo training."""

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch

from lockstep.checkpoint.weights import save_weights
from lockstep.errors import CheckpointError, OptionError
from lockstep.tracebacks import public_methods
from lockstep.train.checkpointing.trainer_state import TrainerState
from lockstep.train.checkpointing.training_state import TrainingState
from lockstep.train.resume.weights_loading import load_everywhere
from lockstep.train.runtime.runner import Runner

_T = TypeVar("_T")


@public_methods
class StateMethods:
    """The methods of a Trainer for its state.

    Attributes:
        _runner: runs its tasks.
        _state: of that runner and the callbacks.
    """

    _runner: Runner
    _state: TrainerState

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model's weights and buffers, whole and by name, as safetensors.

        All processes that Lockstep has started here write what lies in memory that they share, each
        its part, and this one never has it all.

        The file appears whole or not at all, with the permissions of the one that it replaces. Its
        name must not end as files of other formats do: ".pt", ".h5", ".npz", ...
        On several hosts all call it, and host 0 writes.
        """
        with self._runner.job_context.together("save") as hosts:
            self._runner.initialize()
            self._runner.session.check_whole(self._runner.model)
            if self._runner.is_chief:
                save_weights(self._runner.model, path, self._runner.session.write_together)
            if hosts is not None:
                hosts.wait()  # so that the file exists for later calls, on a shared disk
        self._runner.session.stores.release_pages()

    def load(self, path: str | os.PathLike[str]) -> None:
        """Read weights that ``save`` wrote under any strategy, into the model.

        Where ranks divide the parameters, each reads its part; else this process reads all. On
        several hosts all call it, host 0 reads, and all get the weights; of divided parameters
        each rank reads its part, if all hosts share the folder.

        Raises:
            CheckpointError: the file is not valid, or names or shapes do not fit the model; nothing
                is changed then.
        """
        self._state.check_not_averaged("load")
        with self._runner.job_context.together("load"):
            load_everywhere(self._runner, path)

    def averaged(self) -> AbstractContextManager[None]:
        """Within ``with trainer.averaged():`` the model has the averaged weights.

        ``evaluate``, ``predict`` and ``save`` then use them. The trained weights come back after
        the block. Buffers are those of training.

        Raises:
            OptionError: nothing is averaged, or there was no update yet.
        """
        self._runner.job_context.check_thread("averaged")
        averages = self._runner.update_config.averages
        if averages is None:
            raise OptionError(
                "The Trainer does not average weights.",
                received="average=None",
                fix="Pass average=lockstep.EMA(0.999), for example.",
            )
        return averages.applied_to(self._runner.model)

    def state_dict(self) -> dict[str, Any]:
        """The whole state of this training, to resume it later, in another process.

        A dict of plain values and of tensors, which are copies: weights and buffers, the
        optimizer's slots and options, float32 copies, averages, the schedule, the loss scale, the
        seed, the numbers of epochs and steps, the states of callbacks. ``torch.save`` writes it,
        and ``torch.load(path, weights_only=True)`` reads it. See ``load_state_dict``.

        Callbacks may call it in ``on_epoch_end``, and in ``on_train_batch_end`` if their
        ``takes_state`` has returned True. On several hosts all call it, outside of callbacks.

        Raises:
            CheckpointError: the state of a scheduler, a callback or a module has other values; or a
                callback calls it where training cannot resume.
        """
        return self._state.take().parts()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state: training continues with the bits that it would have had.

        The same script must have made this Trainer; its strategy and number of devices may be
        others. If these have the same ``num_shares``, bits are equal, too. From a state that a
        callback has taken within a ``fit``, the next ``fit`` resumes, with the same arguments, from
        the next batch to the last of its epochs.

        On several hosts all call it, with the same state.

        Args:
            state: the result of ``state_dict``, which is not changed.

        Raises:
            CheckpointError: it is not a state, or does not fit; nothing is changed then.
        """
        self._state.check_not_averaged("load_state_dict")
        with self._runner.job_context.together("load_state_dict") as hosts:
            if self._runner.job_context.is_nested:
                raise CheckpointError(
                    "A state can be loaded between two calls of fit only.",
                    received="load_state_dict within a call, by a callback",
                    fix="Load it before fit.",
                )
            found = TrainingState.of(state)
            if hosts is not None:
                hosts.check_equal({"the state": found.digest()})
            self._state.resume_from(found)

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """Undo the training of the block at its end, even after an error.

        It restores weights and buffers, the optimizer's slots and options, and the position in the
        orders and random streams; a schedule pauses within the block. So later training has the
        same bits as without the block. This needs memory for a second copy of weights and slots.
        """
        self._runner.job_context.check_thread("rewound")
        with torch.inference_mode(False):  # the optimizer may get these tensors, to step them
            before = self._runner.state().copied()
        resumed = None if self._state.is_fitting else self._state.resumed
        front_end = self._runner.front_end
        schedule, front_end.schedule = front_end.schedule, None  # the block sets its own rates
        try:
            yield
        finally:
            front_end.schedule = schedule
            with torch.inference_mode(False):
                self._runner.set_state(before)
            self._state.resumed = resumed

    def same_everywhere(self, result: _T) -> _T:
        """Rank 0's value of ``result``, on all processes that a launcher has started.

        All call it. It may consist of numbers, texts, tensors, tuples, lists, dicts, dataclasses.
        """
        return self._runner.call(
            "same_everywhere", lambda: self._runner.job_context.from_chief(result)
        )
