"""How long a host waits for the others, all its waits together."""

import time
from dataclasses import dataclass

from lockstep.channel.waiting import LOOK_AROUND_SECONDS, LookAround, Stopwatch
from lockstep.units import format_seconds

_PAUSE_SECONDS = 0.2


class DeadlineError(Exception):
    """This host has waited for as long as it was to."""


@dataclass(frozen=True, kw_only=True)
class Deadline:
    """How long this host waits for the others, everything together."""

    watch: Stopwatch
    timeout_seconds: float
    look_around: LookAround

    def look(self, waited_seconds: float = 0.0) -> None:
        """Look around, whatever a single wait has taken.

        Raises:
            DeadlineError: all waits together took too long.
        """
        self.look_around(self.watch.tick())
        if self.watch.seconds > self.timeout_seconds:
            raise DeadlineError

    def pause(self) -> None:
        """Let others come."""
        watch = Stopwatch()
        while watch.tick() < _PAUSE_SECONDS:
            time.sleep(LOOK_AROUND_SECONDS)
            self.look()

    def __str__(self) -> str:
        return format_seconds(self.timeout_seconds)
