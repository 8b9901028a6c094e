"""The backend of a team: it starts helper processes, ends them, and sees how they ended.

A team sends all helpers the same messages. Starting a helper, ending it, and asking it for its
stacks depend on the owner of its process: Lockstep, which forks it (``fork_server``), or a
launcher, which started it to run the user's script (``external_workers``).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from lockstep.launch.health.diagnostics import DiagnosticsFile
from lockstep.launch.workers.link import Link


class WorkerBackend(ABC):
    """Starts and ends helpers, each of which has its own number here."""

    @abstractmethod
    def start_helper(self, rank: int, diagnostics: DiagnosticsFile) -> tuple[int, Link]:
        """Start a helper, which sends READY on the link; returns its number and the link.

        Args:
            rank: the helper's.
            diagnostics: the file that it writes its stacks to.
        """

    @abstractmethod
    def note_ready(self) -> None:
        """A helper has sent READY."""

    @abstractmethod
    def has_ended(self, number: int) -> bool:
        """True if a helper's process has ended. Does not wait."""

    @abstractmethod
    def describe_end(self, number: int) -> str:
        """How a helper whose link is closed has ended; waits a moment for its exit status."""

    @abstractmethod
    def describe_absence(self, number: int, rank: int, reason: str, output: str) -> str:
        """The message for a helper that did not become ready for a call.

        Args:
            number: the helper's.
            rank: its rank.
            reason: how it ended, or that the time is up.
            output: the new text in its diagnostics file.
        """

    @abstractmethod
    def read_new(self) -> str:
        """The backend's own output since the last call, for the user."""

    @abstractmethod
    def ask_for_stacks(self, number: int) -> None:
        """Request a helper's stacks, which it writes to its diagnostics file if it can."""

    @abstractmethod
    def end(self, numbers: Sequence[int]) -> None:
        """End these helpers; the caller closes their links next."""

    @abstractmethod
    def close(self) -> None:
        """Give up the backend, because one of its helpers hangs."""
