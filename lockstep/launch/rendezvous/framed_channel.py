"""A framed channel: messages over a sealed connection to another host.

A frame is a kind, a length, and bytes; nothing is unpickled. No call blocks in the kernel for long:
while it waits, it calls ``look_around`` 50 times a second, which raises to give up (as on a
``Link``).

A host that fails sends the reason (ERROR); one that is done sends GOODBYE. A connection that ends
without either means that its host is lost: all calls on it raise an error with its name.
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
from lockstep.formatting import format_bytes
from lockstep.launch.health.failure import decode_report, encode_report
from lockstep.launch.sockets import VANISHED_SECONDS, is_unanswered

ERROR = b"!"
GOODBYE = b"."

MOST_BYTES = 1 << 36
_HEADER = struct.Struct("!cQ")  # kind, payload bytes
_CHUNK_BYTES = 1 << 20
# So much is read before it is needed, to find an ERROR behind it.
_READ_AHEAD_BYTES = 1 << 26
_MOST_ERROR_BYTES = 1 << 16
_MOST_DRAINS = 1000
_ERROR_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class RemotePeer:
    """The host at the other end, for messages.

    Attributes:
        host: its number; negative until it has sent it.
        name: its name and address: "node-b, 10.0.0.2".
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
        channel: the connection, which this object closes.
        peer: the host at the other end.
        most_bytes: of a frame.

    Attributes:
        peer: can be set when more is known.
        most_bytes: can be set likewise.
        was_tampered_with: other data has arrived than the other host sent.
    """

    def __init__(self, channel: Channel, peer: RemotePeer, most_bytes: int = MOST_BYTES) -> None:
        self.peer = peer
        self.most_bytes = most_bytes
        self.was_tampered_with = False
        self._channel = channel
        self._reader = FrameReader(_HEADER, channel.receive, self._check_size)
        self._frames: deque[Frame] = deque()
        self._num_waiting_bytes = 0
        self._failure = ""  # why this channel cannot be used any more
        self._is_peer_lost = False  # the failure is the loss of the other host
        self._report = b""  # the other host's report of its own failure
        self._has_said_goodbye = False

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._channel.fileno()

    @property
    def own_address(self) -> tuple[socket.AddressFamily, str]:
        """The family and address of this host on the interface that the channel uses."""
        sock = self._channel.socket
        return sock.family, sock.getsockname()[0]

    @property
    def has_report(self) -> bool:
        """True if the other host has reported a failure."""
        return bool(self._report)

    def send(self, kind: bytes, payload: bytes = b"", look_around: LookAround = wait_on) -> None:
        """Send a frame, after the unsent rest of earlier frames.

        Raises:
            HostError: the other host failed, left, or is lost.
        """
        if len(payload) > self.most_bytes:
            raise self._oversized(f"A message to {self.peer} is too large.", len(payload))
        self._channel.put(_HEADER.pack(kind, len(payload)), payload)
        watch = Stopwatch()

        def check(waited_seconds: float) -> None:
            self.check()
            look_around(waited_seconds)

        while not self._flush():
            wait_for(self, select.POLLOUT, watch, check)

    def receive(self, look_around: LookAround = wait_on) -> Frame:
        """Wait for a frame.

        Raises:
            HostError: the other host failed, left, or is lost.
        """
        watch = Stopwatch()
        while (frame := self.take_one()) is None:
            wait_for(self, select.POLLIN, watch, look_around)
        return frame

    def take_one(self) -> Frame | None:
        """The next frame, if it has arrived completely. Does not wait.

        Raises:
            HostError: the other host failed, left, or is lost.
        """
        self.check()
        if self._frames:
            frame = self._frames.popleft()
            self._num_waiting_bytes -= len(frame.payload)
            return frame
        if self._has_said_goodbye:
            raise HostError(f"{self.peer} has left: its script has ended its part of the training.")
        return None

    def check(self) -> None:
        """Check that the other host is connected. Takes no frame, and does not wait.

        Raises:
            HostError: the other host failed or is lost.
        """
        try:
            while not self._is_over and self._num_waiting_bytes < _READ_AHEAD_BYTES:
                self._read()
        except BlockingIOError:
            if is_unanswered(self._channel.socket):
                self._note_loss(f"nothing has come back for {VANISHED_SECONDS} s")
        if self._report:
            raise decode_report(self._report)
        if self._failure:
            raise (HostError.of_loss if self._is_peer_lost else HostError)(self._failure)

    def fail(self, text: str, error: BaseException | None = None) -> None:
        """Report this host's failure to the other host if it reads, and close."""
        # The other host may not read, and this one must end.
        with contextlib.suppress(HostError, TimeoutError):
            report = encode_report(text, error, _MOST_ERROR_BYTES)
            self.send(ERROR, report, give_up_after(_ERROR_SECONDS))
        self.close()

    def close(self) -> None:
        """Send GOODBYE if that is possible without waiting, and close."""
        self._failure = self._failure or f"The connection to {self.peer} is closed on this side."
        # An error here means that the other end is closed or nothing is left to read.
        with contextlib.suppress(OSError):
            if not self._channel.has_unsent:
                self._channel.put(_HEADER.pack(GOODBYE, 0))
                self._channel.flush()
            # If data is left unread, closing discards sent data, too.
            for _ in range(_MOST_DRAINS):
                if not self._channel.socket.recv(_CHUNK_BYTES):
                    break
        self._channel.close()

    def _flush(self) -> bool:
        """Send as much as there is room for; True if all is sent."""
        try:
            return self._channel.flush()
        except OSError as error:
            self.check()  # it may have sent the reason before it closed the connection
            raise self._loss_error(error.strerror or str(error)) from error

    @property
    def _is_over(self) -> bool:
        return self._has_said_goodbye or bool(self._failure) or self.has_report

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
            self._note_loss(error.strerror or str(error))
        else:
            self._handle(frame)

    def _check_size(self, kind: bytes, num_bytes: int) -> None:
        if num_bytes > (_MOST_ERROR_BYTES if kind == ERROR else self.most_bytes):
            raise self._oversized(f"{self.peer} sent a message that is too large.", num_bytes)

    def _handle(self, frame: Frame) -> None:
        if frame.kind == ERROR:
            self._report = frame.payload
        elif frame.kind == GOODBYE:
            self._has_said_goodbye = True
        else:
            self._frames.append(frame)
            self._num_waiting_bytes += len(frame.payload)

    def _note_loss(self, why: str) -> None:
        self._failure, self._is_peer_lost = str(self._loss_error(why)), True

    def _loss_error(self, why: str) -> HostError:
        return HostError.of_loss(f"{self.peer} no longer answers: {why}.")

    def _oversized(self, what: str, num_bytes: int) -> HostError:
        most = format_bytes(self.most_bytes)
        return HostError(what, received=format_bytes(num_bytes), fix=f"A frame holds up to {most}.")
