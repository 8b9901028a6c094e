"""A file of records that several processes fill together: in memory, or on disk.

    magic, length of the header, header (JSON)    up to a multiple of 4096 bytes
    flags, one byte per record: 1 if it is there  up to a multiple of 4096 bytes
    records, all of one length

A record's flag is set after its bytes are written, so a process that is killed leaves a record that
is not there, and two that write the same record write the same bytes. The file is a hole where
nothing was written: it takes the memory or the disk of what it holds. It is read and written by
calls and never mapped: a full disk is an error then, and not the end of the process.

A file without a name (memfd) is opened by others through the descriptor of its maker in /proc,
under Linux; elsewhere it is a temporary file that its maker removes.

Not covered: a loss of power, after which a disk may hold a flag and not its record; hosts that
share a disk over a network without locks of their own, which may read a sample twice.
"""

import fcntl
import os
import shutil
import struct
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from uuid import uuid4

import msgspec

from lockstep.cluster.memory_limits import free_memory
from lockstep.cluster.nameless_files import nameless_file
from lockstep.data.records.sample_records import Layout, num_bytes
from lockstep.disk import writing
from lockstep.errors import DataError
from lockstep.units import format_bytes

VERSION = 2

_MAGIC = b"lockstep"
_HEAD = struct.Struct("<8sq")  # magic, length of the header
_PAGE_BYTES = 4096
_DESCRIPTORS = "/proc/"  # begins the names of files that lie in memory
_LONGEST_HEADER = 1 << 24
_ALWAYS_FREE_BYTES = 1 << 20  # not worth a look at what is free


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a file holds.

    Attributes:
        version: of the format.
        num_records: how many there is room for.
        layout: of each.
        token: of this file alone.
    """

    version: int
    num_records: int
    layout: Layout
    token: str


class RecordFile:
    """An open file of records.

    Args:
        descriptor: of the file, which is this object's from now on.
        name: by which other processes of the host can open it.
        header: what it holds.
    """

    def __init__(self, descriptor: int, name: str, header: Header) -> None:
        self.name = name
        self.header = header
        self._descriptor = descriptor
        self._record_bytes = num_bytes(header.layout)
        self._flags = _pages(_HEAD.size + len(msgspec.json.encode(header)))
        self._records = self._flags + _pages(header.num_records)
        self._close = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def in_memory(cls, num_records: int, layout: Layout) -> "RecordFile":
        """A new one, gone with the last process that has it open.

        Raises:
            DataError: there is not that much memory.
        """
        header = _new_header(num_records, layout)
        _check_memory(num_records * num_bytes(layout))
        if hasattr(os, "memfd_create"):
            descriptor = nameless_file("lockstep-cache")
            name = f"{_DESCRIPTORS}{os.getpid()}/fd/{descriptor}"
            file = cls(descriptor, name, header)
        else:
            descriptor, name = tempfile.mkstemp(prefix="lockstep-cache-")
            file = cls(descriptor, name, header)
            weakref.finalize(file, _remove, name, os.getpid())
        with _errors_of(name, num_bytes(layout)):
            file._write_header()
        return file

    @classmethod
    def at(cls, path: str, num_records: int, layout: Layout) -> "RecordFile":
        """The one at a path, made if there is none.

        Raises:
            DataError: what is there is no such file, or of other samples; or the disk is too small.
        """
        with _errors_of(path):
            if not os.path.exists(path):
                _check_disk(path, num_records * num_bytes(layout))
                _make(path, _new_header(num_records, layout))
            file = cls._opened(path)
            _check_header(path, file.header, num_records, layout)
            _check_disk(path, (num_records - file.num_stored) * file._record_bytes)
        return file

    @classmethod
    def reopened(cls, name: str, header: Header) -> "RecordFile":
        """One that another process of the host has open.

        Raises:
            DataError: it is there no more.
        """
        try:
            file = cls._opened(name)
        except (OSError, DataError) as error:
            raise _gone(name) from error
        if file.header != header:
            raise _gone(name)
        return file

    @classmethod
    def _opened(cls, name: str) -> "RecordFile":
        descriptor = os.open(name, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(descriptor, name, _read_header(descriptor, name))
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def num_stored(self) -> int:
        """How many records are there."""
        flags = os.pread(self._descriptor, self.header.num_records, self._flags)
        return flags.count(1)

    def has(self, index: int) -> bool:
        """Whether a record is there."""
        return os.pread(self._descriptor, 1, self._flags + index) == b"\x01"

    def load(self, index: int) -> bytearray | None:
        """A copy of a record; None if it is not there."""
        if not self.has(index):
            return None
        record = bytearray(self._record_bytes)
        done = 0
        while done < len(record):  # one call brings at most 2 GiB
            part = memoryview(record)[done:]
            count = os.preadv(self._descriptor, [part], self._place(index) + done)
            if count == 0:
                raise _damaged(self.name, f"no record {index}")
            done += count
        return record

    def store(self, index: int, record: bytes) -> None:
        """Write a record.

        Raises:
            DataError: it does not go in, most likely because the disk is full.
        """
        assert len(record) == self._record_bytes
        with _errors_of(self.name, len(record)):
            self._write(record, self._place(index))
            self._write(b"\x01", self._flags + index)

    def claim(self, index: int) -> bool:
        """Whether this process may write a record, and no other is at it.

        The kernel releases what a process has claimed when it ends.
        """
        try:
            mode = fcntl.LOCK_EX | fcntl.LOCK_NB
            fcntl.lockf(self._descriptor, mode, 1, self._flags + index)
        except (BlockingIOError, PermissionError):
            return False
        except OSError:  # a disk without locks: two may read one sample
            return True
        return True

    def release(self, index: int) -> None:
        """Give up a claim."""
        with suppress(OSError):
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, self._flags + index)

    def _place(self, index: int) -> int:
        return self._records + index * self._record_bytes

    def _write_header(self) -> None:
        text = msgspec.json.encode(self.header)
        self._write(_HEAD.pack(_MAGIC, len(text)) + text, 0)
        os.ftruncate(self._descriptor, self._place(self.header.num_records))

    def _write(self, data: bytes, offset: int) -> None:
        view = memoryview(data)
        while view:
            count = os.pwrite(self._descriptor, view, offset)
            view, offset = view[count:], offset + count


def _new_header(num_records: int, layout: Layout) -> Header:
    return Header(version=VERSION, num_records=num_records, layout=layout, token=uuid4().hex)


def _make(path: str, header: Header) -> None:
    """Make a file that is complete from the moment it has its name; the first process wins."""
    folder, name = os.path.split(path)
    descriptor, draft = tempfile.mkstemp(prefix=f".{name}.", dir=folder)
    try:
        RecordFile(descriptor, draft, header)._write_header()
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        os.unlink(draft)


def _read_header(descriptor: int, name: str) -> Header:
    head = os.pread(descriptor, _HEAD.size, 0)
    if len(head) < _HEAD.size:
        raise _damaged(name, f"a file of {len(head)} bytes")
    magic, length = _HEAD.unpack(head)
    if magic != _MAGIC or not 0 < length <= _LONGEST_HEADER:
        raise _damaged(name, "a file of another kind")
    text = os.pread(descriptor, length, _HEAD.size)
    try:
        version = msgspec.json.decode(text, type=_Versioned).version
        if version != VERSION:
            raise _damaged(name, f"one of version {version}, and this Lockstep has {VERSION}")
        header = msgspec.json.decode(text, type=Header)
        num_bytes(header.layout)
    except (msgspec.DecodeError, AttributeError, TypeError) as error:
        raise _damaged(name, f"a header that cannot be read ({error})") from error
    return header


class _Versioned(msgspec.Struct):
    version: int


def _check_header(path: str, found: Header, num_records: int, layout: Layout) -> None:
    if (found.num_records, found.layout) == (num_records, layout):
        return
    raise DataError(
        f"The cache {path} must belong to this dataset: {num_records} samples, each {layout}.",
        received=f"a cache of {found.num_records} samples, each {found.layout}",
        fix="Give another path, or remove the file.",
    )


def _check_memory(needed: int) -> None:
    free = free_memory() if needed > _ALWAYS_FREE_BYTES else None
    if free is not None and needed > free.num_bytes:
        raise DataError(
            f"Caching this dataset in memory takes {format_bytes(needed)}.",
            received=free,
            fix="Cache it on disk with path=..., or only a part: torch.utils.data.Subset.",
        )


def _check_disk(path: str, needed: int) -> None:
    free = shutil.disk_usage(os.path.dirname(path)).free
    if needed > free:
        raise DataError(
            f"The cache {path} will grow by {format_bytes(needed)}.",
            received=f"{format_bytes(free)} free on its disk",
            fix="Give a path on another disk, or cache a part: torch.utils.data.Subset.",
        )


@contextmanager
def _errors_of(path: str, num_bytes: int | None = None) -> Iterator[None]:
    """Within the block a cache is written, so many bytes of it."""
    is_memory = path.startswith(_DESCRIPTORS)
    try:
        with nullcontext() if is_memory else writing(path, num_bytes):
            yield
    except OSError as error:
        free = f" ({free_memory()})" if is_memory else ""
        raise DataError(
            f"The cache {'in memory' if is_memory else path} cannot be written.",
            received=f"{type(error).__name__}: {error.strerror}{free}",
            fix="Give a path in a folder that exists, is writable and has room.",
        ) from error


def _damaged(name: str, received: str) -> DataError:
    return DataError(
        f"{name} must be a cache that Lockstep made.",
        received=received,
        fix="Give another path, or remove the file.",
    )


def _gone(name: str) -> DataError:
    return DataError(
        "A cache in memory exists only in the process that made it and those it was sent to.",
        received=f"{name}, which is gone",
        fix="Keep the cached dataset until training has ended, or cache to a file: path=...",
    )


def _remove(name: str, maker: int) -> None:
    if os.getpid() == maker:
        Path(name).unlink(missing_ok=True)


def _pages(count: int) -> int:
    return -(-count // _PAGE_BYTES) * _PAGE_BYTES
