"""A channel: an encrypted connection to another host.

It does not block. A sender puts parts in, and flushes until all are sent; a receiver takes the
bytes that have come, and polls if none have. It hands out no bytes before they are authenticated.
"""

import socket
from collections import deque
from collections.abc import Iterable

from lockstep.channel.frames import drop
from lockstep.channel.keys import Keys
from lockstep.channel.records import MOST_BYTES, Opener, Sealer, TamperedError
from lockstep.errors import HostError, problem
from lockstep.formatting import format_seconds


class Channel:
    """One end of a connection.

    Args:
        sock: connected and not blocking; now the channel's.
        keys: of this end.

    Attributes:
        socket: for polling and options, not for bytes.
        keys: with which it began.
    """

    def __init__(self, sock: socket.socket, keys: Keys) -> None:
        self.socket = sock
        self.keys = keys
        self._sealer = Sealer(keys.sending)
        self._opener = Opener(keys.receiving)
        self._unsealed: deque[memoryview] = deque()
        self._unsent: deque[memoryview] = deque()  # of the record that is on its way
        self._opened = memoryview(b"")

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self.socket.fileno()

    def close(self) -> None:
        """Close this end."""
        self.socket.close()

    def renewed(self) -> "Channel":
        """The same connection for its next task, which may be another process's."""
        return Channel(self.socket, self.keys.next())

    @property
    def has_unsent(self) -> bool:
        """Whether there is something to flush."""
        return bool(self._unsealed or self._unsent)

    def put(self, *parts: bytes | memoryview) -> None:
        """Queue bytes for ``flush``; they must not change until they are sent."""
        self._unsealed += [memoryview(part) for part in parts if len(part)]

    def flush(self) -> bool:
        """Send as much as the socket takes; True if all is sent.

        Raises:
            OSError: the connection is broken.
        """
        try:
            while self.has_unsent:
                if not self._unsent:
                    self._unsent += map(memoryview, self._sealer.seal(self._next_content()))
                drop(self._unsent, self.socket.sendmsg(self._unsent))
        except BlockingIOError:
            return False
        return True

    def receive(self, most: int) -> memoryview:
        """Up to so many bytes of what has come, and at least one.

        Raises:
            BlockingIOError: nothing has come.
            TamperedError: the bytes are not those that the other end sent.
            OSError: the connection is closed or broken.
        """
        while not self._opened:
            num_bytes = self.socket.recv_into(self._opener.room)
            if num_bytes == 0:
                raise ConnectionError("it has closed the connection")
            self._opened = memoryview(self._opener.take_in(num_bytes))
        taken, self._opened = self._opened[:most], self._opened[most:]
        return taken

    def receive_into(self, buffer: memoryview) -> int:
        """Fill the beginning of a buffer with what has come; as ``receive``."""
        taken = self.receive(len(buffer))
        buffer[: len(taken)] = taken
        return len(taken)

    def _next_content(self) -> bytes | memoryview:
        """The next record: a piece of a large part, or several small parts."""
        parts: list[memoryview] = []
        room = MOST_BYTES
        while self._unsealed and room:
            part = self._unsealed.popleft()
            if len(part) > room:
                self._unsealed.appendleft(part[room:])
            parts.append(part[:room])
            room -= len(parts[-1])
        return parts[0] if len(parts) == 1 else b"".join(parts)


def lost(host: str, error: OSError) -> HostError:
    """The error for a connection that has ended.

    Args:
        host: at its other end.
        error: its cause.
    """
    if isinstance(error, TamperedError):
        return HostError(tampered(host, error))
    return HostError.of_loss(
        f"{host} no longer takes part.",
        received=error.strerror or str(error) or type(error).__name__,
        fix="Look at that host's output for the cause.",
    )


def late(hosts: Iterable[str], waited_seconds: float, timeout_seconds: float) -> HostError:
    """The error for hosts that do not reach the step at which this one waits.

    Args:
        hosts: these, or some of which one is late.
        waited_seconds: so far.
        timeout_seconds: the longest wait.
    """
    return HostError.of_loss(
        f"{' and '.join(dict.fromkeys(hosts))} must reach the same step within "
        f"{format_seconds(timeout_seconds)}.",
        received=f"nothing for {format_seconds(waited_seconds)}",
        fix="See whether that host hangs or is cut off; raise `timeout_seconds` if steps may take "
        "that long.",
    )


def tampered(host: str, error: TamperedError) -> str:
    """The message for bytes that are not those that a host sent."""
    return problem(
        f"What came from {host} is not what it sent: the connection was tampered with, or is "
        "broken.",
        received=str(error),
        fix="Check the network between these hosts.",
    )
