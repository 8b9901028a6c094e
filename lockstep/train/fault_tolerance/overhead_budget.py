"""When to take the next copy or checkpoint, so that they use a small part of the time."""

import time

# Part of the time of training that it may take, and the least from one time to the next.
PART = 0.02
LEAST_SECONDS = 1.0


class OverheadBudget:
    """Of one thing that is done again and again. The first time it is due at once."""

    def __init__(self) -> None:
        self._cost_seconds = 0.0
        self._ended = float("-inf")

    @property
    def is_due(self) -> bool:
        """Whether to do it again."""
        passed = time.monotonic() - self._ended
        return passed >= max(LEAST_SECONDS, self._cost_seconds / PART)

    def note(self, began: float) -> None:
        """It was done.

        Args:
            began: when it was begun, by ``time.monotonic()``.
        """
        self._ended = time.monotonic()
        self._cost_seconds = self._ended - began
