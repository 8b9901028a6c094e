"""A limit on how long rank 0 may be at one read: what hangs there is reported as on any other rank.

Rank 0 waits for its helpers and tells which of them hangs. Where it hangs itself, in a dataset, the
helpers wait for as long as it lives. So a thread looks how long it has been at a read, and has it
interrupted: by a signal that nobody sends and that is ignored by default (SIGURG), so that one that
comes a moment too late does no harm.

Python runs the handler between two of its instructions, in the main thread. What cannot be
interrupted so (code in C that does not look for signals, a ``fit`` in another thread, a script with
a handler of its own) is told of on standard error, and waited for.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from lockstep.launch.health.diagnostics import show, stack_of

_SIGNAL = signal.SIGURG
_LOOKS = 10  # in the time allowed
_LONGEST_NAP_SECONDS = 1.0
_GRACE_SECONDS = 10.0  # from the interruption to what is told instead


class ReadLimit:
    """Entered around every read of this process.

    Args:
        seconds: longest time for one.
        give_up: raises what is to be raised, told how long the read has taken and in which thread.
    """

    def __init__(self, seconds: float, give_up: Callable[[float, int], NoReturn]) -> None:
        self._seconds = seconds
        self._give_up = give_up
        self._num_reads = 0
        self._is_reading = False
        self._thread = 0
        self._seen = 0  # number of the read that is being watched
        self._waited = 0.0  # in it
        self._limit = seconds  # for it
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
            raise _GivenUpError  # nobody waits any more for what this thread would go on to do

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within the block, which is in the thread that is to be interrupted, reads are limited."""
        before = signal.signal(_SIGNAL, self._interrupt) if _is_free() else None
        looking = threading.Thread(
            target=self._look, args=(before is not None,), name="lockstep: limit", daemon=True
        )
        looking.start()
        try:
            yield
        finally:
            self._has_ended.set()
            looking.join(_LONGEST_NAP_SECONDS)  # unless it cannot write what it has to tell
            if before is not None:
                signal.signal(_SIGNAL, before)

    def _look(self, interrupts: bool) -> None:
        nap = min(self._seconds / _LOOKS, _LONGEST_NAP_SECONDS)
        # Naps are counted, and not the clock's time: while the script is stopped, nothing reads.
        while not self._has_ended.wait(nap):
            self._count(nap, interrupts=interrupts)

    def _count(self, nap: float, *, interrupts: bool) -> None:
        """Add a nap to the time of the read that is under way; see whether that is too long."""
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
    """Ends a thread of which a read was given up, when that comes to an end after all."""


def _main_thread() -> int:
    number = threading.main_thread().ident
    assert number is not None
    return number


def _is_free() -> bool:
    """Whether the signal is ours to handle."""
    if threading.current_thread() is not threading.main_thread():
        return False
    return signal.getsignal(_SIGNAL) in (signal.SIG_DFL, signal.SIG_IGN)
