"""Limits the time that copies of the training take to a small part of the whole."""

import time

# Part of the training's time that they may take, and the shortest interval.
PART = 0.02
LEAST_SECONDS = 1.0


class OverheadBudget:
    """Decides when a repeated task is due. The first time is at once."""

    def __init__(self) -> None:
        self._cost_seconds = 0.0
        self._ended = float("-inf")

    @property
    def is_due(self) -> bool:
        """True if it is time to do it again."""
        passed = time.monotonic() - self._ended
        return passed >= max(LEAST_SECONDS, self._cost_seconds / PART)

    def note(self, began: float) -> None:
        """Note that it was done.

        Args:
            began: when it began, by ``time.monotonic()``.
        """
        self._ended = time.monotonic()
        self._cost_seconds = self._ended - began
