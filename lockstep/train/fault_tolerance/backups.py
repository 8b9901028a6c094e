"""Backups: periodic copies of a whole training in this process's memory, to restore after a fault.

A process that is killed while it updates its slice leaves weights of which some slices are a step
ahead. Then, and if a lost process alone had a part of the state, the training is restored from its
last backup. With ``fit(restarts=N)`` it resumes from there: it repeats the steps since, on the same
batches, with the same random numbers. Callbacks are not called for them again; a journal has their
decisions, which are repeated.

The first process of a host maps the whole training, or gathers it as for a checkpoint, and copies
it alone: between two steps nothing changes until this process reaches the next update. So a backup
needs no protocol: while it is written the training itself is consistent. If this process is killed,
the backup is lost, and all other processes end, too: that is what checkpoints on a disk are for
(``train.checkpointing.checkpoints``).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from lockstep.cluster.memory_limits import free_memory
from lockstep.data.trees import tensors_of
from lockstep.errors import CheckpointError, DeviceError
from lockstep.train.checkpointing.fit_position import FitPosition
from lockstep.train.checkpointing.trainer_state import TrainerState
from lockstep.train.checkpointing.training_state import TrainingState
from lockstep.train.fault_tolerance.overhead_budget import OverheadBudget
from lockstep.train.input.stream_broadcast import SharedStream
from lockstep.units import format_bytes

_T = TypeVar("_T")

# Part of the free memory that backups may take if the user did not ask for restarts.
_OPTIONAL_MEMORY_PART = 0.5
# Batches of a stream to keep for repetition before the next backup is taken.
_MAX_KEPT_BYTES = 1 << 28
# Free restarts from one place: if there are more, what is done there kills processes.
_MAX_FREE = 100


@dataclass
class Journal:
    """The answers of callbacks since the last backup, to repeat them after a restart.

    Attributes:
        is_kept: True to keep answers; else callbacks are asked each time.
    """

    is_kept: bool
    _answers: list[Any] = field(default_factory=list)
    _next: int = 0

    @property
    def is_replaying(self) -> bool:
        """True if the next answer is a repetition."""
        return self._next < len(self._answers)

    def once(self, ask: Callable[[], _T]) -> _T:
        """The answer given here before, or else that of ``ask``."""
        if not self.is_kept:
            return ask()
        if not self.is_replaying:
            self._answers.append(ask())
        self._next += 1
        answer: _T = self._answers[self._next - 1]
        return answer

    def clear(self) -> None:
        """Drop all answers: a backup is taken here."""
        self._answers.clear()
        self._next = 0

    def rewind(self) -> None:
        """Repeat the answers from the backup on."""
        self._next = 0


@dataclass(frozen=True, kw_only=True)
class Backup:
    """A training at one moment.

    Attributes:
        state: all but the callbacks' states.
        resume: where to resume.
    """

    state: TrainingState
    resume: FitPosition

    @property
    def last_step(self) -> int:
        """Number of the last step made."""
        return int(self.state.position["steps"]) - 1


class Backups:
    """Takes and keeps the backup of one ``fit``.

    Args:
        state: of the training; None to take no backups.
        streams: that the training reads.
        restarts: allowed after the loss of a process.
        is_required: there must be backups.

    Attributes:
        journal: of callbacks, since the last backup.
        restarts_left: of those allowed.
    """

    def __init__(
        self,
        state: TrainerState | None = None,
        streams: Sequence[SharedStream] = (),
        restarts: int = 0,
        *,
        is_required: bool = False,
    ) -> None:
        self._state = state
        self._streams = streams
        self._last: Backup | None = None
        self._is_waiting = False  # for the end of a step, to take the first
        self._budget = OverheadBudget()
        self.restarts = self.restarts_left = restarts
        self.is_required = is_required
        self._last_free_place: object = None  # of a free restart
        self._num_free = 0  # free restarts from there
        self.journal = Journal(is_kept=self.is_required)
        if self.is_required:
            for stream in streams:
                stream.keep()

    @property
    def are_taken(self) -> bool:
        """False for a ``fit`` without backups."""
        return self._state is not None

    @property
    def is_due(self) -> bool:
        """True if it is time for another backup."""
        if self._last is None or self.journal.is_replaying:
            return self._is_waiting
        kept_bytes = sum(stream.kept_bytes for stream in self._streams)
        return self._budget.is_due or kept_bytes > _MAX_KEPT_BYTES

    def wait(self) -> None:
        """Take the first backup after a step, when ranks have allocated the memory they need."""
        self._is_waiting = True

    def take(self, resume: FitPosition) -> None:
        """Copy the training as it is now.

        Args:
            resume: where to resume.

        Raises:
            CheckpointError, DeviceError: a part of the state cannot be copied, or does not fit into
                memory, and backups are required.
        """
        if self._state is None:
            return
        began = time.monotonic()
        # The backup is written to the memory of the one before.
        before = None if self._last is None else self._last.state
        self._last = None
        self._is_waiting = False
        try:
            now = self._state.in_fit()
        except CheckpointError:
            if self.is_required:
                raise
            return  # the error of a fault will say what is lost
        if not self._has_memory_for(now, before):
            return
        with torch.no_grad():
            state = now.copied(before)
        self._state.runner.session.stores.release_pages()  # which hold memory of other ranks
        self._last = Backup(state=state, resume=resume)
        self.journal.clear()
        for stream in self._streams:
            stream.mark()
        self._budget.note(began)

    def _has_memory_for(self, state: TrainingState, before: TrainingState | None) -> bool:
        needed = _num_bytes(state) - (0 if before is None else _num_bytes(before))
        free = free_memory() if needed > 0 else None
        part = 1 if self.is_required else _OPTIONAL_MEMORY_PART
        if free is None or needed <= free.num_bytes * part:
            return True
        if self.is_required:
            raise DeviceError(
                f"restarts={self.restarts} needs {format_bytes(needed)} of memory for a copy of "
                "the training.",
                received=free,
                fix="Free so much memory, raise the limit, or pass restarts=0.",
            )
        return False

    def put_back(self) -> int | None:
        """Restore the training from the backup; returns its last step, None if there is none."""
        if self._state is not None and self._last is not None:
            self._state.set_all_but_callbacks(self._last.state)
        return self.last_step

    @property
    def last_step(self) -> int | None:
        """The last step in the backup; None without one."""
        return None if self._last is None else self._last.last_step

    def spend(self, place: object, *, is_free: bool) -> bool:
        """Use up a restart; False if none is left.

        Args:
            place: where training will resume.
            is_free: the lost process had a replica, so the restart does not count.
        """
        if is_free:
            self._num_free = self._num_free + 1 if place == self._last_free_place else 1
            self._last_free_place = place
            return self._num_free <= _MAX_FREE
        if not self.restarts_left:
            return False
        self.restarts_left -= 1
        return True

    def restart(self) -> Backup | None:
        """Restore everything, to resume from the backup; None if there is none."""
        if self.put_back() is None:
            return None
        self.journal.rewind()
        for stream in self._streams:
            stream.rewind()
        return self._last

    def drop(self) -> None:
        """Forget the backup: the training has changed in a way that it cannot restore."""
        self._last = None


def _num_bytes(state: TrainingState) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(state.parts()))
