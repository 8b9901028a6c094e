"""Notices: a process that waits for others shows which ones."""

from collections.abc import Callable

from lockstep.launch.health.diagnostics import show

FIRST_NOTICE_SECONDS = 2.0


class Notice:
    """Shown after 2 s of waiting, and again when it has changed, ever less often.

    Args:
        describe: returns what this process waits for now.
    """

    def __init__(self, describe: Callable[[], str]) -> None:
        self._describe = describe
        self._due_seconds = FIRST_NOTICE_SECONDS
        self._shown = ""

    def show_if_due(self, waited_seconds: float) -> None:
        """Show it if it is due."""
        if waited_seconds < self._due_seconds:
            return
        self._due_seconds = 2 * waited_seconds
        text = self._describe()
        if text != self._shown:
            show(f"{text}\n")
            self._shown = text
