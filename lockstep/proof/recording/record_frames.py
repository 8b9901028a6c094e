"""The file of one rank's record: frames that are appended, each with its length and checksum.

A step is one frame, written by one call. Whatever ends the process, all earlier frames can be
read; a frame that is cut short or damaged ends the reading, and the reader says so.
"""

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from lockstep.disk import writing
from lockstep.errors import DataError
from lockstep.proof.recording.shards import Shard

MAGIC = b"lockstep record 2\n"  # with the version of digests
_FRAME = struct.Struct("<II")  # length and CRC-32 of what follows

GRADIENT, SLOT, PARAMETER, BUFFER = "gradient", "slot", "parameter", "buffer"
START = -1  # the step of what was there before the first


class Module(msgspec.Struct, frozen=True, array_like=True):
    """A module whose kind matters to what is compared.

    Attributes:
        name: canonical.
        kind: its class.
        share: of dropped values, for dropouts; 0 for others.
    """

    name: str
    kind: str
    share: float = 0.0


class Header(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What is known of a rank before it trains."""

    rank: int
    world_size: int
    device: str
    library: str
    versions: dict[str, str]
    modules: tuple[Module, ...] = ()
    is_full: bool = False


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """What a digest is of.

    Attributes:
        kind: ``GRADIENT``, ``SLOT``, ``PARAMETER`` or ``BUFFER``.
        name: canonical; of a slot, the parameter's and the slot's.
        dtype: without ``torch.``.
        shard: which elements of it the rank has.
    """

    kind: str
    name: str
    dtype: str
    shard: Shard


class Entries(msgspec.Struct, frozen=True, tag=True):
    """Entries that the frames behind it number on from the last."""

    entries: tuple[Entry, ...]


class Computation(msgspec.Struct, frozen=True, tag=True):
    """What the first forward pass has shown.

    Attributes:
        dtype: the shortest dtype of a module's output, without ``torch.``.
        order: of the modules with parameters or buffers.
    """

    dtype: str
    order: tuple[str, ...]


class Loss(msgspec.Struct, frozen=True, array_like=True):
    """A loss and its weight; None if it was not given."""

    value: float
    weight: float | None


class Samples(msgspec.Struct, frozen=True, array_like=True):
    """A batch: a word of 8 bytes for each sample.

    Attributes:
        are_ids: the words are the user's own numbers; else they are digests.
        words: little endian.
    """

    are_ids: bool
    words: bytes


class Group(msgspec.Struct, frozen=True, array_like=True):
    """A group of an optimizer's parameters, with its options."""

    names: tuple[str, ...]
    options: dict[str, Any]


class Step(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """An update, or with ``START`` what was there before.

    Attributes:
        step: from 0.
        optimizer: number of the optimizer that stepped.
        is_complete: False if training ended before the update.
        losses: since the step before.
        samples: since the step before.
        groups: of the optimizer; None if as in the step before.
        random_state: digest of the state of torch's random numbers before the step before.
        numbers: of the entries, 4 bytes each, little endian.
        digests: of the entries, in their order.
        tensors: the entries' elements, in a full record.
    """

    step: int
    optimizer: int = 0
    is_complete: bool = True
    losses: tuple[Loss, ...] = ()
    samples: tuple[Samples, ...] = ()
    groups: tuple[Group, ...] | None = None
    random_state: int = 0
    numbers: bytes = b""
    digests: bytes = b""
    tensors: tuple[bytes, ...] = ()


Frame = Header | Entries | Computation | Step


class RecordWriter:
    """Writes a rank's file, over one that is there.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str], rank: int) -> None:
        self.path = file_of(Path(folder), rank)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "wb", buffering=0)  # noqa: SIM115
        self._encoder = msgspec.msgpack.Encoder()
        self._append(MAGIC)

    def write(self, frame: Frame) -> None:
        """Append a frame."""
        body = self._encoder.encode(frame)
        self._append(_FRAME.pack(len(body), zlib.crc32(body)) + body)

    def close(self) -> None:
        """End the file."""
        self._file.close()

    def _append(self, data: bytes) -> None:
        with writing(self.path, len(data)):
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]


def file_of(folder: Path, rank: int) -> Path:
    """Where a rank's record is."""
    return folder / f"rank{rank}.record"


def read_frames(path: Path) -> Iterator[Frame]:
    """All frames that can be read.

    Raises:
        DataError: it is no record.
    """
    decoder = msgspec.msgpack.Decoder(Frame)
    with open(path, "rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise DataError(
                "A rank's record must begin as such a file does.",
                received=path,
                fix="Name a folder that lockstep.record has written, with the same version.",
            )
        while len(head := file.read(_FRAME.size)) == _FRAME.size:
            length, checksum = _FRAME.unpack(head)
            body = file.read(length)
            if len(body) != length or zlib.crc32(body) != checksum:
                return
            yield decoder.decode(body)
