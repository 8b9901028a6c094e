"""The state of another process: stopped, ended, or alive.

``PeerProcess`` is the process at the other end of a Unix socket. The kernel names it, so it cannot
pretend to be another. Only its parent gets its exit status; a descriptor of the process (pidfd)
shows reliably that it has ended, whereas another process may get its id.

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

# A process closes its sockets before the kernel reports its end.
_ENDING_SECONDS = 1.0

_STOP_SECONDS = 0.05

# A process that is stopped for so long is lost. One that computes for longer is not.
STOPPED_SECONDS = 30.0

# Shorter waits are not worth a look at /proc.
_PATIENCE_SECONDS = 1.0


def is_stopped(pid: int) -> bool:
    """True if a process is stopped, as by Ctrl-Z, for longer than a tracer needs to read it."""
    if not _is_stopped_now(pid):
        return False
    time.sleep(_STOP_SECONDS)
    return _is_stopped_now(pid)


class StoppedProcessTimer:
    """Counts how long a process that this one waits for has been stopped."""

    def __init__(self) -> None:
        self._watch: Stopwatch | None = None

    def is_over_limit(self, pid: int, waited_seconds: float) -> bool:
        """True if it is lost. Call it during the whole wait, with the seconds waited so far."""
        if waited_seconds < min(_PATIENCE_SECONDS, STOPPED_SECONDS):
            return False
        if not _is_stopped_now(pid):
            self._watch = None
            return False
        self._watch = self._watch or Stopwatch()
        return self._watch.tick() >= STOPPED_SECONDS


def _is_stopped_now(pid: int) -> bool:
    with suppress(OSError):  # it has ended
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
        return state in (b"T", b"t")
    return False


def start_of(pid: int) -> int:
    """When a process was started, in ticks since the host's start; 0 if there is no such process.

    The process id and this number identify a process.
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
    packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, group = _CREDENTIALS.unpack(packed)
    return pid, user, group


class PeerProcess:
    """The process that connected, or listened, at the other end of a Unix socket.

    Attributes:
        sock: this end of the socket.
        pid: its process id.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.pid = pid_of(sock)
        try:
            self._descriptor = os.pidfd_open(self.pid)
        except OSError:  # it has ended, or runs in another namespace: its socket shows its end
            self._descriptor = -1

    def has_ended(self) -> bool:
        """True if the kernel reports that the process has ended."""
        return self._ends_within(0.0)

    def is_ending(self) -> bool:
        """True if a process whose socket is closed has ended, or ends within a second."""
        return self._ends_within(_ENDING_SECONDS)

    def close(self) -> None:
        """Close the socket, and the descriptor of the process."""
        self.sock.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _ends_within(self, seconds: float) -> bool:
        return self._descriptor >= 0 and is_readable([self._descriptor], seconds)
