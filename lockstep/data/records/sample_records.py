"""Records: samples as bytes, all of one length.

A layout describes the samples of a dataset: tensors, arrays and numbers of fixed shape and type, in
tuples, lists and dicts. With it, bytes become a sample with the same types, shapes and bits. A
layout is JSON in the header of a file, so that nothing in a file is ever executed. For the same
reason, objects that only pickle can describe are refused.

Not covered: samples of different shapes, and text.
"""

import math
from collections.abc import Iterator
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch

from lockstep.data.trees import bits_of
from lockstep.errors import DataError

_ALIGNMENT_BYTES = 8


class Leaf(msgspec.Struct, frozen=True, kw_only=True, tag="leaf"):
    """A part without parts.

    Attributes:
        kind: "tensor" (on the CPU), "array", "scalar" (NumPy's), or the type of a Python number.
        dtype: as in ``torch.float32`` of a tensor, else as in ``numpy.dtype.str``.
        shape: of a tensor or array.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """The size of its elements."""
        dtype = _torch_dtype(self.dtype) if self.kind == "tensor" else np.dtype(self.dtype)
        return math.prod(self.shape) * dtype.itemsize

    def load(self, buffer: bytearray, offset: int) -> Any:
        """The part, a tensor or array in the memory of the buffer."""
        count = math.prod(self.shape)
        if self.kind != "tensor":
            flat = np.frombuffer(buffer, self.dtype, count=count, offset=offset)
            if self.kind == "array":
                return flat.reshape(self.shape)
            return flat[0] if self.kind == "scalar" else flat[0].item()
        dtype = _torch_dtype(self.dtype)
        if count == 0:  # frombuffer refuses empty buffers
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset).reshape(self.shape)

    def __str__(self) -> str:
        if self.kind in _NUMBERS:
            return self.kind
        dtype = self.dtype if self.kind == "tensor" else str(np.dtype(self.dtype))
        return dtype if self.kind == "scalar" else f"{self.kind} {dtype} {self.shape}"


class Container(msgspec.Struct, frozen=True, kw_only=True, tag="container"):
    """A tuple, a list, or a dict with text as its keys.

    Attributes:
        kind: "tuple", "list" or "dict".
        parts: its items, in order.
        keys: of a dict.
    """

    kind: str
    parts: tuple["Layout", ...]
    keys: tuple[str, ...] = ()

    def made(self, parts: list[Any]) -> Any:
        """The container with these parts."""
        if self.kind == "dict":
            return dict(zip(self.keys, parts, strict=True))
        return tuple(parts) if self.kind == "tuple" else parts

    def __str__(self) -> str:
        if self.kind == "dict":
            pairs = zip(self.keys, self.parts, strict=True)
            return f"{{{', '.join(f'{key!r}: {part}' for key, part in pairs)}}}"
        inside = ", ".join(map(str, self.parts))
        return f"({inside})" if self.kind == "tuple" else f"[{inside}]"


Layout: TypeAlias = Leaf | Container

_NUMBERS = {"bool": "|b1", "int": "<i8", "float": "<f8"}


def num_bytes(layout: Layout) -> int:
    """The length of a record."""
    return sum(_aligned(leaf.num_bytes) for leaf in _leaves(layout))


def pack_item(item: Any) -> tuple[Layout, bytes]:
    """A sample's layout, and its record.

    Raises:
        DataError: records cannot hold a part of it.
    """
    pieces: list[bytes] = []
    layout = _pack(item, pieces)
    return layout, b"".join(pieces)


def unpack_item(layout: Layout, record: bytearray) -> Any:
    """The sample, whose tensors and arrays lie in the record: nothing else may use that."""
    return _unpack(layout, record, _offsets(layout))


def _pack(item: Any, pieces: list[bytes]) -> Layout:
    kind = type(item).__name__
    if type(item) in (tuple, list):
        return Container(kind=kind, parts=tuple(_pack(part, pieces) for part in item))
    if type(item) is dict and all(isinstance(key, str) for key in item):
        parts = tuple(_pack(part, pieces) for part in item.values())
        return Container(kind=kind, parts=parts, keys=tuple(item))
    leaf, data = _pack_leaf(item)
    pieces += [data, bytes(_aligned(len(data)) - len(data))]
    return leaf


def _pack_leaf(item: Any) -> tuple[Leaf, bytes]:
    if _is_plain_tensor(item):
        dtype = str(item.dtype).removeprefix("torch.")
        leaf = Leaf(kind="tensor", dtype=dtype, shape=tuple(item.shape))
        return leaf, bits_of(item).numpy().tobytes()
    if type(item) is np.ndarray and _is_plain_dtype(item.dtype):
        return Leaf(kind="array", dtype=item.dtype.str, shape=item.shape), item.tobytes()
    if isinstance(item, np.generic) and _is_plain_dtype(item.dtype):
        return Leaf(kind="scalar", dtype=item.dtype.str), item.tobytes()
    if type(item) in (bool, int, float):
        kind = type(item).__name__
        try:
            return Leaf(kind=kind, dtype=_NUMBERS[kind]), np.array(item, _NUMBERS[kind]).tobytes()
        except OverflowError as error:
            raise _unfit(f"the number {item}, of more than 64 bits") from error
    raise _unfit(f"a {_described(item)} in it")


def _unfit(received: str) -> DataError:
    return DataError(
        "The samples of a cached dataset must be tensors on the CPU, arrays and numbers, in "
        "plain tuples, lists or dicts with text as keys.",
        received=received,
        fix="Convert it in __getitem__, or cache the dataset that it is made from.",
    )


def _described(item: Any) -> str:
    if isinstance(item, torch.Tensor):
        return f"{type(item).__name__} of layout {item.layout} on {item.device}"
    if isinstance(item, np.ndarray | np.generic):
        return f"{type(item).__name__} of type {item.dtype}"
    return type(item).__name__


def _is_plain_tensor(item: Any) -> bool:
    return (
        type(item) is torch.Tensor
        and item.device.type == "cpu"
        and item.layout == torch.strided
        and not item.is_quantized
    )


def _is_plain_dtype(dtype: np.dtype[Any]) -> bool:
    return not dtype.hasobject and dtype.names is None and dtype.subdtype is None


def _leaves(layout: Layout) -> Iterator[Leaf]:
    if isinstance(layout, Container):
        for part in layout.parts:
            yield from _leaves(part)
    else:
        yield layout


def _offsets(layout: Layout) -> Iterator[int]:
    offset = 0
    for leaf in _leaves(layout):
        yield offset
        offset += _aligned(leaf.num_bytes)


def _unpack(layout: Layout, record: bytearray, offsets: Iterator[int]) -> Any:
    if isinstance(layout, Container):
        return layout.made([_unpack(part, record, offsets) for part in layout.parts])
    return layout.load(record, next(offsets))


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch.{name} is no dtype")
    return dtype


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
