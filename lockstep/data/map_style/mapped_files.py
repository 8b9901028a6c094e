"""Arrays that lie in files (NumPy's memory maps): another process opens the file instead of a copy.

A data set that is larger than memory is mapped, and its pages come when they are read. A copy for
the helpers would read it whole. So where such an array lies is noted, and whoever gets it maps the
same part of the same file, to read only.

Not covered: maps whose changes stay in this process (mode "c"), and files that are gone or have
another size by now. These are arrays like any other.
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

# A tensor remembers the file that it is in under this name.
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
        """Map the file, to read only."""
        with Path(self.path).open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return np.ndarray(self.shape, self.dtype, mapping, self.offset, self.strides)

    def open_tensor(self) -> torch.Tensor:
        """The same as a tensor, which must not be written to."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            return torch.from_numpy(self.open())


def file_part(value: object) -> FilePart | None:
    """Where an array or tensor lies in a file; None for one that lies in memory."""
    if isinstance(value, torch.Tensor):
        found: FilePart | None = vars(value).get(_ATTRIBUTE)
        return found
    return _part_of(value) if isinstance(value, np.memmap) else None


def remember_file(tensor: torch.Tensor, array: _Array) -> torch.Tensor:
    """Note where a tensor lies that shares an array's memory; returns the tensor."""
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
    # A view has the offset of the map it was cut from, which begins at a page's beginning.
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
    """The map that an array lies in; None where it is a copy of such an array."""
    base: Any = array
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    return base if isinstance(base, mmap.mmap) else None
