"""Frames: a stream of bytes, cut into messages of a header of fixed size and a payload."""

import struct
from collections import deque
from collections.abc import Callable
from typing import Any


class FrameReader:
    """Reads frames from a stream that arrives in pieces.

    Args:
        header: its last number is the length of the payload.
        read: reads at most so many bytes of the stream, and at least one; raises
            ``BlockingIOError`` if nothing has arrived.
        check: called with the numbers of a header before any of its payload is read; may raise.
    """

    def __init__(
        self,
        header: struct.Struct,
        read: Callable[[int], bytes | memoryview],
        check: Callable[..., None] = lambda *numbers: None,
    ) -> None:
        self._header = header
        self._read = read
        self._check = check
        self._numbers: list[Any] | None = None  # of the frame whose payload is being read
        self._pieces: list[bytes | memoryview] = []
        self._num_missing = header.size

    def take(self) -> tuple[Any, ...]:
        """The next frame: its numbers without the length, and its payload. Reads nothing behind it.

        Raises:
            BlockingIOError: it has not arrived in whole; also any error of ``read`` and ``check``.
        """
        while True:
            while self._num_missing:
                piece = self._read(self._num_missing)
                self._pieces.append(piece)
                self._num_missing -= len(piece)
            whole = b"".join(self._pieces)
            self._pieces = []
            if self._numbers is not None:
                frame = (*self._numbers, whole)
                self._numbers, self._num_missing = None, self._header.size
                return frame
            numbers = self._header.unpack(whole)
            self._check(*numbers)
            *self._numbers, self._num_missing = numbers


def drop(parts: deque[memoryview], num_bytes: int) -> None:
    """Remove the first bytes of some buffers, and buffers without bytes."""
    while parts and num_bytes >= len(parts[0]):
        num_bytes -= len(parts.popleft())
    if num_bytes:
        parts[0] = parts[0][num_bytes:]
