"""A Trainer's persistent state: weights in files, state_dict, and training that is undone."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch

from lockstep.checkpoint.weights import load_weights, save_weights
from lockstep.errors import OptionError
from lockstep.tracebacks import public_methods
from lockstep.train.callbacks.callback import Callback
from lockstep.train.callbacks.driver import TaskDriver
from lockstep.train.checkpointing.fit_position import FitPosition
from lockstep.train.checkpointing.run_state import (
    callback_states,
    check_state,
    module_states,
    no_place,
    set_callback_states,
    set_module_states,
    within_training,
)
from lockstep.train.checkpointing.training_state import TrainingState, copied
from lockstep.train.history import History
from lockstep.train.input.data_adapter import DataPipeline
from lockstep.train.input.stream_broadcast import SharedStream
from lockstep.train.optim.learning_rates import RunningSchedule
from lockstep.train.runtime.runner import Runner

_T = TypeVar("_T")


@public_methods
class PersistentRunner(Runner):
    """A runner whose state can be saved, loaded and rewound.

    Attributes:
        callbacks: called during every training.
        schedule: of the learning rate, or None.
    """

    callbacks: list[Callback]
    schedule: RunningSchedule | None
    _resumed: TrainingState | None = None
    """A state from within a ``fit``, from which the next one resumes."""
    _first_epoch: int | None = None
    """Epochs trained before the present ``fit``; None outside of one."""
    recorded: FitPosition | None = None
    """The position in it at which callbacks are called; None if training cannot resume there."""
    _history: History
    """Up to that position."""

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_resumed": None, "recorded": None}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model's weights and buffers, whole and by name, as safetensors.

        The file appears whole or not at all, with the permissions of the one that it replaces.
        On several hosts all call it, and host 0 writes.
        """
        with self._job_context.together("save") as hosts:
            self._initialize()
            if self._is_chief:
                save_weights(self.model, path)
            if hosts is not None:
                hosts.wait()  # so that the file exists for later calls, on a shared disk
        self._session.stores.release_pages()

    def load(self, path: str | os.PathLike[str]) -> None:
        """Read weights that ``save`` wrote under any strategy, into the model.

        On several hosts all call it, host 0 reads, and all get the weights.

        Raises:
            CheckpointError: the file is not valid, or names or shapes do not fit the model; nothing
                is changed then.
        """
        self._check_not_averaged("load")
        with self._job_context.together("load") as hosts:
            self._initialize()
            if self._is_chief or self._job_context.follower is not None:
                load_weights(self.model, path)
            if hosts is not None:
                hosts.share_values(self.model, None)

    def averaged(self) -> AbstractContextManager[None]:
        """Within ``with trainer.averaged():`` the model has the averaged weights.

        ``evaluate``, ``predict`` and ``save`` then use them. The trained weights come back after
        the block. Buffers are those of training.

        Raises:
            OptionError: nothing is averaged, or there was no update yet.
        """
        self._job_context.check_thread("averaged")
        averages = self._update_config.averages
        if averages is None:
            raise OptionError(
                "The Trainer does not average weights.",
                received="average=None",
                fix="Pass average=lockstep.EMA(0.999), for example.",
            )
        return averages.applied_to(self.model)

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
        return self.state_onto(None)

    def state_onto(self, before: Mapping[str, Any] | None) -> dict[str, Any]:
        """``state_dict()``, in the memory of an earlier one.

        Args:
            before: the one to overwrite; None for new memory.
        """
        self._check_not_averaged("state_dict")
        parts: dict[str, Any] = self._call("state_dict", lambda: self._copied_parts(before))
        return parts

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
        self._check_not_averaged("load_state_dict")
        with self._job_context.together("load_state_dict") as hosts:
            if self._job_context.is_nested:
                raise within_training()
            found = TrainingState.of(state)
            if hosts is not None:
                hosts.check_equal({"the state": found.digest()})
            self._resume_from(found)

    def record_position(self, position: FitPosition | None, history: History) -> None:
        """Called by the driver of a ``fit``: the position of the next callbacks."""
        self.recorded, self._history = position, history

    def _start(self, batch_size: int, *, is_stream: bool) -> FitPosition:
        """Where the next ``fit`` begins.

        Raises:
            OptionError: it resumes another ``fit`` with another kind of data, or batch size.
        """
        if self._resumed is None:
            return FitPosition()
        place = self._resumed.position["fit"]
        if is_stream != (place.get("read") is not None):
            kinds = ["arrays or map-style data", "data that can only be iterated"]
            raise OptionError(
                f"A fit must resume with the data it was begun with: {kinds[not is_stream]}.",
                received=kinds[is_stream],
                fix="Give fit the arguments that it had.",
            )
        if place["batch_size"] != batch_size:
            raise OptionError(
                "A fit must resume with the batch size it was begun with.",
                received=f"batch_size={batch_size} after batches of {place['batch_size']}",
                fix="Give fit the arguments that it had.",
            )
        return FitPosition.of(place)

    def _read_again(
        self, start: FitPosition, first: int, feed: DataPipeline, others: Sequence[Any]
    ) -> None:
        """Skip what the ``fit`` had read of its streams before.

        Args:
            start: where it resumes.
            first: the first epoch of the ``fit``.
            feed: the training data.
            others: other streams that were read, with the epochs after which.

        Raises:
            DataError: a stream gives other data than before.
        """
        used = None if self._resumed is None else self._resumed.position["fit"].get("read")
        for epoch in range(first, start.epoch):  # alternately: they may share a generator
            if isinstance(feed.source, SharedStream):
                feed.source.skip(epoch)
            for stream, epochs in others:
                if epoch in epochs and isinstance(stream, SharedStream):
                    stream.skip(epoch)
        if isinstance(feed.source, SharedStream) and used is not None:
            feed.source.skip(start.epoch, start.batch)
            feed.source.check_used(used)

    def _go_on(self, driver: TaskDriver, start: FitPosition) -> None:
        """After ``on_train_begin``, set all to the state from which the ``fit`` resumes."""
        state, self._resumed = self._resumed, None
        if state is None:
            return
        if start.is_begun:
            driver.begin_epoch(start.epoch)
        self._set_whole_state(state)
        place = copied(state.position["fit"])
        driver.history = History(place["history"], place["epochs"])

    @contextmanager
    def _fitting(self) -> Iterator[None]:
        self._first_epoch = self._epochs_trained
        try:
            yield
        finally:
            self._first_epoch = self.recorded = None

    def _resume_from(self, state: TrainingState) -> None:
        """Set all to a state, from which the next ``fit`` resumes.

        Raises:
            CheckpointError: it does not fit; nothing is changed then.
        """
        check_state(state, self._state(), self.callbacks, has_schedule=self.schedule is not None)
        self._set_whole_state(state)
        self._resumed = state if state.position["fit"] is not None else None

    def _position(self) -> dict[str, Any]:
        """The training's progress, for its state.

        Raises:
            CheckpointError: within a ``fit``, where training cannot resume.
        """
        if self._first_epoch is None:
            place = None if self._resumed is None else self._resumed.position["fit"]
            return {"epochs": self._epochs_trained, "steps": self._steps_trained, "fit": place}
        if self.recorded is None or not self.recorded.is_lasting:
            raise no_place()
        return self._position_in_fit()

    def _position_in_fit(self) -> dict[str, Any]:
        assert self.recorded is not None
        fit = {
            **self.recorded.tree(),
            "batch_size": self.batch_size,
            "history": self._history.history,
            "epochs": self._history.epoch,
        }
        steps = self._steps_trained + self.recorded.num_steps
        return {"epochs": self._first_epoch, "steps": steps, "fit": fit}

    def _copied_parts(self, before: Mapping[str, Any] | None = None) -> dict[str, Any]:
        state = self._whole_state().copied(before)
        state.flat()  # raises at once if it cannot be written
        self._session.stores.release_pages()
        return state.parts()

    def _whole_state(self) -> TrainingState:
        """The state with callbacks and schedule, which are those of host 0."""
        state = self._state_at(self._position())
        own = callback_states(self._own_callbacks), state.schedule
        callbacks, schedule = self._job_context.from_chief(own)
        return replace(state, callbacks=callbacks, schedule=schedule)

    def _state_at(self, position: dict[str, Any]) -> TrainingState:
        """The state without callbacks; no copy."""
        return replace(
            self._state(),
            position=position,
            residuals=self._residuals_of_all(),
            modules=module_states(self.model),
            schedule=None if self.schedule is None else self.schedule.state_dict(),
        )

    def _residuals_of_all(self) -> dict[str, Any]:
        """The residuals of all hosts; within a ``fit`` those that its driver has recorded."""
        own = self._residuals.state(self._job_context.host)
        if self._first_epoch is not None:
            recorded = None if self.recorded is None else self.recorded.residuals
            return own if recorded is None else recorded
        return {host: one for each in self._job_context.from_all(own) for host, one in each.items()}

    def _set_whole_state(self, state: TrainingState) -> None:
        self._set_state_but_callbacks(state)
        if self._is_chief:
            set_callback_states(self.callbacks, state.callbacks)

    def _set_state_but_callbacks(self, state: TrainingState) -> None:
        self._set_state(state)
        trained = set(state.trained)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name in trained)
        set_module_states(self.model, state.modules)
        if self.schedule is not None:
            self.schedule.load_state_dict(copied(state.schedule))
        self._session.stores.release_pages()

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """Undo the training of the block at its end, even after an error.

        It restores weights and buffers, the optimizer's slots and options, and the position in the
        orders and random streams; a schedule pauses within the block. So later training has the
        same bits as without the block. This needs memory for a second copy of weights and slots.
        """
        self._job_context.check_thread("rewound")
        with torch.inference_mode(False):  # the optimizer may get these tensors, to step them
            before = self._state().copied()
        resumed = self._resumed if self._first_epoch is None else None
        schedule, self.schedule = self.schedule, None  # the block sets its own rates
        try:
            yield
        finally:
            self.schedule = schedule
            with torch.inference_mode(False):
                self._set_state(before)
            self._resumed = resumed

    def same_everywhere(self, result: _T) -> _T:
        """Rank 0's value of ``result``, on all processes that a launcher has started.

        All call it. It may consist of numbers, texts, tensors, tuples, lists, dicts, dataclasses.
        """
        return self._call("same_everywhere", lambda: self._job_context.from_chief(result))

    # --- parts -----------------------------------------------------------------------------------

    @property
    def _own_callbacks(self) -> list[Callback]:
        """The callbacks, in the process of rank 0; elsewhere none."""
        return self.callbacks if self._is_chief else []

    def _check_not_averaged(self, method: str) -> None:
        """Refuse to change weights within ``averaged()``, which restores them at its end."""
        averages = self._update_config.averages
        if averages is not None and averages.is_applied:
            raise OptionError(
                "Within averaged() the model has the averaged weights: changes to them would be "
                "lost at its end.",
                received=method,
                fix="Call it after the block.",
            )
