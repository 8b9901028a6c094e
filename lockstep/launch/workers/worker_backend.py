"""An origin: where helper processes come from, and what rank 0 knows of them but by their links.

A team talks to all helpers alike. How one is started, how its end shows, what ends it and how it is
asked for its stacks depends on whose process it is: one of ours, forked from a template
(``template``), or one that a launcher has started to run the user's script (``attached``).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from lockstep.launch.health.diagnostics import DiagnosticsFile
from lockstep.launch.workers.link import Link


class WorkerBackend(ABC):
    """Gives helpers, each with a number of its own here.

    Attributes:
        stays_ready: whether a helper that has returned from a call waits for the next; if not, it
            says READY anew when it has come to that.
    """

    stays_ready: bool

    @abstractmethod
    def start_helper(self, rank: int, diagnostics: DiagnosticsFile) -> tuple[int, Link]:
        """A helper, which will say READY on the link; returns its number and the link to it.

        Args:
            rank: the helper's.
            diagnostics: takes its stacks.
        """

    @abstractmethod
    def note_ready(self) -> None:
        """A helper has said READY."""

    @abstractmethod
    def has_ended(self, number: int) -> bool:
        """Whether a helper's process has ended. Does not wait."""

    @abstractmethod
    def describe_end(self, number: int) -> str:
        """How a helper has ended whose link is closed; waits a moment for the kernel to tell."""

    @abstractmethod
    def describe_absence(self, number: int, rank: int, reason: str, said: str) -> str:
        """The message for a helper that is not there for a call.

        Args:
            number: the helper's.
            rank: its rank.
            reason: what is known: that it has ended, that time is up.
            said: what it has written to its diagnostics file.
        """

    @abstractmethod
    def read_new(self) -> str:
        """What the origin itself has written since the last call, for the user to see."""

    @abstractmethod
    def ask_for_stacks(self, number: int) -> None:
        """Have a helper write its stacks to its diagnostics file, if it can."""

    @abstractmethod
    def end(self, numbers: Sequence[int]) -> None:
        """Done with helpers; their links are closed next."""

    @abstractmethod
    def close(self) -> None:
        """A helper of this origin hangs: have nothing to do with the origin any more."""
