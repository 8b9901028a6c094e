"""A helper process as rank 0 sees it: its link, its messages, and how it ended."""

import os
from collections import deque

from lockstep.errors import WorkerError
from lockstep.launch.health.diagnostics import DiagnosticsFile
from lockstep.launch.workers.helper import FAIL, READY, RETURN
from lockstep.launch.workers.link import Message
from lockstep.launch.workers.process_state import StoppedProcessTimer
from lockstep.launch.workers.worker_backend import WorkerBackend


class HelperHandle:
    """One helper process as rank 0 sees it.

    Attributes:
        is_ready: the helper has said that it can take a call.
    """

    def __init__(self, rank: int, backend: WorkerBackend) -> None:
        self.rank = rank
        self.backend = backend
        self.inbox: deque[Message] = deque()
        self.pid = 0
        self.is_ready = False
        self.stopped_timer = StoppedProcessTimer()
        self.diagnostics = DiagnosticsFile()
        self.number, self.link = backend.start_helper(rank, self.diagnostics)
        self.is_closed = False

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
                self.backend.note_ready()

    def is_dead(self) -> bool:
        """True if it will send nothing more; the inbox then holds all that it has sent."""
        if self.is_closed:
            return True
        if not self.backend.has_ended(self.number):
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
            for descriptor in message.descriptors:
                os.close(descriptor)
        self.inbox.clear()


def start_error(helper: HelperHandle, reason: str) -> WorkerError:
    """The error for a helper that did not become ready."""
    output = helper.diagnostics.read_new()
    message = helper.backend.describe_absence(helper.number, helper.rank, reason, output)
    return WorkerError(message)


def end_helpers(helpers: list[HelperHandle]) -> None:
    """End their processes now, and close their handles."""
    by_backend: dict[WorkerBackend, list[int]] = {}
    for helper in helpers:
        by_backend.setdefault(helper.backend, []).append(helper.number)
    for backend, numbers in by_backend.items():
        backend.end(numbers)
    close_helpers(helpers)


def close_helpers(helpers: list[HelperHandle]) -> None:
    """Close their handles; their processes go on."""
    while helpers:
        helpers.pop().close()
