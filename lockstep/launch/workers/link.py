"""A link: framed messages with file descriptors over a Unix socket pair.

The helper inherits the socket at its start. No other process can reach it, so its messages may be
unpickled. No call blocks in the kernel for long: while it waits, it calls ``look_around`` 50 times
a second, which raises to give up; an idle process calls it once a second.
"""

import array
import fcntl
import os
import select
import socket
import struct
from collections import deque
from dataclasses import dataclass

from lockstep.channel.frames import FrameReader, drop
from lockstep.channel.polling import (
    LOOK_AROUND_SECONDS,
    LookAround,
    Stopwatch,
    give_up_after,
    has_hung_up,
    is_readable,
    wait_for,
    wait_on,
)

# How often an idle process looks around: a script may keep many idle helpers.
IDLE_LOOK_AROUND_SECONDS = 1.0

# The longest try to report a failure to other processes, which may be stopped.
give_up = give_up_after(5.0)

_HEADER = struct.Struct("<cBQ")  # kind, number of descriptors, payload bytes
MOST_DESCRIPTORS = 253  # Linux sends no more at once (SCM_MAX_FD)
_FIRST_DESCRIPTOR = 3
_CHUNK_BYTES = 1 << 18


@dataclass(frozen=True)
class Message:
    """One message: a kind, bytes, and descriptors, which the receiver owns."""

    kind: bytes
    payload: bytes = b""
    descriptors: tuple[int, ...] = ()

    def close(self) -> None:
        """Close its descriptors."""
        for descriptor in self.descriptors:
            os.close(descriptor)


class Link:
    """One end of a socket pair."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._socket.setblocking(False)
        self._frames = FrameReader(_HEADER, self._read)
        self._descriptors: deque[int] = deque()
        self._is_torn = False  # a message was sent in part

    @classmethod
    def pair(cls) -> tuple["Link", "Link"]:
        """Two connected ends."""
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(_above_stdio(left)), cls(_above_stdio(right))

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._socket.fileno()

    @property
    def is_cut(self) -> bool:
        """True if the other end is closed, even if messages are left to read."""
        return has_hung_up(self)

    def send(self, message: Message, look_around: LookAround = wait_on) -> None:
        """Send all of a message; the sender keeps its own descriptors.

        Raises:
            OSError: the other end is closed, or waits for the rest of a message that was given up.
        """
        if self._is_torn:
            raise BrokenPipeError("an earlier message was sent in part")
        assert len(message.descriptors) <= MOST_DESCRIPTORS
        watch = Stopwatch()
        header = _HEADER.pack(message.kind, len(message.descriptors), len(message.payload))
        rights = array.array("i", message.descriptors)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if message.descriptors else []
        # In one call if there is room, so that a small message is sent whole or not at all.
        parts = deque([memoryview(header), memoryview(message.payload)])
        while parts:
            try:
                sent = self._socket.sendmsg(parts, ancillary)
            except BlockingIOError:
                wait_for(self, select.POLLOUT, watch, look_around)
                continue
            ancillary = []  # descriptors go with the first byte
            drop(parts, sent)
            self._is_torn = bool(parts)

    def receive(self, look_around: LookAround = wait_on, *, is_idle: bool = False) -> Message:
        """Wait for a whole message.

        Args:
            look_around: called repeatedly while waiting.
            is_idle: True to call it only once a second, after the first second.

        Raises:
            EOFError: the other end is closed.
        """
        watch = Stopwatch()
        while (message := self.take_one()) is None:
            is_resting = is_idle and watch.seconds > IDLE_LOOK_AROUND_SECONDS
            seconds = IDLE_LOOK_AROUND_SECONDS if is_resting else LOOK_AROUND_SECONDS
            if not is_readable([self], seconds):
                look_around(watch.tick())
        return message

    def take(self) -> list[Message]:
        """All complete messages that have arrived. Does not wait.

        Raises:
            EOFError: the other end is closed, and there is no message left.
        """
        messages: list[Message] = []
        try:
            while (message := self.take_one()) is not None:
                messages.append(message)
        except EOFError:
            if not messages:
                raise
        return messages

    def take_one(self) -> Message | None:
        """The next message, if it has arrived completely. Reads nothing beyond it; does not wait.

        Raises:
            EOFError: the other end is closed.
        """
        try:
            kind, num_descriptors, payload = self._frames.take()
        except BlockingIOError:
            return None
        descriptors = tuple(self._descriptors.popleft() for _ in range(num_descriptors))
        return Message(kind, payload, descriptors)

    def close(self) -> None:
        """Close this end, and the descriptors of an incomplete message."""
        self._socket.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def _read(self, most: int) -> bytes:
        room = socket.CMSG_SPACE(MOST_DESCRIPTORS * array.array("i").itemsize)
        flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        try:
            data, ancillary, _, _ = self._socket.recvmsg(min(most, _CHUNK_BYTES), room, flags)
        except ConnectionError as error:
            raise EOFError("the connection was reset by the other end of the link") from error
        for level, kind, rights in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(rights[: len(rights) - len(rights) % received.itemsize])
                self._descriptors.extend(received)
        if not data:
            raise EOFError("the other end of the link is closed")
        return data


def _above_stdio(sock: socket.socket) -> socket.socket:
    """The socket, but not as descriptor 0, 1 or 2, which a script may have closed."""
    if sock.fileno() >= _FIRST_DESCRIPTOR:
        return sock
    with sock:
        return socket.socket(
            fileno=fcntl.fcntl(sock.fileno(), fcntl.F_DUPFD_CLOEXEC, _FIRST_DESCRIPTOR)
        )
