"""Arrays that lie in files (NumPy's memory maps): other processes open the file without a copy.

A dataset that is larger than memory is mapped, and its pages are loaded when they are read. A copy
for the helpers would read all of it. So the place of such an array is recorded, and helpers map the
same part of the same file, read-only.

Not covered: maps whose changes stay in this process (mode "c"), and files that are gone or have
another size by now. These are treated as arrays in memory.
"""

import mmap
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

_Array = np.ndarray[Any, Any]

# The attribute of a tensor with its file.
_ATTRIBUTE = "lockstep_file"


@dataclass(frozen=True, kw_only=True)
class FilePart:
    """An array in a file.

    Attributes:
        path: the file, absolute.
        offset: of the first element, in bytes.
        dtype: of the elements.
        shape: of the array.
        strides: in bytes, as NumPy's.
    """

    path: str
    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def open(self) -> _Array:
        """Map the file, read-only."""
        with Path(self.path).open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return np.ndarray(self.shape, self.dtype, mapping, self.offset, self.strides)

    def open_tensor(self) -> torch.Tensor:
        """Map the file as a tensor, which must not be written to."""
        return shared_with(self.open())


def shared_with(array: _Array) -> torch.Tensor:
    """A tensor in the memory of an array."""
    if array.dtype.name == "bfloat16":  # of ml_dtypes, which torch does not know
        return shared_with(array.view(np.int16)).view(torch.bfloat16)
    if array.flags.writeable:
        return torch.from_numpy(array)
    # Only if needed: catch_warnings makes Python forget which warnings it has shown.
    with warnings.catch_warnings():
        # Read-only arrays (memory maps) are only ever read here.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(array)


def file_part(value: object) -> FilePart | None:
    """Where an array or tensor lies in a file; None for one that lies in memory."""
    if isinstance(value, torch.Tensor):
        found: FilePart | None = vars(value).get(_ATTRIBUTE)
        return found
    return _part_of(value) if isinstance(value, np.memmap) else None


def remember_file(tensor: torch.Tensor, array: _Array) -> torch.Tensor:
    """Record the file of an array on a tensor that shares its memory; returns the tensor."""
    part = file_part(array)
    if part is not None:
        vars(tensor)[_ATTRIBUTE] = part
    return tensor


def _part_of(array: "np.memmap[Any, Any]") -> FilePart | None:
    mapping = _mapping_of(array)
    if mapping is None or array.filename is None or array.mode == "c" or array.size == 0:
        return None
    path = os.path.abspath(array.filename)
    if not os.path.exists(path) or os.path.getsize(path) != mapping.size():
        return None
    # A view has the offset of the map that it was cut from, which begins at a page.
    start = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    within = array.ctypes.data - np.frombuffer(mapping, np.uint8).ctypes.data
    return FilePart(
        path=path,
        offset=start + within,
        dtype=array.dtype,
        shape=array.shape,
        strides=array.strides,
    )


def _mapping_of(array: _Array) -> mmap.mmap | None:
    """The map that an array lies in; None for a copy of such an array."""
    base: Any = array
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    return base if isinstance(base, mmap.mmap) else None
