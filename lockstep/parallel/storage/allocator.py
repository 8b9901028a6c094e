"""Keeps freed memory in the process instead of giving it back to the kernel at every step.

glibc maps every large block anew and unmaps it when it is freed, so each step faults in all its
activations and gradients page by page, zeroed by the kernel: a quarter of the time of a step if
these are large. With higher thresholds freed blocks stay in the heap for the next step.

The setting applies to the process, cannot be undone, and keeps as much memory resident as the
largest step needed. It changes no result. ``LOCKSTEP_KEEP_FREED_MEMORY=0`` disables it.
"""

import ctypes
import functools
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

# man 3 mallopt
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

_LARGEST_BLOCK_BYTES = 1 << 30
_SMALL_BLOCK_BYTES = 1 << 20
_LARGEST_TOP_BYTES = (1 << 31) - 1


@functools.cache
def keep_freed_memory() -> bool:
    """Raise the thresholds, once per process; returns True if they are raised."""
    if os.environ.get("LOCKSTEP_KEEP_FREED_MEMORY") == "0" or platform.libc_ver()[0] != "glibc":
        return False
    block = _set(_M_MMAP_THRESHOLD, _LARGEST_BLOCK_BYTES)
    top = _set(_M_TRIM_THRESHOLD, _LARGEST_TOP_BYTES)
    return block and top


@contextmanager
def temporary_memory() -> Iterator[None]:
    """Within the block, freed memory goes back to the kernel: not every step needs it."""
    if not keep_freed_memory():
        yield
        return
    _set(_M_MMAP_THRESHOLD, _SMALL_BLOCK_BYTES)
    try:
        yield
    finally:
        _set(_M_MMAP_THRESHOLD, _LARGEST_BLOCK_BYTES)
        give_back_freed_memory()


def give_back_freed_memory() -> None:
    """Give memory that was freed in the heap back to the kernel, after large tensors have moved."""
    if keep_freed_memory():
        ctypes.CDLL(None).malloc_trim(0)


def _set(parameter: int, value: int) -> bool:
    return bool(ctypes.CDLL(None).mallopt(parameter, value))
