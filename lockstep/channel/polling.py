"""Waits on sockets and pipes, in short intervals between which the caller checks other things."""

import select
import time
from collections.abc import Callable, Sequence
from typing import Protocol

LOOK_AROUND_SECONDS = 0.02

# The most that the time between two checks counts for: the clock runs on while the script is
# stopped (Ctrl-Z), which is not waiting.
_MAX_COUNTED_SECONDS = 5 * LOOK_AROUND_SECONDS

# Called every 20 ms of waiting, or every second of idleness, with the seconds waited so far; raises
# to give up.
LookAround = Callable[[float], None]


class HasDescriptor(Protocol):
    """A socket, a link, an open file."""

    def fileno(self) -> int:
        """Its descriptor."""


class Stopwatch:
    """Counts seconds of waiting, but not those in which this process was stopped itself."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last = time.monotonic()

    def tick(self) -> float:
        """Seconds waited so far."""
        now = time.monotonic()
        self.seconds += min(now - self._last, _MAX_COUNTED_SECONDS)
        self._last = now
        return self.seconds


def wait_on(seconds: float) -> None:
    """A check that never raises."""


def give_up_after(most_seconds: float) -> LookAround:
    """A check that raises TimeoutError after so many seconds."""

    def give_up(seconds: float) -> None:
        if seconds > most_seconds:
            raise TimeoutError

    return give_up


def wait_for(end: HasDescriptor, events: int, watch: Stopwatch, look_around: LookAround) -> None:
    """Wait until an end can be read or written (``select.POLLIN``), or look around once."""
    poller = select.poll()
    poller.register(end, events)
    if not poller.poll(LOOK_AROUND_SECONDS * 1000):
        look_around(watch.tick())


def is_readable(
    ends: Sequence[HasDescriptor | int], seconds: float | None = LOOK_AROUND_SECONDS
) -> bool:
    """Wait until one of them has something to read, or is closed by the other end."""
    poller = select.poll()  # unlike select, it takes descriptors above 1023
    for end in ends:
        poller.register(end, select.POLLIN)
    return bool(poller.poll(None if seconds is None else seconds * 1000))


def has_hung_up(end: HasDescriptor) -> bool:
    """Whether the other end of a Unix socket is closed. Reads nothing."""
    poller = select.poll()
    poller.register(end, 0)  # reports hang-ups and errors only
    return bool(poller.poll(0))
