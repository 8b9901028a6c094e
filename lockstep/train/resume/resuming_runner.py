"""A runner whose ``fit`` is kept: it goes on from checkpoints, has backups, and keeps a record."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from lockstep.checkpoint.storage import Folder
from lockstep.data.map_style.sources import Source
from lockstep.errors import OptionError
from lockstep.events import LOGGER
from lockstep.plan.makers.averaging import AveragedUpdate
from lockstep.train.checkpointing.checkpoints import CheckpointWriter
from lockstep.train.checkpointing.memory_checkpoints import MemoryCheckpoints
from lockstep.train.checkpointing.run_state import check_tensors
from lockstep.train.checkpointing.trainer_state import PersistentRunner
from lockstep.train.checkpointing.training_state import TrainingState, copied
from lockstep.train.fault_tolerance.backups import Backups
from lockstep.train.fault_tolerance.run_record import VARIABLE, RunRecord, checked_folder
from lockstep.train.history import History
from lockstep.train.input.stream_broadcast import SharedStream
from lockstep.train.resume.differences import Difference, differences, settle, told
from lockstep.train.resume.fit_facts import Facts
from lockstep.train.resume.fit_record import FitRecord, Found
from lockstep.train.runtime.helper_watchdog import STATE_OF_AVERAGE, what_is_left


class ResumingRunner(PersistentRunner):
    """See the module.

    Attributes:
        keeper: writes the checkpoints of the ``fit`` under way; None without.
    """

    keeper: CheckpointWriter | None = None
    _num_shares_before: int | None = None
    """Of the checkpoint from which training goes on, until the user is told."""
    _begun: dict[str, Any] | None = None
    """The schedule before the ``fit``."""

    def _record_of(
        self, memory: MemoryCheckpoints, make_facts: Callable[[], Facts], epochs: int, steps: int
    ) -> FitRecord:
        """What a checkpoint is to know of a ``fit``: what was asked of it before its first step.

        Args:
            memory: has the facts where the ``fit`` was begun before.
            make_facts: tells what the script asks.
            epochs: trained before the ``fit``.
            steps: made before it.
        """
        if memory.facts is None:
            schedule = None if self.schedule is None else copied(self.schedule.state_dict())
            memory.facts = make_facts(), schedule
        asked, self._begun = memory.facts
        asked = self._job_context.from_chief(asked)
        return FitRecord(epochs=epochs, steps=steps, asked=asked)

    @contextmanager
    def _kept(self, keeper: CheckpointWriter | None) -> Iterator[None]:
        """Within the block checkpoints are taken, after all that the user's callbacks do."""
        if keeper is None:
            yield
            return
        if self._resumed is not None:
            keeper.begin_at(self._resumed.position["steps"] - keeper.record.steps)
        callbacks, self.callbacks = self.callbacks, [*self.callbacks, keeper]
        self.keeper = keeper
        try:
            yield
        finally:
            self.callbacks, self.keeper = callbacks, None

    def _take_up_found(self, keeper: CheckpointWriter) -> History | None:
        """Go on from the checkpoint that was found, if one was; the history, if that was the end.

        Raises:
            CheckpointError: it is of another ``fit``, or the script has changed.
        """
        found, keeper.found = keeper.found, None
        if found is None:
            return None
        check_tensors(found.state, self._state())
        found.record.check_beginning(keeper.record)
        asked, now = found.record.asked, keeper.record.asked
        found = found.reaching(now["epochs"])
        differing = differences(asked, now)
        taken = settle(
            differing,
            keeper.on_difference,
            place=found.name,
            epochs=(asked["epochs"], now["epochs"]),
            in_epoch=found.place["batch"] > 0,
        )
        # What is kept is what the next checkpoint is compared with, too.
        kept = {one.name: asked[one.name] for one in differing if one not in taken}
        keeper.record = msgspec.structs.replace(keeper.record, asked={**now, **kept})
        self._take_up_new(self._own_part(found.state), found, keeper.record.asked, taken)
        if not found.is_written:  # host 0 has come again with an empty folder, for example
            keeper.write_found(found)
        line = _told(found, str(keeper.directory), taken)
        keeper.tell(line)
        if self._is_chief:
            LOGGER.info("%s", line)
        if found.record.is_finished:
            return History(found.record.history, found.record.epoch)
        self._num_shares_before = found.record.num_shares
        return None

    def _take_up_new(
        self, state: TrainingState, found: Found, asked: Facts, taken: Sequence[Difference]
    ) -> None:
        """Take a checkpoint up, but for what is to be as the script says.

        Args:
            state: of the checkpoint, as far as it is for this process.
            found: the checkpoint.
            asked: the facts of the script.
            taken: what is to be as it says.

        Raises:
            CheckpointError: it does not fit; nothing is changed then.
        """
        schedule = self.schedule
        if any(one.is_of_schedule for one in taken):  # the state's is of no use
            own = None if schedule is None else schedule.state_dict()
            state = replace(state, schedule=own)
        self._resume_from(state)
        if not taken:
            return
        self._set_new_options(found, asked, taken)
        if self._resumed is not None:
            now, position = self._state(), self._resumed.position
            place = {**position["fit"], "batch_size": asked["batch_size"]}
            self._resumed = replace(
                self._resumed,
                position={**position, "fit": place},
                options=copied(now.options),
                own=copied(now.own),
                random=now.random,
                schedule=None if schedule is None else copied(schedule.state_dict()),
            )

    def _set_new_options(self, found: Found, asked: Facts, taken: Sequence[Difference]) -> None:
        """Have what differs be as the script says.

        Args:
            found: the checkpoint, as which all is.
            asked: the facts of the script.
            taken: what differs.
        """
        raise NotImplementedError

    def _state_after_failure(self) -> str:
        """What a training has left that has ended between two steps; "" where that is plain."""
        if self.plan.num_ranks == 1:
            return ""
        is_averaged = isinstance(self.plan.update, AveragedUpdate)
        return STATE_OF_AVERAGE if is_averaged else what_is_left(self._steps_trained - 1)

    def note_shares(self) -> str:
        """What to tell the user of other shares than the checkpoint's; "" where they are alike."""
        before, self._num_shares_before = self._num_shares_before, None
        now = self.plan.num_shares
        if before in (None, now):
            return ""
        return (
            f"The checkpoint is of num_shares={before}, and this is num_shares={now}: sums are "
            "rounded otherwise, and layers that draw random numbers draw others."
        )

    def present_state(self) -> TrainingState:
        """What this training consists of now, but for callbacks and schedules; no copy."""
        state = self._state()
        self._session.stores.release_pages()
        return state

    def place_in_fit(self) -> dict[str, Any]:
        """Where in a ``fit`` callbacks are called, where another process could go on."""
        assert self._place is not None
        return self._place

    def _own_part(self, state: TrainingState) -> TrainingState:
        """Of a state that was found, what this process takes up."""
        return state

    def _keep_beginning(self, keeper: CheckpointWriter) -> None:
        """Where hosts may be lost, the others have something to go on from at any time."""
        hosts = self._job_context.hosts
        if hosts is not None and not hosts.is_one_process:
            parts = self._copied_parts()
            if self._is_chief:
                keeper.begin(parts)

    def _finish(self, keeper: CheckpointWriter, history: History) -> None:
        parts = self._copied_parts()
        if self._is_chief:
            keeper.finish(parts, history, self._plan)

    def _backups_of(
        self, sources: Iterable[Source | SharedStream], restarts: int
    ) -> Backups | None:
        """Copies of the training in memory; none where one process cannot have all of it."""
        hosts = self._job_context.hosts
        if hosts is not None and not hosts.is_one_process:
            if self._maker().outlives_servers:
                raise OptionError(
                    "Processes that a launcher has started are its to start again.",
                    received=f"replicas=2 under {hosts.place.launcher}",
                    fix="Start the script once, or leave `replicas` out and use a checkpoint.",
                )
            return None
        return Backups(
            lambda: self._state_at(self._place_in_fit()),
            self._set_state_but_callbacks,
            self._session.stores.release_pages,
            [source for source in sources if isinstance(source, SharedStream)],
            restarts,
            is_required=restarts > 0 or self._maker().outlives_servers,
        )

    def _record_in(
        self, asked: str | os.PathLike[str] | None, checkpoints: Folder | None
    ) -> RunRecord:
        """The record of a ``fit``: where it was asked for, beside checkpoints, or as always.

        None is kept in a store, where nothing can be added to a file. Host 0 keeps it; a ``fit``
        within a callback of another keeps none of its own.

        Raises:
            OptionError: the user has named what is no folder.
        """
        beside = checkpoints if isinstance(checkpoints, Path) else None
        if not self._is_chief or self._job_context.is_nested:
            return RunRecord(None)
        if asked is None and beside is not None:
            return RunRecord(beside, logs=True)
        named = asked or os.environ.get(VARIABLE)
        return RunRecord(checked_folder(named) if named else None, logs=True)


def _told(found: Found, directory: str, taken: Sequence[Difference]) -> str:
    """The line that tells where training goes on."""
    record = found.record
    if record.is_finished:
        num, asked = record.num_trained, record.asked["epochs"]
        epochs = f"{num} epoch{'s' if num != 1 else ''}"
        stopped = f" of {asked}, where a callback has ended it" if num < asked else ""
        return f"{directory} is complete ({epochs}{stopped}): nothing to do"
    epoch, step = found.place["epoch"] + 1, found.state.position["steps"] + 1
    new = f", with what is new: {told(taken)}" if taken else ""
    return f"Resuming from {found.name}: epoch {epoch}, step {step}{new}"
