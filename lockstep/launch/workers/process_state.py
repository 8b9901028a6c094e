"""A peer: the process at the other end of a Unix socket, neither our parent nor our child.

The kernel says who it is, so it cannot lie about that. Nobody but its parent is told its exit
status; that it has ended, a descriptor of the process says for certain, where a process id may mean
another process by then.

Linux only.
"""

import os
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path

from lockstep.channel.polling import Stopwatch, is_readable

_CREDENTIALS = struct.Struct("3i")  # process id, user id, group id

# A process that ends closes its sockets before it counts as ended.
_ENDING_SECONDS = 1.0

_STOP_SECONDS = 0.05

# A process that computes nothing for so long is lost. What has computed for long may go on.
STOPPED_SECONDS = 30.0

# Who waits for less does not look: mostly nobody is stopped.
_PATIENCE_SECONDS = 1.0


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, as by Ctrl-Z, and for longer than a tracer's glance takes."""
    if not _is_stopped_now(pid):
        return False
    time.sleep(_STOP_SECONDS)
    return _is_stopped_now(pid)


class StoppedProcessTimer:
    """How long a process has been stopped, as whoever waits for it has seen."""

    def __init__(self) -> None:
        self._watch: Stopwatch | None = None

    def is_over_limit(self, pid: int, waited_seconds: float) -> bool:
        """Whether it is lost; to be asked all the while, with the seconds waited so far."""
        if waited_seconds < min(_PATIENCE_SECONDS, STOPPED_SECONDS):
            return False
        if not _is_stopped_now(pid):
            self._watch = None
            return False
        self._watch = self._watch or Stopwatch()
        return self._watch.tick() >= STOPPED_SECONDS


def _is_stopped_now(pid: int) -> bool:
    with suppress(OSError):  # it is gone
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
        return state in (b"T", b"t")
    return False


def start_of(pid: int) -> int:
    """When a process was started, in ticks since the host was; 0 where there is no such process.

    With its id that tells it from any other.
    """
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    return 0


def pid_of(sock: socket.socket) -> int:
    """The id of the process at the other end of a Unix socket."""
    return _credentials(sock)[0]


def user_of(sock: socket.socket) -> int:
    """The id of the user of that process."""
    return _credentials(sock)[1]


def _credentials(sock: socket.socket) -> tuple[int, int, int]:
    told = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, group = _CREDENTIALS.unpack(told)
    return pid, user, group


class PeerProcess:
    """Who connected, or who listened, at the time.

    Attributes:
        pid: its process id.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.pid = pid_of(sock)
        try:
            self._descriptor = os.pidfd_open(self.pid)
        except OSError:  # it is gone, or runs where this process cannot see it: its socket tells
            self._descriptor = -1

    def has_ended(self) -> bool:
        """Whether the kernel says that the process has ended."""
        return self._ends_within(0.0)

    def is_ending(self) -> bool:
        """Whether a process whose socket is closed has ended, or ends within a moment."""
        return self._ends_within(_ENDING_SECONDS)

    def close(self) -> None:
        """Give up the descriptor."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _ends_within(self, seconds: float) -> bool:
        return self._descriptor >= 0 and is_readable([self._descriptor], seconds)
