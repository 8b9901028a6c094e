"""A channel: framed messages over a sealed connection to another host.

A frame is a kind, a length, and bytes; nothing is unpickled. No call blocks in the kernel for long:
while it waits, it calls ``look_around`` 50 times a second, which raises to give up (as on a
``Link``).

A host that fails sends the reason (ERROR); one that is done says goodbye (GOODBYE). A connection
that ends without either means that its host is gone: all calls on it raise an error with its name.
"""

import contextlib
import select
import socket
import struct
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from lockstep.channel.frames import FrameReader
from lockstep.channel.polling import LookAround, Stopwatch, give_up_after, wait_for, wait_on
from lockstep.channel.records import TamperedError
from lockstep.channel.sealed_channel import Channel, tampered
from lockstep.errors import HostError
from lockstep.launch.health.failure import decode_report, encode_report
from lockstep.launch.sockets import VANISHED_SECONDS, is_unanswered
from lockstep.units import format_bytes

ERROR = b"!"
GOODBYE = b"."

MOST_BYTES = 1 << 36
_HEADER = struct.Struct("!cQ")  # kind, payload bytes
_CHUNK_BYTES = 1 << 20
# So much is read before anyone asks for it, to see an ERROR behind it.
_READ_AHEAD_BYTES = 1 << 26
_MOST_ERROR_BYTES = 1 << 16
_MOST_DRAINS = 1000
_ERROR_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class RemotePeer:
    """The host at the other end, for messages.

    Attributes:
        host: its number; below 0 where it has not told it yet.
        name: what it is called, and where it is: "node-b, 10.0.0.2".
    """

    host: int
    name: str

    def __str__(self) -> str:
        return f"the host at {self.name}" if self.host < 0 else f"Host {self.host} ({self.name})"


class Frame(NamedTuple):
    """One message."""

    kind: bytes
    payload: bytes


class FramedChannel:
    """One end of a connection.

    Args:
        channel: the connection; now the channel's.
        peer: the host at the other end.
        most_bytes: of a frame.

    Attributes:
        peer: may be set once more is known.
        most_bytes: likewise.
        was_tampered_with: something else has come than the other host sent.
    """

    def __init__(self, channel: Channel, peer: RemotePeer, most_bytes: int = MOST_BYTES) -> None:
        self.peer = peer
        self.most_bytes = most_bytes
        self.was_tampered_with = False
        self._channel = channel
        self._reader = FrameReader(_HEADER, channel.receive, self._check_size)
        self._frames: deque[Frame] = deque()
        self._num_waiting_bytes = 0
        self._failure = ""  # why this channel is of no use any more
        self._is_lost = False  # and that is because the other host is
        self._report = b""  # or what the other host has said of its failure
        self._has_left = False

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._channel.fileno()

    @property
    def own_address(self) -> tuple[socket.AddressFamily, str]:
        """The family and address of this host on the interface that the channel uses."""
        sock = self._channel.socket
        return sock.family, sock.getsockname()[0]

    @property
    def was_told(self) -> bool:
        """Whether the other host has said that it failed."""
        return bool(self._report)

    def send(self, kind: bytes, payload: bytes = b"", look_around: LookAround = wait_on) -> None:
        """Send a frame; what a call that was given up has left is sent before it.

        Raises:
            HostError: the other host failed, left, or is gone.
        """
        if len(payload) > self.most_bytes:
            raise self._oversized(f"{self.peer} cannot be sent so much at once.", len(payload))
        self._channel.put(_HEADER.pack(kind, len(payload)), payload)
        watch = Stopwatch()

        def look(waited_seconds: float) -> None:
            self.look()
            look_around(waited_seconds)

        while not self._flush():
            wait_for(self, select.POLLOUT, watch, look)

    def receive(self, look_around: LookAround = wait_on) -> Frame:
        """Wait for a frame.

        Raises:
            HostError: the other host failed, left, or is gone.
        """
        watch = Stopwatch()
        while (frame := self.take_one()) is None:
            wait_for(self, select.POLLIN, watch, look_around)
        return frame

    def take_one(self) -> Frame | None:
        """The next frame, if it has come in whole. Does not wait.

        Raises:
            HostError: the other host failed, left, or is gone.
        """
        self.look()
        if self._frames:
            frame = self._frames.popleft()
            self._num_waiting_bytes -= len(frame.payload)
            return frame
        if self._has_left:
            raise HostError(f"{self.peer} has left: its script takes no part any more.")
        return None

    def look(self) -> None:
        """See whether the other host is still there. Takes no frame, and does not wait.

        Raises:
            HostError: the other host failed or is gone.
        """
        try:
            while not self._is_over and self._num_waiting_bytes < _READ_AHEAD_BYTES:
                self._read()
        except BlockingIOError:
            if is_unanswered(self._channel.socket):
                self._fail(f"nothing has come back for {VANISHED_SECONDS} s")
        if self._report:
            raise decode_report(self._report)
        if self._failure:
            raise (HostError.of_loss if self._is_lost else HostError)(self._failure)

    def fail(self, text: str, error: BaseException | None = None) -> None:
        """Tell the other host that this one has failed, and why, if it listens; and close."""
        # It may not be reading, and this host wants to end.
        with contextlib.suppress(HostError, TimeoutError):
            told = encode_report(text, error, _MOST_ERROR_BYTES)
            self.send(ERROR, told, give_up_after(_ERROR_SECONDS))
        self.close()

    def close(self) -> None:
        """Say goodbye, if that is possible without waiting, and close."""
        self._failure = self._failure or f"The connection to {self.peer} is closed on this side."
        # Nothing more to read, or nobody to say goodbye to: as good.
        with contextlib.suppress(OSError):
            if not self._channel.has_unsent:
                self._channel.put(_HEADER.pack(GOODBYE, 0))
                self._channel.flush()
            # Where something is left unread, closing throws away what was sent, too.
            for _ in range(_MOST_DRAINS):
                if not self._channel.socket.recv(_CHUNK_BYTES):
                    break
        self._channel.close()

    def _flush(self) -> bool:
        """Send what there is room for; whether all is sent."""
        try:
            return self._channel.flush()
        except OSError as error:
            self.look()  # it may have said why before it closed the connection
            raise self._gone(error.strerror or str(error)) from error

    @property
    def _is_over(self) -> bool:
        return self._has_left or bool(self._failure) or self.was_told

    def _read(self) -> None:
        try:
            frame = Frame(*self._reader.take())
        except BlockingIOError:
            raise
        except TamperedError as error:
            self._failure, self.was_tampered_with = tampered(str(self.peer), error), True
        except HostError as error:
            self._failure = str(error)
        except OSError as error:
            self._fail(error.strerror or str(error))
        else:
            self._take_in(frame)

    def _check_size(self, kind: bytes, num_bytes: int) -> None:
        if num_bytes > (_MOST_ERROR_BYTES if kind == ERROR else self.most_bytes):
            raise self._oversized(f"{self.peer} sent more than can be.", num_bytes)

    def _take_in(self, frame: Frame) -> None:
        if frame.kind == ERROR:
            self._report = frame.payload
        elif frame.kind == GOODBYE:
            self._has_left = True
        else:
            self._frames.append(frame)
            self._num_waiting_bytes += len(frame.payload)

    def _fail(self, why: str) -> None:
        self._failure, self._is_lost = str(self._gone(why)), True

    def _gone(self, why: str) -> HostError:
        return HostError.of_loss(f"{self.peer} no longer answers: {why}.")

    def _oversized(self, what: str, num_bytes: int) -> HostError:
        most = format_bytes(self.most_bytes)
        return HostError(what, received=format_bytes(num_bytes), fix=f"A frame holds up to {most}.")
