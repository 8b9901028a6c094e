"""A file of records that several processes fill together: in memory, or on disk.

    magic, length of the header, header (JSON)    up to a multiple of 4096 bytes
    flags, one byte per record: 1 if it exists    up to a multiple of 4096 bytes
    records, all of one length

A record's flag is set after its bytes are written, so a killed process leaves no half-written
record, and two processes that write the same record write the same bytes. The file is sparse: it
takes memory or disk only for records that were written. It is read and written by system calls and
never mapped, so that a full disk is an error and does not kill the process.

On Linux other processes open a file without a name (memfd) through the descriptor of its maker in
/proc; elsewhere it is a temporary file that its maker removes.

Not covered: a loss of power, after which a disk may have a flag without its record; hosts that
share a network disk without locks, which may read a sample twice.
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

from lockstep.cluster.anonymous_files import anonymous_file
from lockstep.cluster.memory_limits import free_memory
from lockstep.data.records.sample_records import Layout, num_bytes
from lockstep.disk import writing
from lockstep.errors import DataError
from lockstep.formatting import format_bytes

VERSION = 2

_MAGIC = b"lockstep"
_HEAD = struct.Struct("<8sq")  # magic, length of the header
_PAGE_BYTES = 4096
_DESCRIPTORS = "/proc/"  # names of files in memory begin with it
_LONGEST_HEADER = 1 << 24
_ALWAYS_FREE_BYTES = 1 << 20  # for less, free memory is not checked


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The header of a file.

    Attributes:
        version: of the format.
        num_records: the number of records that fit.
        layout: of each record.
        token: unique to this file.
    """

    version: int
    num_records: int
    layout: Layout
    token: str


class RecordFile:
    """An open file of records.

    Args:
        descriptor: of the file, which this object closes.
        name: by which other processes of the host can open it.
        header: of the file.
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
        """A new file, which exists until the last process closes it.

        Raises:
            DataError: there is not enough memory.
        """
        header = _new_header(num_records, layout)
        _check_memory(num_records * num_bytes(layout))
        if hasattr(os, "memfd_create"):
            descriptor = anonymous_file("lockstep-cache")
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
        """The file at a path, made if it does not exist.

        Raises:
            DataError: it is another kind of file, or of other samples; or the disk is too small.
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
        """A file that another process of the host has open.

        Raises:
            DataError: it no longer exists.
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
        """How many records exist."""
        flags = os.pread(self._descriptor, self.header.num_records, self._flags)
        return flags.count(1)

    def has(self, index: int) -> bool:
        """Whether a record exists."""
        return os.pread(self._descriptor, 1, self._flags + index) == b"\x01"

    def load(self, index: int) -> bytearray | None:
        """A copy of a record; None if it does not exist."""
        if not self.has(index):
            return None
        record = bytearray(self._record_bytes)
        done = 0
        while done < len(record):  # one call reads at most 2 GiB
            part = memoryview(record)[done:]
            count = os.preadv(self._descriptor, [part], self._place(index) + done)
            if count == 0:
                raise _damaged(self.name, f"no record {index}")
            done += count
        return record

    def store(self, index: int, record: bytes) -> None:
        """Write a record.

        Raises:
            DataError: it cannot be written, most likely because the disk is full.
        """
        assert len(record) == self._record_bytes
        with _errors_of(self.name, len(record)):
            self._write(record, self._place(index))
            self._write(b"\x01", self._flags + index)

    def claim(self, index: int) -> bool:
        """Claim a record for writing; False if another process has claimed it.

        The kernel releases a process's claims when it ends.
        """
        try:
            mode = fcntl.LOCK_EX | fcntl.LOCK_NB
            fcntl.lockf(self._descriptor, mode, 1, self._flags + index)
        except (BlockingIOError, PermissionError):
            return False
        except OSError:  # a disk without locks: two processes may read one sample
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
    """Make a file that is complete when it gets its name; the first process wins."""
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
    """Within the block ``num_bytes`` of a cache are written; OSErrors become DataErrors."""
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
