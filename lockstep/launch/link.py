"""A link: framed messages with file descriptors over a Unix socket pair.

The socket is inherited by the helper at its start: nobody else can reach it, which is why its
messages may be unpickled.
"""

import array
import socket
import struct
from dataclasses import dataclass

_HEADER = struct.Struct("<cBQ")  # kind, number of descriptors, payload bytes
_MOST_DESCRIPTORS = 16


@dataclass(frozen=True)
class Message:
    """One message: a kind, bytes, and descriptors that now belong to the receiver."""

    kind: bytes
    payload: bytes
    descriptors: tuple[int, ...] = ()


class Link:
    """One end of a socket pair."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    @classmethod
    def pair(cls) -> tuple["Link", "Link"]:
        """Two connected ends."""
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(left), cls(right)

    def fileno(self) -> int:
        """The socket's descriptor, for select."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send all of a message; the sender keeps its own descriptors."""
        assert len(message.descriptors) <= _MOST_DESCRIPTORS
        header = _HEADER.pack(message.kind, len(message.descriptors), len(message.payload))
        rights = array.array("i", message.descriptors)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if message.descriptors else []
        sent = self._socket.sendmsg([header], ancillary)
        assert sent == len(header)
        self._socket.sendall(message.payload)

    def receive(self) -> Message:
        """Wait for a whole message.

        Raises:
            EOFError: the other end is closed.
        """
        descriptors: list[int] = []
        header = self._read(_HEADER.size, descriptors)
        kind, num_descriptors, num_bytes = _HEADER.unpack(header)
        payload = self._read(num_bytes)
        assert len(descriptors) == num_descriptors
        return Message(kind, payload, tuple(descriptors))

    def peek(self) -> bytes:
        """The kind of the next message, left unread; empty when the other end is closed."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK)
        except ConnectionError:
            return b""

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _read(self, num_bytes: int, descriptors: list[int] | None = None) -> bytes:
        buffer = bytearray(num_bytes)
        view = memoryview(buffer)
        while view:
            if descriptors is None:
                count = self._socket.recv_into(view)
            else:
                count = self._receive_with_rights(view, descriptors)
            if count == 0:
                raise EOFError("the other end of the link is closed")
            view = view[count:]
        return bytes(buffer)

    def _receive_with_rights(self, view: memoryview, descriptors: list[int]) -> int:
        room = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array.array("i").itemsize)
        flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        count, ancillary, _, _ = self._socket.recvmsg_into([view], room, flags)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(data[: len(data) - len(data) % received.itemsize])
                descriptors.extend(received)
        return count
