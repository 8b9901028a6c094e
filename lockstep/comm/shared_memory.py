"""Memory without a name that processes of one host share.

A region is a file that exists only as descriptors (memfd): it is passed over a Unix socket, mapped
by whoever holds it, and gone when the last process that maps it ends, however it ends. Nothing
can be left behind in /dev/shm.

A handle (the descriptor) is apart from the memory: ``SharedRegion.close`` gives up the descriptor
only, while tensors made from the region keep the mapping alive.
"""

import mmap
import os
import tempfile
from collections.abc import Sequence

import torch

from lockstep.errors import DeviceError, problem
from lockstep.units import format_bytes


class SharedRegion:
    """A mapped piece of nameless shared memory, zero when new.

    Args:
        descriptor: of the region.
        num_bytes: its size.
        private: pages that are written to become this process's own, and nobody else sees it.
    """

    def __init__(self, descriptor: int, num_bytes: int, *, private: bool = False) -> None:
        self.descriptor = descriptor
        self.num_bytes = num_bytes
        flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
        self.memory = mmap.mmap(descriptor, max(num_bytes, 1), flags=flags)

    @classmethod
    def create(cls, num_bytes: int) -> "SharedRegion":
        """Make a region of ``num_bytes`` zeros.

        Raises:
            DeviceError: the host has not that much memory to share.
        """
        descriptor = _nameless_file()
        try:
            _reserve(descriptor, max(num_bytes, 1))
            return cls(descriptor, num_bytes)
        except OSError as error:
            os.close(descriptor)
            raise DeviceError(
                problem(
                    f"Training needs {format_bytes(num_bytes)} of shared memory.",
                    received=error,
                    fix="Free memory on this host, or use fewer devices or shares.",
                )
            ) from error

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
        count = 1
        for extent in shape:
            count *= extent
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        flat = torch.frombuffer(self.memory, dtype=dtype, count=count, offset=offset_bytes)
        return flat.as_strided(tuple(shape), tuple(stride))

    def close(self) -> None:
        """Give up the descriptor; the mapping lives as long as tensors use it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            self.close()


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("lockstep", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:  # no memfd on macOS: an unlinked file does the same
        return os.dup(file.fileno())


def _reserve(descriptor: int, num_bytes: int) -> None:
    """Size the file. On Linux take its pages now: a shortage shows here, and not as SIGBUS."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, num_bytes)
    else:
        os.ftruncate(descriptor, num_bytes)
