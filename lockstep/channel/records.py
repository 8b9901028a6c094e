"""Records: encrypted messages between hosts. Bytes to bytes, without sockets.

A record is two sealed parts: a length, and so many bytes. A part is encrypted by AES-256-GCM, with
a tag of 16 bytes. Its nonce is its number in its direction, and is never sent. So a part that was
changed, left out, repeated, moved or forged does not open, and no part after it does. The length
has a seal of its own; otherwise a changed length could make the reader wait for bytes that are
never sent.
"""

import struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from lockstep.channel.keys import following

# Large enough that calls cost little, and small enough that a record stays in a processor's cache.
MOST_BYTES = 1 << 18

_LENGTH = struct.Struct("!I")
_TAG_BYTES = 16
_NONCE_BYTES = 12
HEADER_BYTES = _LENGTH.size + _TAG_BYTES
# A key is good for 128 GiB, far below what AES-GCM allows; then the next one follows.
_PARTS_PER_KEY = 1 << 20
_NEXT_KEY = b"lockstep next key"


class TamperedError(ConnectionError):
    """The received bytes are not those that the other end sent."""


class _Direction:
    """Counts parts, and gives each its cipher and nonce."""

    def __init__(self, key: bytes) -> None:
        self._use(key)

    def advance(self) -> tuple[AESGCM, bytes]:
        """The next part's cipher and nonce, which are used once."""
        if self._number == _PARTS_PER_KEY:
            self._use(following(self._key, _NEXT_KEY))
        nonce = self._number.to_bytes(_NONCE_BYTES, "big")
        self._number += 1
        return self._cipher, nonce

    def _use(self, key: bytes) -> None:
        self._key, self._cipher, self._number = key, AESGCM(key), 0


class Sealer:
    """Makes the records of one direction."""

    def __init__(self, key: bytes) -> None:
        self._direction = _Direction(key)

    def seal(self, content: bytes | memoryview) -> tuple[bytes, bytes]:
        """The next record, in its two parts; of 1 to ``MOST_BYTES`` bytes."""
        assert 0 < len(content) <= MOST_BYTES
        return self._sealed(_LENGTH.pack(len(content))), self._sealed(content)

    def _sealed(self, part: bytes | memoryview) -> bytes:
        cipher, nonce = self._direction.advance()
        return cipher.encrypt(nonce, part, None)


class Opener:
    """Opens the records of one direction, which come in pieces.

    It never asks for bytes after the current part: those may be for another process.
    """

    def __init__(self, key: bytes) -> None:
        self._direction = _Direction(key)
        self._buffer = bytearray(HEADER_BYTES)  # as large as the largest part so far
        self._await(HEADER_BYTES, is_header=True)

    @property
    def room(self) -> memoryview:
        """Where the next bytes go; none after a part that did not open."""
        return self._part[self._num_filled :]

    def take_in(self, num_bytes: int) -> bytes:
        """Process so many bytes that have come; returns the content of a complete record, or b"".

        Raises:
            TamperedError: the bytes are not those that the other end sent.
        """
        self._num_filled += num_bytes
        if self._num_filled < len(self._part):
            return b""
        content = self._opened()
        if not self._is_header:
            self._await(HEADER_BYTES, is_header=True)
            return content
        self._await(_LENGTH.unpack(content)[0] + _TAG_BYTES, is_header=False)
        return b""

    def _opened(self) -> bytes:
        cipher, nonce = self._direction.advance()
        try:
            return cipher.decrypt(nonce, self._part, None)
        except InvalidTag:
            raise TamperedError("bytes without that host's seal") from None

    def _await(self, num_bytes: int, *, is_header: bool) -> None:
        if len(self._buffer) < num_bytes:
            self._buffer = bytearray(num_bytes)
        self._is_header = is_header
        self._part, self._num_filled = memoryview(self._buffer)[:num_bytes], 0
