"""The board: where ranks of one host tell each other how far they are.

Each rank has a line in shared memory that it alone writes: how many barriers it has entered, the
tag of the last row it has put up, the step it is in. Whoever waits for a rank reads its line, gives
the core away a few times, then sleeps on the rank's bell (a futex).

Plain stores are seen in order on x86-64. The futex call after each of them is a full barrier on
every architecture, so a waiter that was woken sees all that was written before.
"""

import ctypes
import os
import time
from collections.abc import Callable

from lockstep.comm import futex
from lockstep.comm.shared_memory import SharedRegion

LINE_BYTES = 128
_YIELDS = 100
_LOOK_AROUND_SECONDS = 0.02


class _Line(ctypes.Structure):
    _fields_ = (
        ("bell", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
        ("barriers", ctypes.c_uint64),
        ("tag", ctypes.c_uint64),
        ("step", ctypes.c_int64),
    )


class Board:
    """One rank's view of all ranks' lines.

    Args:
        region: at least ``num_ranks * LINE_BYTES`` of shared memory.
        rank: whose view this is.
        num_ranks: how many lines there are.
        look_around: called every 20 ms of waiting with the seconds waited so far; it raises if
            waiting on is in vain (a peer is dead, time is up).
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
        self._look_around = look_around
        self._lines = [
            _Line.from_buffer(region.memory, index * LINE_BYTES) for index in range(num_ranks)
        ]
        self._bells = [
            ctypes.c_uint32.from_buffer(region.memory, index * LINE_BYTES)
            for index in range(num_ranks)
        ]
        self._own = self._lines[rank]

    @property
    def step(self) -> int:
        """The step this rank is in."""
        return int(self._own.step)

    @step.setter
    def step(self, step: int) -> None:
        self._own.step = step

    def step_of(self, rank: int) -> int:
        """The step another rank is in, as far as it has told."""
        return int(self._lines[rank].step)

    def barrier(self) -> None:
        """Wait until every rank has entered this barrier as often as this one."""
        entered = self._own.barriers + 1
        self._own.barriers = entered
        self._ring()
        for rank in range(self.num_ranks):
            self._wait(rank, lambda line: line.barriers >= entered)

    def post(self, tag: int) -> None:
        """Tell that what goes with ``tag`` is written; tags only grow."""
        self._own.tag = tag
        self._ring()

    def wait_for(self, rank: int, tag: int) -> int:
        """Wait until ``rank`` has posted ``tag`` or a later one; returns what it posted last."""
        self._wait(rank, lambda line: line.tag >= tag)
        return int(self._lines[rank].tag)

    def _ring(self) -> None:
        bell = self._bells[self.rank]
        bell.value += 1
        futex.wake_all(bell)

    def _wait(self, rank: int, is_there: Callable[[_Line], bool]) -> None:
        line = self._lines[rank]
        for _ in range(_YIELDS):
            if is_there(line):
                return
            os.sched_yield()
        began = time.monotonic()
        bell = self._bells[rank]
        while True:
            heard = bell.value
            if is_there(line):
                return
            futex.wait_while_equal(bell, heard, _LOOK_AROUND_SECONDS)
            waited = time.monotonic() - began
            if waited >= _LOOK_AROUND_SECONDS:
                self._look_around(waited)
