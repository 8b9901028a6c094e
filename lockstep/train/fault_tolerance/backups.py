"""Backups: from time to time a copy of a whole training in this process's memory, to return to.

A process that is killed while it updates its slice leaves weights of which some slices are a step
ahead. Then, and where what a dead process alone knew is lost, the training is put back to its last
backup. With ``fit(restarts=N)`` it goes on from there: steps that were made before are made again,
on the same batches, with the same random numbers. Callbacks are not called for them again; what
they have decided then is kept in a journal, and decided again.

The first process of a host has all of it mapped, or gets it as for a checkpoint, and copies alone:
between two steps nothing changes until it comes to the next update. So a backup needs no protocol:
while it is written the training itself is whole. If this process is killed the backup goes with it,
but so do all others; that is what checkpoints on a disk are for
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
from lockstep.train.callbacks.rank_sync import Resume
from lockstep.train.checkpointing.training_state import TrainingState
from lockstep.train.fault_tolerance.overhead_budget import OverheadBudget
from lockstep.train.input.stream_broadcast import SharedStream
from lockstep.units import format_bytes

_T = TypeVar("_T")

# Part of the free memory that they may take where nobody has asked for restarts.
_UNASKED_PART = 0.5
# Batches of a stream that are kept to be used again, before they are worth a backup.
_MOST_KEPT_BYTES = 1 << 28
# Restarts from one place that nobody counts: more, and processes die of what they do there.
_MOST_FREE = 100


@dataclass
class Journal:
    """What callbacks were asked since the last backup, and have answered.

    Attributes:
        is_kept: answers are kept; else everybody is asked each time.
    """

    is_kept: bool
    _answers: list[Any] = field(default_factory=list)
    _next: int = 0

    @property
    def is_read(self) -> bool:
        """Whether what comes next was there before."""
        return self._next < len(self._answers)

    def once(self, ask: Callable[[], _T]) -> _T:
        """Ask, or what was answered here before."""
        if not self.is_kept:
            return ask()
        if not self.is_read:
            self._answers.append(ask())
        self._next += 1
        answer: _T = self._answers[self._next - 1]
        return answer

    def begin_anew(self) -> None:
        """From here on, which is where a backup is taken."""
        self._answers.clear()
        self._next = 0

    def rewind(self) -> None:
        """Everything will be asked again, from where the backup was taken."""
        self._next = 0


@dataclass(frozen=True, kw_only=True)
class Backup:
    """A training at one moment.

    Attributes:
        state: all but what callbacks keep.
        resume: where to go on.
    """

    state: TrainingState
    resume: Resume

    @property
    def last_step(self) -> int:
        """Number of the last step made."""
        return int(self.state.position["steps"]) - 1


class Backups:
    """Takes and has the backup of one ``fit``.

    Args:
        state: tells what the training consists of now.
        put_back: has the training be so.
        release_pages: called after a copy, which has touched memory of other ranks.
        streams: that it reads.
        restarts: how often to go on after the loss of a process.
        is_asked: there must be backups; None where there must if there may be restarts.

    Attributes:
        journal: of callbacks, since the last one.
        restarts_left: of these.
    """

    def __init__(
        self,
        state: Callable[[], TrainingState],
        put_back: Callable[[TrainingState], None],
        release_pages: Callable[[], None],
        streams: Sequence[SharedStream],
        restarts: int,
        *,
        is_asked: bool | None = None,
    ) -> None:
        self._state = state
        self._put_back = put_back
        self._release_pages = release_pages
        self._streams = streams
        self._last: Backup | None = None
        self._before: TrainingState | None = None  # whose memory the next one takes
        self._waits = False  # for the end of a step to take the first
        self._pace = OverheadBudget()
        self.restarts = self.restarts_left = restarts
        self.is_asked = restarts > 0 if is_asked is None else is_asked
        self._last_place: object = None  # of restarts that nobody counts
        self._num_free = 0  # of those from there
        self.journal = Journal(is_kept=self.is_asked)
        if self.is_asked:
            for stream in streams:
                stream.keep()

    @property
    def is_due(self) -> bool:
        """Whether to take another."""
        if self._last is None or self.journal.is_read:
            return self._waits
        kept_bytes = sum(stream.kept_bytes for stream in self._streams)
        return self._pace.is_due or kept_bytes > _MOST_KEPT_BYTES

    def wait(self) -> None:
        """Take the first one after a step, when ranks have taken the memory that they need."""
        self._waits = True

    def take(self, resume: Resume | None = None) -> None:
        """Copy the training as it is now.

        Args:
            resume: where to go on; None for where the training says that it stands.

        Raises:
            CheckpointError, DeviceError: something cannot be copied, or there is no memory for it,
                and restarts were asked for.
        """
        began = time.monotonic()
        self._last = None
        self._waits = False
        try:
            now = self._state()
        except CheckpointError:
            if self.is_asked:
                raise
            return  # an error will say what is lost
        if not self._finds_room(now):
            self._before = None
            return
        with torch.no_grad():
            state = now.copied(None if self._before is None else self._before.parts())
        self._before = state
        self._release_pages()
        if resume is None:
            place = state.position["fit"]
            resume = Resume(
                place["epoch"],
                True,
                batch=place["batch"],
                so_far=place["so_far"],
                replicas=place["replicas"],
            )
        self._last = Backup(state=state, resume=resume)
        self.journal.begin_anew()
        for stream in self._streams:
            stream.mark()
        self._pace.note(began)

    def _finds_room(self, state: TrainingState) -> bool:
        needed = _num_bytes(state) - (0 if self._before is None else _num_bytes(self._before))
        free = free_memory() if needed > 0 else None
        if free is None or needed <= free.num_bytes * (1 if self.is_asked else _UNASKED_PART):
            return True
        if self.is_asked:
            raise DeviceError(
                f"With restarts={self.restarts} a copy of the training takes "
                f"{format_bytes(needed)} of memory.",
                received=free,
                fix="Free memory or raise the limit by as much, or pass restarts=0.",
            )
        return False

    def put_back(self) -> Backup | None:
        """Have the training be as it was; None where there is no backup."""
        if self._last is not None:
            self._put_back(self._last.state)
        return self._last

    @property
    def last_step(self) -> int | None:
        """That of the last one; None without one."""
        return None if self._last is None else self._last.last_step

    def spend(self, place: object, *, is_free: bool) -> bool:
        """Use up a restart, or none where what was lost is there twice; False if none is left.

        Args:
            place: from which to go on.
            is_free: it is there twice.
        """
        if is_free:
            self._num_free = self._num_free + 1 if place == self._last_place else 1
            self._last_place = place
            return self._num_free <= _MOST_FREE
        if not self.restarts_left:
            return False
        self.restarts_left -= 1
        return True

    def restart(self) -> Backup | None:
        """Put everything back, to go on from there; None where that cannot be."""
        if self.put_back() is None:
            return None
        self.journal.rewind()
        for stream in self._streams:
            stream.rewind()
        return self._last

    def drop(self) -> None:
        """The last one is of no more use, since more has changed than it knows of."""
        self._last = None


def _num_bytes(state: TrainingState) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(state.parts()))
