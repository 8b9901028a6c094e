"""A helper process as rank 0 sees it: its link, its messages, and how it ended.

Starting a helper, ending it, and asking it for its stacks depend on the owner of its process:
Lockstep, which forks it (``fork_server``), or a launcher, which started it to run the user's script
(``external_workers``).
"""

from abc import ABC, abstractmethod
from collections import deque

from lockstep.launch.health.diagnostics import DiagnosticsFile
from lockstep.launch.workers.helper import FAIL, READY, RETURN
from lockstep.launch.workers.link import Link, Message
from lockstep.launch.workers.process_state import StoppedProcessTimer


class HelperHandle(ABC):
    """One helper process as rank 0 sees it.

    Args:
        rank: the helper's.
        link: to the helper, which sends READY.

    Attributes:
        is_ready: the helper has said that it can take a call.
        diagnostics: the file that the helper writes its stacks to.
    """

    def __init__(self, rank: int, link: Link) -> None:
        self.rank = rank
        self.link = link
        self.inbox: deque[Message] = deque()
        self.pid = 0
        self.is_ready = False
        self.is_closed = False
        self.stopped_timer = StoppedProcessTimer()
        self.diagnostics = DiagnosticsFile()

    @abstractmethod
    def has_ended(self) -> bool:
        """True if its process has ended. Does not wait."""

    @abstractmethod
    def describe_end(self) -> str:
        """How it has ended, if its link is closed; waits a moment for its exit status."""

    @abstractmethod
    def describe_absence(self, reason: str) -> str:
        """The message if it does not become ready for a call.

        Args:
            reason: how it ended, or that the time is up.
        """

    @abstractmethod
    def ask_for_stacks(self) -> None:
        """Request its stacks, which it writes to its diagnostics file if it can."""

    @abstractmethod
    def end(self) -> None:
        """Begin to end it; ``await_end`` and ``close`` follow."""

    def await_end(self) -> None:
        """Return when its process has ended, if Lockstep ends it."""
        return

    def note_start(self) -> None:
        """The helper has become ready for the first time."""
        return

    def give_up(self) -> None:
        """The helper did not become ready in time, so whatever starts it hangs."""
        return

    def read_output(self) -> str:
        """New output of what starts it, for the user."""
        return ""

    def pump(self) -> None:
        """Move what it has sent to the inbox."""
        if self.is_closed:
            return
        try:
            self.inbox.extend(self.link.take())
        except EOFError:
            self.is_closed = True
        if not self.is_ready and self.inbox and self.inbox[0].kind == READY:
            has_started = self.pid == 0
            self.pid = int(self.inbox.popleft().payload)
            self.is_ready = True
            if has_started:
                self.note_start()

    def is_dead(self) -> bool:
        """True if it will send nothing more; the inbox then holds all that it has sent."""
        if self.is_closed:
            return True
        if not self.has_ended():
            return False
        self.pump()
        return True

    def is_lost(self) -> bool:
        """True if it died during a call. After a call a launcher's processes may end."""
        if not self.is_dead():
            return False
        return self.is_ready and all(message.kind != RETURN for message in self.inbox)

    def fails_next(self) -> bool:
        """True if its next message says that it failed, or if it died with no message left."""
        self.pump()
        if not self.inbox and self.is_lost():
            return not self.inbox or self.inbox[0].kind == FAIL
        return bool(self.inbox) and self.inbox[0].kind == FAIL

    def has_failed(self) -> bool:
        """True if the inbox holds an exception, maybe behind other messages."""
        self.pump()
        return any(message.kind == FAIL for message in self.inbox)

    def close(self) -> None:
        """Close this end's descriptors, and those of unread messages."""
        self.link.close()
        self.diagnostics.close()
        for message in self.inbox:
            message.close()
        self.inbox.clear()


def end_helpers(helpers: list[HelperHandle]) -> None:
    """End their processes now, and close their handles."""
    for helper in helpers:
        helper.end()
    for helper in helpers:
        helper.await_end()
    close_helpers(helpers)


def close_helpers(helpers: list[HelperHandle]) -> None:
    """Close their handles; their processes go on."""
    while helpers:
        helpers.pop().close()
