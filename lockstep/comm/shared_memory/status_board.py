"""The board: shared memory in which the ranks of a host publish their progress.

Each rank has a line that it alone writes: the number of barriers that it has entered, the tag of
the last row that it has published, its step. A rank that waits for another reads its line, yields
the core for a moment, then sleeps on the other's bell (a futex).

Plain stores are seen in order on x86-64. The futex call after each of them is a full barrier on
every architecture, so a waiter that was woken sees all that was written before.
"""

import ctypes
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from lockstep.channel.polling import LOOK_AROUND_SECONDS, Stopwatch
from lockstep.comm.shared_memory import futex
from lockstep.comm.shared_memory.shared_region import SharedRegion

LINE_BYTES = 256

# The phases of a step, for messages.
_PASSES = "forward", "backward"
_GATHERS = [f"gather in {phase}" for phase in _PASSES]
PHASES = ("", "reading", *_PASSES, "exchange", "update", "sync", *_GATHERS)
_NUMBERS = {phase: number for number, phase in enumerate(PHASES)}
_GATHER_IN = {_NUMBERS[phase]: _NUMBERS[f"gather in {phase}"] for phase in _PASSES}

# Numbers that a rank can publish at once.
_MAX_NUMBERS = 4

# Rank 0 can be so many announcements ahead of the slowest rank: between two steps, which have
# barriers, there are four at most.
_NUM_ANNOUNCEMENTS = 8

# Ranks mostly arrive within a fraction of a millisecond of each other, and waking one takes nearly
# as long. A waiting rank yields its core to any process that needs it.
_YIELDING_SECONDS = 0.001

# A rank that trains locally, and does not wait for others, checks them so often.
_GLANCE_SECONDS = 0.2


class _Line(ctypes.Structure):
    _fields_ = (
        ("bell", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
        ("barriers", ctypes.c_uint64),
        ("tag", ctypes.c_uint64),
        ("steps", ctypes.c_int64),  # number of the current step, from 1; 0 before the first
        ("halt", ctypes.c_uint64),
        ("relayed", ctypes.c_uint64),  # the tag up to which this rank has brought other hosts' rows
        # Of this rank's slice of the weights: 2 n + 1 while step n changes it, 2 n + 2 afterwards;
        # 0 before the first, -1 where there is no slice.
        ("update", ctypes.c_int64),
        ("phase", ctypes.c_uint64),  # its index in PHASES
        ("awaited", ctypes.c_uint64),  # the rank that it sleeps for, from 1; 0 for none
        ("waited", ctypes.c_double),  # seconds that it has slept
        ("meetings", ctypes.c_uint64),  # of some ranks, in the midst of a pass
        ("numbers", ctypes.c_double * _MAX_NUMBERS),
        # Of rank 0: 2 n + 1 if there is a message that goes with announcement n, from 1, else 2 n.
        ("news", ctypes.c_uint64 * _NUM_ANNOUNCEMENTS),
    )


class StatusBoard:
    """One rank's view of all ranks' lines.

    Args:
        region: at least ``num_ranks * LINE_BYTES`` of shared memory.
        rank: whose view this is.
        num_ranks: how many lines there are.
        look_around: called every 20 ms of waiting with the seconds waited so far; it raises if
            it is useless to wait longer (a peer is dead, time is up).
    """

    def __init__(
        self,
        region: SharedRegion,
        *,
        rank: int,
        num_ranks: int,
        look_around: Callable[[float], None],
    ) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.ranks_here = range(num_ranks)
        self._look_around = look_around
        self._last_glance = -math.inf
        self._lines = [
            _Line.from_buffer(region.memory, index * LINE_BYTES) for index in range(num_ranks)
        ]
        self._bells = [
            ctypes.c_uint32.from_buffer(region.memory, index * LINE_BYTES)
            for index in range(num_ranks)
        ]
        self._own = self._lines[rank]
        start = rank * LINE_BYTES + _Line.numbers.offset
        self._own_numbers = region.tensor(start, torch.float64, (_MAX_NUMBERS,), (1,))
        self._leading_rank = 0
        self._num_announced = 0
        self._is_there: Callable[[_Line], bool] | None = None
        self.wants_halt: Callable[[], bool] = _never

    @property
    def step(self) -> int:
        """The step this rank is in; -1 before its first."""
        return int(self._own.steps) - 1

    @step.setter
    def step(self, step: int) -> None:
        self._own.steps = step + 1

    def step_of(self, rank: int) -> int:
        """The step that another rank has published; -1 before its first."""
        return int(self._lines[rank].steps) - 1

    def note(self, phase: str) -> None:
        """Publish this rank's phase: one of PHASES."""
        self._own.phase = _NUMBERS[phase]

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Within the block this rank gathers parameters for a pass."""
        before = self._own.phase
        self._own.phase = _GATHER_IN.get(before, before)
        yield
        self._own.phase = before

    def phase_of(self, rank: int) -> str:
        """The phase that another rank has published."""
        return PHASES[int(self._lines[rank].phase)]

    def awaited_by(self, rank: int) -> int | None:
        """The rank that another one sleeps for; None while it does not."""
        return int(self._lines[rank].awaited) - 1 if self._lines[rank].awaited else None

    def waited_by(self, rank: int) -> float:
        """Seconds that another rank has slept here."""
        return float(self._lines[rank].waited)

    def begin_update(self, step: int) -> None:
        """From now on this rank changes its slice of the weights."""
        self._own.update = 2 * step + 1

    def end_update(self, step: int) -> None:
        """This rank has changed its slice of the weights."""
        self._own.update = 2 * step + 2

    def own_nothing(self) -> None:
        """This rank has no slice of the weights."""
        self._own.update = -1

    @property
    def last_update(self) -> int | None:
        """The step that changed the weights last, -1 for none; None if it has not come to its end.

        To be asked when no rank changes them any more.
        """
        lines = (self._lines[rank] for rank in self.ranks_here)
        found = {int(line.update) for line in lines if line.update >= 0}
        update = max(found, default=0)
        return None if len(found) > 1 or update % 2 else update // 2 - 1

    @property
    def is_waiting(self) -> bool:
        """Whether this rank sleeps at the board, and not elsewhere."""
        return self._is_there is not None

    def is_awaited(self, rank: int) -> bool:
        """Whether this rank waits for ``rank``."""
        return self._is_there is not None and not self._is_there(self._lines[rank])

    @property
    def is_halted(self) -> bool:
        """Whether to stop here. Between two barriers every rank gets the same answer.

        Rank 0 calls ``wants_halt`` when it enters a barrier, and publishes the barrier's number
        before it enters. So every rank that has passed that barrier sees it, and a slower one,
        between it and the barrier before, does not stop yet.
        """
        halt = int(self._lines[self._leading_rank].halt)
        return 0 < halt <= int(self._own.barriers)

    def wants_end(self) -> bool:
        """Whether rank 0 wants all to stop, for ranks between any two barriers."""
        if not self._own.halt and self.wants_halt():
            self._own.halt = self._own.barriers + 1
        return bool(self._lines[self._leading_rank].halt)

    def barrier(self) -> None:
        """Wait until every rank has entered this barrier as often as this one."""
        if not self._own.halt and self.wants_halt():
            self._own.halt = self._own.barriers + 1
        self._meet_here()

    def barrier_here(self) -> None:
        """Wait for the ranks of this host only."""
        self.barrier()

    def _meet_here(self) -> None:
        entered = self._own.barriers + 1
        self._own.barriers = entered
        self.ring()
        for rank in self.ranks_here:
            self._wait(rank, lambda line: line.barriers >= entered)

    def meet_ranks(self, ranks: range) -> None:
        """Wait until each of these ranks has met the others as often; all have the same ranks."""
        entered = self._own.meetings + 1
        self._own.meetings = entered
        self.ring()
        for rank in ranks:
            self._wait(rank, lambda line: line.meetings >= entered)

    def all_gather(self, numbers: Sequence[float] | torch.Tensor) -> list[list[float]]:
        """Gather every rank's numbers, by rank; all have as many.

        Another barrier must come before the next time.
        """
        self._note(numbers)
        self.barrier()
        return self._gathered(len(numbers))

    def _note(self, numbers: Sequence[float] | torch.Tensor) -> None:
        """Write them into this rank's line; a tensor is copied without Python numbers."""
        if isinstance(numbers, torch.Tensor):
            self._own_numbers[: len(numbers)] = numbers
        else:
            self._own.numbers[: len(numbers)] = numbers

    def _gathered(self, count: int) -> list[list[float]]:
        return [list(line.numbers[:count]) for line in self._lines]

    def announce(self, has_message: bool) -> bool:
        """Rank 0 tells all others whether a message follows; they call ``announced`` as often."""
        self._num_announced += 1
        self._own.news[self._num_announced % _NUM_ANNOUNCEMENTS] = (
            2 * self._num_announced + has_message
        )
        self.ring()
        return has_message

    def announced(self) -> bool:
        """Wait for rank 0's next announcement: whether a message follows."""
        self._num_announced += 1
        number, leader = self._num_announced, self._leading_rank
        place = number % _NUM_ANNOUNCEMENTS
        self._wait(leader, lambda line: line.news[place] >= 2 * number)
        news = int(self._lines[leader].news[place])
        assert news >> 1 == number, "rank 0 is too far ahead"
        return bool(news & 1)

    def post(self, tag: int) -> None:
        """Publish that the data of ``tag`` are written; tags only grow."""
        self._own.tag = tag
        self.ring()

    def wait_for(self, rank: int, tag: int) -> int:
        """Wait until ``rank`` has posted ``tag`` or a later one; returns what it posted last."""
        self._wait(rank, lambda line: line.tag >= tag)
        return int(self._lines[rank].tag)

    def wait_until(self, rank: int, is_there: Callable[[], bool]) -> None:
        """Wait until ``rank`` writes something and rings."""
        self._wait(rank, lambda line: is_there())

    def ring(self) -> None:
        """Wake the ranks that wait for this one."""
        self.wake(self.rank)

    def wake(self, rank: int) -> None:
        """Wake the ranks that sleep on a rank's bell."""
        bell = self._bells[rank]
        bell.value += 1
        futex.wake_all(bell)

    def look_around(self, waited_seconds: float) -> None:
        """Raise if it is useless to wait longer, for waits outside of the board."""
        self._look_around(waited_seconds)

    def glance(self) -> None:
        """Check the other ranks if that was long ago, between steps without barriers."""
        now = time.monotonic()
        if now - self._last_glance > _GLANCE_SECONDS:
            self._last_glance = now
            self._look_around(0.0)

    def _wait(self, rank: int, is_there: Callable[[_Line], bool]) -> None:
        line = self._lines[rank]
        if is_there(line):
            return
        until = time.perf_counter() + _YIELDING_SECONDS
        while time.perf_counter() < until:
            os.sched_yield()
            if is_there(line):
                return
        self._is_there, self._own.awaited = is_there, rank + 1
        self._sleep(self._bells[rank], line)
        self._is_there, self._own.awaited = None, 0

    def _sleep(self, bell: ctypes.c_uint32, line: _Line) -> None:
        assert self._is_there is not None
        watch, before = Stopwatch(), self._own.waited
        while True:
            heard = bell.value
            self._own.waited = before + watch.seconds
            if self._is_there(line):
                return
            if watch.tick() >= LOOK_AROUND_SECONDS:
                self._look_around(watch.seconds)
            futex.wait_while_equal(bell, heard, LOOK_AROUND_SECONDS)


def look_around_of(board: StatusBoard | None) -> Callable[[float], None]:
    """The check to call during waits outside of the board; none for a rank alone."""
    return _ignore if board is None else board.look_around


def _ignore(waited_seconds: float) -> None:
    return


def _never() -> bool:
    return False
