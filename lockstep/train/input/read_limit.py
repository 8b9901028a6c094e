"""Limits how long one read of rank 0 may take, and reports a hang there as on any other rank.

Rank 0 waits for its helpers and reports which of them hangs. If rank 0 itself hangs, in a dataset,
the helpers wait for as long as it lives. So a thread measures how long each read takes, and
interrupts it by a signal that nothing else sends and that is ignored by default (SIGURG), so that a
signal that comes a moment too late does no harm.

Python runs the handler between two of its instructions, in the main thread. A read that this cannot
interrupt (C code that does not check for signals, a ``fit`` in another thread, a script with a
handler of its own) is reported on standard error, and waited for.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from lockstep.channel.background import stack_of
from lockstep.launch.health.diagnostics import show

_SIGNAL = signal.SIGURG
_LOOKS = 10  # checks in the time allowed
_LONGEST_NAP_SECONDS = 1.0
_GRACE_SECONDS = 10.0  # from the interruption to the report instead


class ReadLimit:
    """Entered around every read of this process.

    Args:
        seconds: longest time for one.
        give_up: raises the error; it gets the seconds that the read has taken, and its thread.
    """

    def __init__(self, seconds: float, give_up: Callable[[float, int], NoReturn]) -> None:
        self._seconds = seconds
        self._give_up = give_up
        self._num_reads = 0
        self._is_reading = False
        self._thread = 0
        self._seen = 0  # number of the read under watch
        self._waited = 0.0  # seconds in that read
        self._limit = seconds  # for that read
        self._expired = 0  # number of the read that takes too long
        self._has_given_up = False
        self._has_ended = threading.Event()

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        self._num_reads += 1
        self._is_reading = True

    def __exit__(self, *error: object) -> None:
        self._is_reading = False
        if self._has_given_up and threading.current_thread() is not threading.main_thread():
            raise _GivenUpError  # nothing waits for this thread any more

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Limit reads within the block, which must be in the thread to interrupt."""
        before = signal.signal(_SIGNAL, self._interrupt) if _is_free() else None
        looking = threading.Thread(
            target=self._look, args=(before is not None,), name="lockstep: limit", daemon=True
        )
        looking.start()
        try:
            yield
        finally:
            self._has_ended.set()
            looking.join(_LONGEST_NAP_SECONDS)  # limited, since it may fail to write its report
            if before is not None:
                signal.signal(_SIGNAL, before)

    def _look(self, interrupts: bool) -> None:
        nap = min(self._seconds / _LOOKS, _LONGEST_NAP_SECONDS)
        # Count naps, not the clock's time: while the script is stopped, nothing reads.
        while not self._has_ended.wait(nap):
            self._count(nap, interrupts=interrupts)

    def _count(self, nap: float, *, interrupts: bool) -> None:
        """Add a nap to the time of the current read; check whether that is too long."""
        current = self._num_reads if self._is_reading else 0
        if not current or current != self._seen:
            self._seen, self._waited, self._limit = current, 0.0, self._seconds
            return
        self._waited += nap
        if self._waited <= self._limit:
            return
        if interrupts and self._expired != current:
            self._expired = current
            self._limit = self._waited + _GRACE_SECONDS
            signal.pthread_kill(_main_thread(), _SIGNAL)
        else:
            self._limit = self._waited + self._seconds
            self._tell()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._is_reading and self._num_reads == self._expired:
            self._has_given_up = True
            self._give_up(self._waited, self._thread)

    def _tell(self) -> None:
        show(
            f"This process has been reading samples for {self._waited:.0f} s, longer than the "
            f"{self._seconds:.0f} s allowed, and cannot be interrupted. It is at:\n"
            f"{stack_of(self._thread)}"
        )


class _GivenUpError(Exception):
    """Ends a thread when a read that was given up returns after all."""


def _main_thread() -> int:
    number = threading.main_thread().ident
    assert number is not None
    return number


def _is_free() -> bool:
    """True if this thread may handle the signal and the script does not."""
    if threading.current_thread() is not threading.main_thread():
        return False
    return signal.getsignal(_SIGNAL) in (signal.SIG_DFL, signal.SIG_IGN)
