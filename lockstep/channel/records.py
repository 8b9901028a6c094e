"""Records: what travels between hosts, sealed. Bytes to bytes; no socket is known here.

A record is a length of 4 bytes, then so many bytes: what AES-256-GCM makes of the content, and its
tag of 16 bytes, which covers the length, too. A record's number in its direction is its nonce, and
is never sent. So a record that was changed, left out, repeated, put elsewhere, or made by somebody
else does not open, and after it none does.
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
# A key is good for 256 GiB, far below what AES-GCM allows; then the next one follows.
_RECORDS_PER_KEY = 1 << 20
_NEXT_RECORDS = b"lockstep next records"


class TamperedError(ConnectionError):
    """What came is not what the other end sent."""


class _Direction:
    """Counts records, and has the cipher and nonce of each."""

    def __init__(self, key: bytes) -> None:
        self._use(key)

    def advance(self) -> tuple[AESGCM, bytes]:
        """The next record's cipher and nonce, which nobody gets again."""
        if self._number == _RECORDS_PER_KEY:
            self._use(following(self._key, _NEXT_RECORDS))
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
        """The next record, in two parts; of 1 to ``MOST_BYTES`` bytes."""
        assert 0 < len(content) <= MOST_BYTES
        length = _LENGTH.pack(len(content) + _TAG_BYTES)
        cipher, nonce = self._direction.advance()
        return length, cipher.encrypt(nonce, content, length)


class Opener:
    """Opens the records of one direction, which come in pieces.

    Not a byte is asked for beyond the record that is coming: what follows may be for another
    process.
    """

    def __init__(self, key: bytes) -> None:
        self._direction = _Direction(key)
        self._buffer = bytearray(_LENGTH.size)  # the largest record so far
        self._await_length()

    @property
    def room(self) -> memoryview:
        """Where the next bytes go; none after a record that did not open."""
        return self._part[self._num_filled :]

    def take_in(self, num_bytes: int) -> bytes:
        """Go on, after so many bytes have come; the content of a record that is whole, or nothing.

        Raises:
            TamperedError: this is not what the other end sent.
        """
        self._num_filled += num_bytes
        if self._num_filled < len(self._part):
            return b""
        if not self._length:
            self._await_rest(bytes(self._part))
            return b""
        cipher, nonce = self._direction.advance()
        try:
            content = cipher.decrypt(nonce, self._part, self._length)
        except InvalidTag:
            raise TamperedError("a record that does not open") from None
        self._await_length()
        return content

    def _await_length(self) -> None:
        self._length = b""
        self._part, self._num_filled = memoryview(self._buffer)[: _LENGTH.size], 0

    def _await_rest(self, length: bytes) -> None:
        (num_bytes,) = _LENGTH.unpack(length)
        if not _TAG_BYTES < num_bytes <= MOST_BYTES + _TAG_BYTES:
            raise TamperedError(f"a record of {num_bytes} bytes")
        if len(self._buffer) < num_bytes:
            self._buffer = bytearray(num_bytes)
        self._length = length
        self._part, self._num_filled = memoryview(self._buffer)[:num_bytes], 0
