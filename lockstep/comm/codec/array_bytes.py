"""Tensors and numpy arrays as a description and their bytes, copied once on each side."""

import functools
import math
import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lockstep.data.trees import for_numpy

# The kinds of numpy dtypes that are described by their string; above all not objects (pointers).
_NUMPY_DTYPE = re.compile(r"[<>|=][biufcSUmM]\d{1,9}(\[\d*\w+\])?")


@functools.cache
def torch_dtypes() -> dict[str, torch.dtype]:
    """All dtypes of torch by name: "float32"."""
    found = (value for value in vars(torch).values() if isinstance(value, torch.dtype))
    return {str(dtype).removeprefix("torch."): dtype for dtype in found}


def is_sendable(tensor: torch.Tensor) -> bool:
    """Whether a tensor is its bytes, and a shape: neither sparse, quantised, nested, nor meta."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_meta)
    )


def describe_tensor(tensor: torch.Tensor) -> tuple[str, list[int], list[int], memoryview]:
    """Dtype, shape, strides, and the bytes in the order of memory.

    Strides are those of the tensor if it fills its memory, else those of a contiguous copy.
    """
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    fills = _fills_memory(plain.shape, plain.stride())
    plain = for_numpy(plain) if fills else plain.contiguous()
    flat = plain.as_strided((plain.numel(),), (1,))
    data = flat.view(torch.uint8).numpy().data
    name = str(plain.dtype).removeprefix("torch.")
    return name, list(plain.shape), list(plain.stride()), data


def num_tensor_bytes(name: str, shape: Sequence[int], strides: Sequence[int]) -> int:
    """How many bytes such a tensor has.

    Raises:
        ValueError, KeyError: there is no such tensor.
    """
    dtype = torch_dtypes()[name]
    if name.startswith(("q", "bits")) or min([*shape, *strides], default=0) < 0:
        raise ValueError(f"{name} of shape {shape}")
    if not _fills_memory(shape, strides):
        raise ValueError(f"strides {strides} of shape {shape}")
    return math.prod(shape) * dtype.itemsize


def make_tensor(
    name: str, shape: Sequence[int], strides: Sequence[int], data: memoryview
) -> torch.Tensor:
    """A tensor of its own memory; its description was checked by ``num_tensor_bytes``."""
    raw = torch.empty(len(data), dtype=torch.uint8)
    _copy(data, raw.numpy(), is_bool=name == "bool")
    return raw.view(torch_dtypes()[name]).as_strided(tuple(shape), tuple(strides))


def _fills_memory(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements are contiguous in memory, in any order of dims."""
    if len(shape) != len(strides):
        return False
    if 0 in shape:
        return True
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def describe_array(array: npt.NDArray[Any]) -> tuple[str, list[int], bool, memoryview] | None:
    """Dtype, shape, whether columns come first, and the bytes; None if it is not all bytes."""
    name = array.dtype.str
    if not _NUMPY_DTYPE.fullmatch(name) or array.dtype != np.dtype(name) or not array.itemsize:
        return None
    by_columns = array.flags.f_contiguous and not array.flags.c_contiguous
    ordered = array.T if by_columns else array
    flat = np.ascontiguousarray(ordered.reshape(-1))
    return name, list(array.shape), by_columns, flat.view(np.uint8).data


def num_array_bytes(name: str, shape: Sequence[int]) -> int:
    """How many bytes such an array has.

    Raises:
        ValueError: there is no such array.
    """
    if not _NUMPY_DTYPE.fullmatch(name) or min(shape, default=0) < 0:
        raise ValueError(f"{name} of shape {shape}")
    itemsize = np.dtype(name).itemsize
    if itemsize == 0:
        raise ValueError(f"{name} has no bytes")
    return math.prod(shape) * itemsize


def make_array(
    name: str, shape: Sequence[int], by_columns: bool, data: memoryview
) -> npt.NDArray[Any]:
    """An array of its own memory; its description was checked by ``num_array_bytes``.

    Raises:
        ValueError: the bytes are none of such an array.
    """
    raw = np.empty(len(data), dtype=np.uint8)
    _copy(data, raw, is_bool=np.dtype(name).kind == "b")
    if np.dtype(name).kind == "U" and raw.view(f"{name[0]}u4").max(initial=0) > sys.maxunicode:
        raise ValueError("text with what is no character")
    return raw.view(name).reshape(tuple(shape), order="F" if by_columns else "C")


def _copy(data: memoryview, into: npt.NDArray[np.uint8], *, is_bool: bool) -> None:
    into[:] = np.frombuffer(data, dtype=np.uint8)
    if is_bool:
        np.minimum(into, 1, out=into)  # any other byte would be neither True nor False
