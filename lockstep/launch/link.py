"""A link: framed messages with file descriptors over a Unix socket pair.

The socket is inherited by the helper at its start: nobody else can reach it, which is why its
messages may be unpickled. No call blocks in the kernel for long: whoever waits looks around 50
times a second, and gives up by raising. Only one that has nothing else to do looks around less.
"""

import array
import fcntl
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

LOOK_AROUND_SECONDS = 0.02

# The same for one that is idle: a script may keep many helpers, which should cost it nothing.
IDLE_LOOK_AROUND_SECONDS = 1.0

# Most that the time from one look around to the next counts for. The clock runs on while the script
# is stopped (Ctrl-Z): what passed then is no waiting.
_LONGEST_NAP_SECONDS = 5 * LOOK_AROUND_SECONDS

# Longest try to tell others of a failure, who may be stopped.
_FAREWELL_SECONDS = 5.0

# Called every 20 ms of waiting, or every second of idleness, with the seconds waited so far; raises
# to give up.
LookAround = Callable[[float], None]

_HEADER = struct.Struct("<cBQ")  # kind, number of descriptors, payload bytes
MOST_DESCRIPTORS = 253  # Linux sends no more at once (SCM_MAX_FD)
_FIRST_DESCRIPTOR = 3


@dataclass(frozen=True)
class Message:
    """One message: a kind, bytes, and descriptors that now belong to the receiver."""

    kind: bytes
    payload: bytes = b""
    descriptors: tuple[int, ...] = ()


class Stopwatch:
    """Counts seconds of waiting, but not those in which this process was stopped itself."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last = time.monotonic()

    def tick(self) -> float:
        """Seconds waited so far."""
        now = time.monotonic()
        self.seconds += min(now - self._last, _LONGEST_NAP_SECONDS)
        self._last = now
        return self.seconds


def wait_on(seconds: float) -> None:
    """Look around and see nothing to worry about."""


def give_up(seconds: float) -> None:
    """Look around, and after a moment be content with having tried."""
    if seconds > _FAREWELL_SECONDS:
        raise TimeoutError


class Link:
    """One end of a socket pair."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._socket.setblocking(False)
        self._part = bytearray(_HEADER.size)
        self._filled = 0
        self._header: tuple[bytes, int, int] | None = None
        self._descriptors: deque[int] = deque()

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
        """Whether the other end is closed, be there messages left to read or not."""
        return has_hung_up(self)

    def send(self, message: Message, look_around: LookAround = wait_on) -> None:
        """Send all of a message; the sender keeps its own descriptors.

        Raises:
            OSError: the other end is closed.
        """
        assert len(message.descriptors) <= MOST_DESCRIPTORS
        watch = Stopwatch()
        header = _HEADER.pack(message.kind, len(message.descriptors), len(message.payload))
        rights = array.array("i", message.descriptors)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if message.descriptors else []
        # In one piece where there is room, so that a small message goes out whole or not at all.
        parts = [memoryview(header), memoryview(message.payload)]
        while parts:
            try:
                sent = self._socket.sendmsg(parts, ancillary)
            except BlockingIOError:
                self._wait_to_send(watch, look_around)
                continue
            ancillary = []  # descriptors go with the first byte
            parts = _without(parts, sent)

    def receive(self, look_around: LookAround = wait_on, *, is_idle: bool = False) -> Message:
        """Wait for a whole message.

        Args:
            look_around: called again and again meanwhile.
            is_idle: whether there is nothing else to do: after a second it is called once a second.

        Raises:
            EOFError: the other end is closed.
        """
        watch = Stopwatch()
        while (message := self.take_one()) is None:
            rests = is_idle and watch.seconds > IDLE_LOOK_AROUND_SECONDS
            if not is_readable([self], IDLE_LOOK_AROUND_SECONDS if rests else LOOK_AROUND_SECONDS):
                look_around(watch.tick())
        return message

    def take(self) -> list[Message]:
        """The messages that have come in whole. Does not wait.

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
        """The next message, if it has come in whole. Does not wait, nor touch the one after it.

        Raises:
            EOFError: the other end is closed.
        """
        try:
            while (message := self._advance()) is None:
                pass
        except BlockingIOError:
            return None
        return message

    def close(self) -> None:
        """Close this end, and the descriptors of a message that never came in whole."""
        self._socket.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def _wait_to_send(self, watch: Stopwatch, look_around: LookAround) -> None:
        poller = select.poll()
        poller.register(self, select.POLLOUT)
        if not poller.poll(LOOK_AROUND_SECONDS * 1000):
            look_around(watch.tick())

    def _advance(self) -> Message | None:
        """Read what the socket has, at most to the end of a message; the message if it is whole.

        Raises:
            BlockingIOError: there is nothing to read now.
            EOFError: the other end is closed.
        """
        if self._filled < len(self._part):
            self._filled += self._read(memoryview(self._part)[self._filled :])
            if self._filled < len(self._part):
                return None
        if self._header is None:
            self._header = _HEADER.unpack(self._part)
            self._part, self._filled = bytearray(self._header[2]), 0
            return None if self._part else self._finish()
        return self._finish()

    def _finish(self) -> Message:
        assert self._header is not None
        kind, num_descriptors, _ = self._header
        descriptors = tuple(self._descriptors.popleft() for _ in range(num_descriptors))
        message = Message(kind, bytes(self._part), descriptors)
        self._header, self._part, self._filled = None, bytearray(_HEADER.size), 0
        return message

    def _read(self, view: memoryview) -> int:
        room = socket.CMSG_SPACE(MOST_DESCRIPTORS * array.array("i").itemsize)
        flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        try:
            count, ancillary, _, _ = self._socket.recvmsg_into([view], room, flags)
        except ConnectionError as error:
            raise EOFError("the other end of the link is gone") from error
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(data[: len(data) - len(data) % received.itemsize])
                self._descriptors.extend(received)
        if count == 0:
            raise EOFError("the other end of the link is closed")
        return count


class HasDescriptor(Protocol):
    """A socket, a link, an open file."""

    def fileno(self) -> int:
        """Its descriptor."""


def is_readable(
    ends: Sequence[HasDescriptor | int], seconds: float | None = LOOK_AROUND_SECONDS
) -> bool:
    """Wait until one of them has something to read, or is closed by the other end."""
    poller = select.poll()  # unlike select, it takes descriptors above 1023
    for end in ends:
        poller.register(end, select.POLLIN)
    return bool(poller.poll(None if seconds is None else seconds * 1000))


def has_hung_up(end: HasDescriptor) -> bool:
    """Whether the other end of a Unix socket is closed. Reads nothing."""
    poller = select.poll()
    poller.register(end, 0)  # which is to be told of hang-ups and errors only
    return bool(poller.poll(0))


def _without(parts: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of some buffers after their first bytes."""
    left = []
    for part in parts:
        taken = min(num_bytes, len(part))
        num_bytes -= taken
        left.append(part[taken:])
    return [part for part in left if part]


def _above_stdio(sock: socket.socket) -> socket.socket:
    """The same socket, but never as descriptor 0 to 2, which a script may have closed."""
    if sock.fileno() >= _FIRST_DESCRIPTOR:
        return sock
    with sock:
        return socket.socket(
            fileno=fcntl.fcntl(sock.fileno(), fcntl.F_DUPFD_CLOEXEC, _FIRST_DESCRIPTOR)
        )
