"""Memory without a name that processes of one host share.

A region is a file that exists only as descriptors (memfd): it is passed over a Unix socket, mapped
by whoever holds it, and gone when the last process that maps it ends, however it ends. Nothing
can be left behind in /dev/shm.

A handle (the descriptor) is apart from the memory: ``SharedRegion.close`` gives up the descriptor
only, while tensors made from the region keep the mapping alive.

What the script forks (DataLoader workers, a pool) has nothing to do with training, and expects its
memory to be its own as after any fork. So in a fork, regions that were not closed become private:
no other process sees what the fork writes.
"""

import ctypes
import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import torch

from lockstep.cluster.anonymous_files import anonymous_file
from lockstep.cluster.memory_limits import free_memory
from lockstep.errors import DeviceError
from lockstep.formatting import format_bytes

# Not worth a look at what is free.
_ALWAYS_FREE_BYTES = 1 << 20


class SharedRegion:
    """A mapped piece of anonymous shared memory, zero when new.

    Args:
        descriptor: of the region.
        num_bytes: its size.
        private: pages that are written to become this process's own; no other one sees them.
    """

    def __init__(self, descriptor: int, num_bytes: int, *, private: bool = False) -> None:
        self.num_bytes = num_bytes
        self.memory = MappedMemory(descriptor, max(num_bytes, 1), private=private)

    @property
    def descriptor(self) -> int:
        """By which other processes can map the region; -1 once it is closed."""
        return self.memory.descriptor

    @property
    def is_shared(self) -> bool:
        """Whether other processes can still come to see it: not after ``close``, nor in a fork."""
        return self.memory.descriptor >= 0

    @classmethod
    def create(cls, num_bytes: int, holes: Sequence[tuple[int, int]] = ()) -> "SharedRegion":
        """Make a region of ``num_bytes`` zeros.

        Args:
            num_bytes: its size.
            holes: bytes ``[start, stop)``, in order, for which no memory is taken yet: ``reserve``
                them before use.

        Raises:
            DeviceError: the host has not that much memory to share.
        """
        size = max(num_bytes, 1)
        starts, stops = [0, *(stop for _, stop in holes)], [*(start for start, _ in holes), size]
        _check_free(sum(stops) - sum(starts))
        descriptor = -1
        try:
            descriptor = anonymous_file("lockstep")
            os.ftruncate(descriptor, size)
            for start, stop in zip(starts, stops, strict=True):
                _reserve(descriptor, start, stop - start)
            return cls(descriptor, num_bytes)
        except OSError as error:
            if descriptor >= 0:
                os.close(descriptor)
            raise _shortage(num_bytes, _reason(error)) from error

    def reserve(self, offset_bytes: int, num_bytes: int) -> None:
        """Take memory for a part of a hole. The region must not be closed.

        Raises:
            DeviceError: the host has not that much memory to share.
        """
        _check_free(num_bytes)
        try:
            _reserve(self.descriptor, offset_bytes, num_bytes)
        except OSError as error:
            raise _shortage(num_bytes, _reason(error)) from error

    def tensor(
        self, offset_bytes: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]
    ) -> torch.Tensor:
        """A tensor that lies in the region and has a storage of its own there.

        Args:
            offset_bytes: where it starts.
            dtype: its element type.
            shape: its shape.
            stride: its strides in elements; the elements must be dense.
        """
        return tensor_in(self.memory, offset_bytes, dtype, shape, stride)

    def part(self, offset_bytes: int, num_bytes: int) -> "SharedRegion":
        """A part of the region, to be used as one of its own."""
        return _RegionView(self, offset_bytes, num_bytes)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the region, also as a view or by way of another library."""
        if tensor.layout != torch.strided:
            return False
        start = torch.frombuffer(self.memory, dtype=torch.uint8, count=1).data_ptr()
        return start <= tensor.data_ptr() < start + self.num_bytes

    def release_pages(self) -> None:
        """Have this process keep none of the region's pages until it touches them again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.memory.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Give up the descriptor; the mapping lives as long as tensors use it."""
        self.memory.close_descriptor()


Pages = tuple[int, int]
"""Whole pages: the address of the first, and their number of bytes."""


def pages_of(tensor: torch.Tensor, kept: Iterable[torch.Tensor] = ()) -> list[Pages]:
    """The pages of a dense tensor that no other uses.

    Args:
        tensor: whose memory.
        kept: parts of it, whose pages are left out.
    """
    first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    own = [one for one in kept if first <= one.data_ptr() < last]
    stays = sorted((one.data_ptr(), one.data_ptr() + one.nbytes) for one in own)
    starts = [first, *(stop for _, stop in stays)]
    stops = [*(start for start, _ in stays), last]
    found = []
    for start, stop in zip(starts, stops, strict=True):
        page = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        num_bytes = stop // mmap.PAGESIZE * mmap.PAGESIZE - page
        if num_bytes > 0:
            found.append((page, num_bytes))
    return found


def discard(pages: Iterable[Pages]) -> None:
    """Free pages of a region, for all processes that map it: zeros until they are written again."""
    advice = getattr(mmap, "MADV_REMOVE", None)  # Linux has it
    for first, num_bytes in pages:
        if advice is not None and not advise(first, num_bytes, advice):
            raise OSError(ctypes.get_errno(), "pages of a region cannot be freed")


def advise(address: int, num_bytes: int, advice: int) -> bool:
    """Tell the kernel how whole pages are used (madvise); returns False if it refuses."""
    return not _madvise(address, num_bytes, advice)


class _RegionView(SharedRegion):
    """A part of a region; it has the descriptor of the whole."""

    def __init__(self, whole: SharedRegion, offset_bytes: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.memory: Any = memoryview(whole.memory)[offset_bytes : offset_bytes + num_bytes]
        self._whole, self._offset = whole, offset_bytes

    @property
    def descriptor(self) -> int:
        return self._whole.descriptor

    @property
    def is_shared(self) -> bool:
        return self._whole.is_shared

    def reserve(self, offset_bytes: int, num_bytes: int) -> None:
        self._whole.reserve(self._offset + offset_bytes, num_bytes)


def tensor_in(
    memory: Any, offset_bytes: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """A tensor that lies in memory that can be written to; see ``SharedRegion.tensor``."""
    count = math.prod(shape)
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset_bytes)
    return flat.as_strided_(tuple(shape), tuple(stride))  # no view: users may call `detach_`


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's own strides where it is dense, else contiguous ones."""
    dense = tensor if is_dense(tensor) else torch.empty(tensor.shape, device="meta")
    return tuple(dense.stride())


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a block of memory without holes or overlaps."""
    expected = 1
    by_stride = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    for stride, extent in by_stride:
        if extent == 1:
            continue
        if stride != expected:
            return False
        expected *= extent
    return True


class MappedMemory(mmap.mmap):
    """A mapping that has its descriptor with it, as long as tensors or anybody keeps it.

    Attributes:
        descriptor: of the file; -1 once it is closed.
        direct: another, which reads and writes the disk without the kernel's cache; -1 for none.
        is_file: the file is on a disk.
    """

    descriptor: int = -1
    direct: int = -1
    is_file: bool = False

    @classmethod
    def of_files(cls) -> "list[MappedMemory]":
        """The mapped memory of files on a disk."""
        return [memory for memory in _shared if memory.is_file]

    @property
    def address(self) -> int:
        """Where it begins."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self))

    def __new__(cls, descriptor: int, num_bytes: int, *, private: bool) -> Self:
        flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
        memory = super().__new__(cls, descriptor, num_bytes, flags=flags)
        memory.descriptor = descriptor
        if not private:
            _shared.add(memory)
        return memory

    def close_descriptor(self, close: Callable[[int], None] = os.close) -> None:
        # A default, because the module's names may be gone when the interpreter ends.
        for one in (self.descriptor, self.direct):
            if one >= 0:
                close(one)
        self.descriptor = self.direct = -1

    def become_private(self) -> None:
        """Map the same pages once more in the same place, copied when written to."""
        self._map(0, len(self), mmap.MAP_PRIVATE, self.descriptor)
        self.close_descriptor()

    def detach(self, start: int, stop: int) -> None:
        """Have new memory of this process alone in the place of these bytes, whole pages."""
        self._map(start, stop - start, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)

    def attach(self, start: int, stop: int) -> None:
        """Have the file's pages there again."""
        self._map(start, stop - start, mmap.MAP_SHARED, self.descriptor)

    def _map(self, start: int, num_bytes: int, flags: int, descriptor: int) -> None:
        address, offset = self.address + start, start if descriptor >= 0 else 0
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        if _mmap(address, num_bytes, protection, flags | _MAP_FIXED, descriptor, offset) != address:
            raise OSError(ctypes.get_errno(), "other memory cannot be mapped in a region")

    def __del__(self) -> None:
        self.close_descriptor()


_MAP_FIXED = 0x10  # on Linux and macOS; the module mmap does not name it
_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_shared: "weakref.WeakSet[MappedMemory]" = weakref.WeakSet()


def _become_private_in_fork() -> None:
    for memory in list(_shared):
        memory.is_file = False
        if memory.descriptor >= 0:
            memory.become_private()
    _shared.clear()


os.register_at_fork(after_in_child=_become_private_in_fork)


_IN_MEMORY = hasattr(os, "memfd_create")


def _reserve(descriptor: int, start: int, num_bytes: int) -> None:
    """On Linux take a file's pages now: a shortage shows here, and not as SIGBUS."""
    if num_bytes > 0 and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, start, num_bytes)


def _check_free(num_bytes: int) -> None:
    """Within a memory limit nothing fails: the kernel kills. So look before.

    Raises:
        DeviceError: that much cannot be taken.
    """
    if num_bytes < _ALWAYS_FREE_BYTES:
        return
    free = free_memory()
    if free is not None and num_bytes > free.num_bytes:
        raise _shortage(num_bytes, free)


def _reason(error: OSError) -> str:
    """An error that names no file: there is none."""
    free = free_memory()
    where = "in this host's memory (a memfd, no file)" if _IN_MEMORY else tempfile.gettempdir()
    return f"{error.strerror}, {where}{f'; {free}' if free else ''}"


def _shortage(num_bytes: int, received: object) -> DeviceError:
    return DeviceError(
        f"Training needs {format_bytes(num_bytes)} more of shared memory.",
        received=received,
        fix="Free memory or raise the limit by as much, or use fewer devices or shares.",
    )
