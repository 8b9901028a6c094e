"""The state of a training as a whole, and the position in a ``fit`` from which it resumes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from lockstep.errors import CheckpointError, OptionError
from lockstep.train.callbacks.callback import Callback, acting
from lockstep.train.callbacks.driver import TaskDriver
from lockstep.train.checkpointing.fit_position import FitPosition
from lockstep.train.checkpointing.run_state import (
    callback_states,
    check_state,
    module_states,
    set_callback_states,
    set_module_states,
)
from lockstep.train.checkpointing.training_state import TrainingState, copied
from lockstep.train.history import History
from lockstep.train.input.data_adapter import DataPipeline
from lockstep.train.input.stream_broadcast import SharedStream
from lockstep.train.runtime.runner import Runner


class TrainerState:
    """The whole state of what a runner trains: takes it, sets it, and resumes from it.

    Args:
        runner: trains.
        callbacks: called during every training; they have a part of the state.

    Attributes:
        callbacks: the present ones.
        resumed: a state from within a ``fit``, from which the next one resumes; None without.
        recorded: the position in the ``fit`` at which callbacks are called; None if training cannot
            resume there.
        load: has ranks load what they divide of that state; None if it is all here.
        num_shares_before: of the checkpoint it is from, until the user is informed.
    """

    def __init__(self, runner: Runner, callbacks: Sequence[Callback] = ()) -> None:
        self.runner = runner
        self.callbacks = list(callbacks)
        self.resumed: TrainingState | None = None
        self.load: Callable[[], None] | None = None
        self.num_shares_before: int | None = None
        self._first_epoch: int | None = None  # epochs before the present fit; None outside of one
        self.recorded: FitPosition | None = None
        self._history = History()  # up to that position

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "callbacks": [], "resumed": None, "load": None, "recorded": None}

    @property
    def own_callbacks(self) -> list[Callback]:
        """The callbacks, in the process of rank 0; elsewhere none."""
        return self.callbacks if self.runner.is_chief else []

    @property
    def stop_training(self) -> bool:
        """True if training ends after the step under way."""
        return self.runner.front_end.stop_training

    @property
    def _schedule(self) -> Any:
        return self.runner.front_end.schedule

    def record_position(self, position: FitPosition | None, history: History) -> None:
        """Called by the driver of a ``fit``: the position of the next callbacks."""
        self.recorded, self._history = position, history

    @property
    def is_fitting(self) -> bool:
        """True within a ``fit``."""
        return self._first_epoch is not None

    def start_of(self, feed: DataPipeline, first: int = 0) -> FitPosition:
        """Where the next ``fit`` begins.

        Args:
            feed: its training data.
            first: the epoch, unless it resumes another ``fit``.

        Raises:
            OptionError: it resumes another ``fit`` with another kind of data, or batch size.
        """
        if self.resumed is None:
            return FitPosition(first)
        place, is_stream = self.resumed.position["fit"], isinstance(feed.source, SharedStream)
        if is_stream != (place.get("read") is not None):
            kinds = ["arrays or map-style data", "data that can only be iterated"]
            raise OptionError(
                f"A fit must resume with the data it was begun with: {kinds[not is_stream]}.",
                received=kinds[is_stream],
                fix="Give fit the arguments that it had.",
            )
        if place["batch_size"] != feed.batch_size:
            raise OptionError(
                "A fit must resume with the batch size it was begun with.",
                received=f"batch_size={feed.batch_size} after batches of {place['batch_size']}",
                fix="Give fit the arguments that it had.",
            )
        return FitPosition.of(place)

    def read_again(
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
        used = None if self.resumed is None else self.resumed.position["fit"].get("read")
        for epoch in range(first, start.epoch):  # alternately: they may share a generator
            if isinstance(feed.source, SharedStream):
                feed.source.skip(epoch)
            for stream, epochs in others:
                if epoch in epochs and isinstance(stream, SharedStream):
                    stream.skip(epoch)
        if isinstance(feed.source, SharedStream) and used is not None:
            feed.source.skip(start.epoch, start.batch)
            feed.source.check_used(used)

    def continue_fit(self, driver: TaskDriver, start: FitPosition) -> None:
        """After ``on_train_begin``, set all to the state from which the ``fit`` resumes."""
        state, self.resumed = self.resumed, None
        if state is None:
            return
        if start.is_begun:
            driver.begin_epoch(start.epoch)
        self._set_whole(state)
        load, self.load = self.load, None
        if load is not None and self.runner.job_context.from_chief(
            bool(acting(self.own_callbacks, "on_train_begin"))
        ):
            load()  # they may have changed the weights
        place = copied(state.position["fit"])
        driver.history = History(place["history"], place["epochs"])

    @contextmanager
    def fitting(self) -> Iterator[None]:
        """Within the block a ``fit`` is under way."""
        self._first_epoch = self.runner.epochs_trained
        try:
            yield
        finally:
            self._first_epoch = self.recorded = None

    def resume_from(self, state: TrainingState) -> None:
        """Set all to a state, from which the next ``fit`` resumes.

        Raises:
            CheckpointError: it does not fit; nothing is changed then.
        """
        has_schedule = self._schedule is not None
        check_state(state, self.runner.forms(), self.callbacks, has_schedule=has_schedule)
        self._set_whole(state)
        self.load = None
        self.resumed = state if state.position["fit"] is not None else None

    def position(self) -> dict[str, Any]:
        """The training's progress, for its state.

        Raises:
            CheckpointError: within a ``fit``, where training cannot resume.
        """
        if not self.is_fitting:
            place = None if self.resumed is None else self.resumed.position["fit"]
            epochs, steps = self.runner.epochs_trained, self.runner.steps_trained
            return {"epochs": epochs, "steps": steps, "fit": place}
        if self.recorded is None or not self.recorded.is_lasting:
            raise CheckpointError(
                "Within a fit, a callback can take the training's state in on_epoch_end, and in "
                "on_train_batch_end if its takes_state() has returned True; with data that can "
                "only be iterated this needs fit(checkpoint=...).",
                received="state_dict elsewhere",
                fix="Call it there, or after fit.",
            )
        return self._position_in_fit()

    def _position_in_fit(self) -> dict[str, Any]:
        assert self.recorded is not None
        fit = {
            **self.recorded.tree(),
            "batch_size": self.runner.batch_size,
            "history": self._history.history,
            "epochs": self._history.epoch,
        }
        steps = self.runner.steps_trained + self.recorded.num_steps
        return {"epochs": self._first_epoch, "steps": steps, "fit": fit}

    def whole(self, position: dict[str, Any] | None = None) -> TrainingState:
        """The whole state, with callbacks and schedule of host 0; no copy.

        Args:
            position: the training's progress; None is the present one.

        Raises:
            CheckpointError: it cannot be written.
        """
        self.runner.session.check_whole(self.runner.model)
        state = self._at(position or self.position())
        own = callback_states(self.own_callbacks), state.schedule
        callbacks, schedule = self.runner.job_context.from_chief(own)
        state = replace(state, callbacks=callbacks, schedule=schedule)
        state.flat()  # raises at once if it cannot be written
        return state

    def copied(
        self, state: TrainingState | None = None, before: TrainingState | None = None
    ) -> TrainingState:
        """A copy of a present state.

        Args:
            state: the present one; None for the whole.
            before: an earlier copy, whose memory is overwritten; None for new memory.
        """
        copy = (state or self.whole()).copied(before)
        self.runner.session.stores.release_pages()  # which hold memory of other ranks
        return copy

    def take(self) -> TrainingState:
        """A copy of the whole state, on all processes, which call it together."""
        self.check_not_averaged("state_dict")
        return self.runner.call("state_dict", self.copied)

    def in_fit(self) -> TrainingState:
        """The state within a ``fit``, without callbacks; no copy."""
        return self._at(self._position_in_fit())

    def present(self) -> TrainingState:
        """The present state, without callbacks and schedules; no copy."""
        state = self.runner.state()
        self.runner.session.stores.release_pages()
        return state

    def _at(self, position: dict[str, Any]) -> TrainingState:
        return replace(
            self.runner.state(),
            position=position,
            residuals=self._residuals_of_all(),
            modules=module_states(self.runner.model),
            schedule=None if self._schedule is None else self._schedule.state_dict(),
        )

    def _residuals_of_all(self) -> dict[str, Any]:
        """The residuals of all hosts; within a ``fit`` those that its driver has recorded."""
        job_context = self.runner.job_context
        own = self.runner.residuals.state(job_context.host)
        if self.is_fitting:
            recorded = None if self.recorded is None else self.recorded.residuals
            return own if recorded is None else recorded
        return {host: one for each in job_context.from_all(own) for host, one in each.items()}

    def _set_whole(self, state: TrainingState) -> None:
        self.set_all_but_callbacks(state)
        if self.runner.is_chief:
            set_callback_states(self.callbacks, state.callbacks)

    def set_all_but_callbacks(self, state: TrainingState) -> None:
        """Set all but the callbacks to a state, which is not changed."""
        self.runner.set_state(state)
        trained = set(state.trained)
        for name, parameter in self.runner.model.named_parameters():
            parameter.requires_grad_(name in trained)
        set_module_states(self.runner.model, state.modules)
        if self._schedule is not None:
            self._schedule.load_state_dict(copied(state.schedule))
        self.runner.session.stores.release_pages()

    def note_shares(self) -> str:
        """A warning if the number of shares is not the checkpoint's; else ""."""
        before, self.num_shares_before = self.num_shares_before, None
        now = self.runner.plan.num_shares
        if before in (None, now):
            return ""
        return (
            f"The checkpoint has num_shares={before}, and this training num_shares={now}: sums are "
            "rounded differently, and layers that draw random numbers draw others."
        )

    def check_not_averaged(self, method: str) -> None:
        """Refuse to change weights within ``averaged()``, which restores them at its end."""
        averages = self.runner.update_config.averages
        if averages is not None and averages.is_applied:
            raise OptionError(
                "Within averaged() the model has the averaged weights: changes to them would be "
                "lost at its end.",
                received=method,
                fix="Call it after the block.",
            )
