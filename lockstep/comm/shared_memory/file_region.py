"""Regions that lie in a file of a directory: memory that is there only while it is used.

A process reads the pages of some tensors ahead, uses them, and writes them to the disk afterwards,
so that of a large file a few pages are in memory at any time: neither the process nor the kernel's
cache keeps the others. While they are used they are memory of this process alone, at the same
addresses, which the disk reads and writes by itself: faults on a file's pages, and the kernel's
notes on each, took three times as long as the disk. The file has no name, so it is gone with the
last process that has it.
"""

import ctypes
import errno
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.comm.shared_memory.shared_region import MappedMemory, SharedRegion, advise, pages_of
from lockstep.errors import DeviceError
from lockstep.formatting import format_bytes

# Windows that are read ahead, and that may be on their way to the disk.
_MOST_AHEAD, _MOST_BEHIND = 3, 4

# man 2 sync_file_range
_START_WRITING, _WRITE_AND_WAIT = 2, 7


class FileRegion(SharedRegion):
    """A region in a file; its descriptor stays open as long as its tensors."""

    @classmethod
    def create_in(cls, directory: str, num_bytes: int) -> "FileRegion":
        """Make a region of ``num_bytes`` zeros, for which the disk has room.

        Raises:
            DeviceError: the directory does not exist, or its disk has not that much room.
        """
        descriptor = -1
        try:
            descriptor = unnamed_file(directory)
            if num_bytes and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, num_bytes)
            os.ftruncate(descriptor, max(num_bytes, 1))
        except OSError as error:
            if descriptor >= 0:
                os.close(descriptor)
            raise DeviceError(
                f"The file for the optimizer's slots needs {format_bytes(num_bytes)} of disk.",
                received=f"{directory!r}: {error.strerror}{_free(directory)}",
                fix="Use an existing directory, on a disk with as much room: offload=PATH.",
            ) from error
        return cls(descriptor, num_bytes)

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        super().__init__(descriptor, num_bytes)
        self.memory.is_file = True
        self.memory.direct = _direct(descriptor)

    def reserve(self, offset_bytes: int, num_bytes: int) -> None:
        """The disk has room for it."""

    def close(self) -> None:
        """Pages are written by the descriptor."""


def unnamed_file(directory: str) -> int:
    """The descriptor of a new file in a directory, which is gone with the last descriptor of it."""
    if hasattr(os, "O_TMPFILE"):
        with suppress(OSError):  # not all file systems have files without a name
            return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    descriptor, path = tempfile.mkstemp(dir=directory, prefix="lockstep-")
    os.unlink(path)
    return descriptor


def _direct(descriptor: int) -> int:
    """A descriptor of the same file, for whole pages; -1 if the file system has none."""
    found = -1
    try:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT
        found = os.open(f"/proc/self/fd/{descriptor}", flags)
        with mmap.mmap(-1, mmap.PAGESIZE) as page:
            os.preadv(found, [page], 0)
    except (AttributeError, OSError):
        if found >= 0:
            os.close(found)
        return -1
    return found


def _free(directory: str) -> str:
    try:
        found = os.statvfs(directory)
    except OSError:
        return ""
    return f", {format_bytes(found.f_bavail * found.f_frsize)} free"


@dataclass(frozen=True)
class _Span:
    """Bytes of a mapping, whole pages."""

    memory: MappedMemory
    start: int
    stop: int

    def read(self) -> None:
        """Have the file's bytes in memory of this process alone, in the same place."""
        self.memory.detach(self.start, self.stop)
        try:
            self._move(os.preadv)
        except OSError:
            self.memory.attach(self.start, self.stop)
            raise
        self._forget()

    def give_back(self) -> None:
        """Write them to the disk, and have the file's pages there again."""
        self._move(os.pwritev)
        self.memory.attach(self.start, self.stop)
        self._forget()

    def advise(self, advice: int) -> bool:
        """Returns False if the kernel does not know the advice."""
        return advise(self.memory.address + self.start, self.stop - self.start, advice)

    def _move(self, call: Callable[..., int]) -> None:
        memory, size, done = self.memory, self.stop - self.start, 0
        pages = memoryview((ctypes.c_char * size).from_address(memory.address + self.start))
        while done < size:
            descriptor = memory.descriptor if memory.direct < 0 else memory.direct
            moved = call(descriptor, [pages[done:]], self.start + done)
            if not moved:
                raise OSError(errno.EIO, "a file of tensors has become shorter")
            done += moved

    def _forget(self) -> None:
        """The kernel's cache keeps nothing of it."""
        if self.memory.direct < 0:
            _finish_writing([self])

    def write(self, flags: int) -> None:
        if _sync_file_range is not None:
            _sync_file_range(self.memory.descriptor, self.start, self.stop - self.start, flags)

    def tell(self, advice: int, start: int, num_bytes: int) -> None:
        if hasattr(os, "posix_fadvise") and self.memory.descriptor >= 0:
            os.posix_fadvise(self.memory.descriptor, start, num_bytes, advice)


_sync_file_range: Any = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def is_in_file(tensor: torch.Tensor) -> bool:
    """True if a tensor lies in a region of a file."""
    return _span_of(tensor) is not None


def _span_of(tensor: torch.Tensor) -> _Span | None:
    """The pages of a dense tensor in a file; None for another tensor."""
    start = tensor.data_ptr()
    for memory in MappedMemory.of_files() if tensor.device.type == "cpu" else ():
        if memory.address <= start < memory.address + len(memory):
            first = (start - memory.address) // mmap.PAGESIZE * mmap.PAGESIZE
            last = start - memory.address + tensor.nbytes
            return _Span(memory, first, -(-last // mmap.PAGESIZE) * mmap.PAGESIZE)
    return None


def _own_span_of(tensor: torch.Tensor) -> _Span | None:
    """The pages of a tensor that no other one uses; None for none."""
    span, pages = _span_of(tensor), pages_of(tensor)
    if span is None or not pages:
        return None
    ((first, num_bytes),) = pages
    start = first - span.memory.address
    return _Span(span.memory, start, start + num_bytes)


def write_behind(tensors: Iterable[torch.Tensor]) -> None:
    """Write tensors in files to the disk, and keep no memory for them; ignore others."""
    spans = [span for span in map(_span_of, tensors) if span is not None]
    _begin_writing(spans)
    _finish_writing(spans)


def in_turn(windows: Sequence[Sequence[torch.Tensor]]) -> Iterator[int]:
    """Numbers of windows, one after the other, while the window's tensors are in memory.

    Those that come next are read meanwhile, and those before are written.

    Args:
        windows: each the tensors that are used together; those in no file are ignored.
    """
    spans = [[one for one in map(_own_span_of, own) if one is not None] for own in windows]
    coming: list[Future[None]] = []
    going: list[Future[None]] = []
    with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(1) as writer:
        try:
            for number in range(len(spans)):
                for window in spans[len(coming) : number + _MOST_AHEAD]:
                    coming.append(reader.submit(_read, window))
                coming[number].result()
                yield number
                going.append(writer.submit(_write, spans[number]))
                if number >= _MOST_BEHIND:
                    going[number - _MOST_BEHIND].result()
        finally:  # after an error also what was read and not used
            rest = slice(len(going), None)
            for window, read in zip(spans[rest], coming[rest], strict=False):
                if read.exception() is None:
                    going.append(writer.submit(_write, window))
            for one in going:
                one.result()


def _read(window: Iterable[_Span]) -> None:
    for span in window:
        span.read()


def _write(window: Iterable[_Span]) -> None:
    for span in window:
        span.give_back()


def _begin_writing(spans: Iterable[_Span]) -> None:
    for span in spans:
        if hasattr(mmap, "MADV_DONTNEED"):
            span.advise(mmap.MADV_DONTNEED)
        span.write(_START_WRITING)


def _finish_writing(spans: Iterable[_Span]) -> None:
    for span in spans:
        span.write(_WRITE_AND_WAIT)
        span.tell(_DO_NOT_NEED, span.start, span.stop - span.start)


_DO_NOT_NEED: int = getattr(os, "POSIX_FADV_DONTNEED", 0)
