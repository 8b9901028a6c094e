"""Records: samples as bytes, all of one length.

A layout says what the samples of a dataset are made of: tensors, arrays and numbers of fixed shape
and type, in tuples, lists and dicts. With it the bytes become the very sample again, in types,
shapes and bits. It is data, kept as JSON in the head of a file, so that nothing in a file is ever
executed: for the same reason there is no room for objects that only pickle can describe.

Not covered: samples of different shapes, and text.
"""

import math
from collections.abc import Iterator
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch

from lockstep.errors import DataError

_ALIGNMENT_BYTES = 8


class TensorLeaf(msgspec.Struct, frozen=True, kw_only=True, tag="tensor"):
    """A tensor on the CPU; ``dtype`` as in ``torch.float32``."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of its elements."""
        return math.prod(self.shape) * _torch_dtype(self.dtype).itemsize

    def load(self, buffer: bytearray, offset: int) -> torch.Tensor:
        """The tensor, in the memory of the buffer."""
        dtype, count = _torch_dtype(self.dtype), math.prod(self.shape)
        if count == 0:  # of which frombuffer makes nothing
            return torch.empty(self.shape, dtype=dtype)
        flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset)
        return flat.reshape(self.shape)

    def __str__(self) -> str:
        return f"tensor {self.dtype} {self.shape}"


class ArrayLeaf(msgspec.Struct, frozen=True, kw_only=True, tag="array"):
    """A NumPy array; ``dtype`` as in ``numpy.dtype.str``."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of its elements."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def load(self, buffer: bytearray, offset: int) -> np.ndarray[Any, Any]:
        """The array, in the memory of the buffer."""
        flat = np.frombuffer(buffer, self.dtype, count=math.prod(self.shape), offset=offset)
        return flat.reshape(self.shape)

    def __str__(self) -> str:
        return f"array {np.dtype(self.dtype)} {self.shape}"


class ScalarLeaf(msgspec.Struct, frozen=True, kw_only=True, tag="scalar"):
    """A NumPy number."""

    dtype: str

    @property
    def num_bytes(self) -> int:
        """Of the number."""
        return np.dtype(self.dtype).itemsize

    def load(self, buffer: bytearray, offset: int) -> Any:
        """The number."""
        return np.frombuffer(buffer, self.dtype, count=1, offset=offset)[0]

    def __str__(self) -> str:
        return str(np.dtype(self.dtype))


class NumberLeaf(msgspec.Struct, frozen=True, kw_only=True, tag="number"):
    """A Python number: the name of its type."""

    kind: str

    @property
    def num_bytes(self) -> int:
        """Of the number."""
        return np.dtype(_NUMBERS[self.kind]).itemsize

    def load(self, buffer: bytearray, offset: int) -> Any:
        """The number."""
        return np.frombuffer(buffer, _NUMBERS[self.kind], count=1, offset=offset)[0].item()

    def __str__(self) -> str:
        return self.kind


class TupleOf(msgspec.Struct, frozen=True, kw_only=True, tag="tuple"):
    """A tuple."""

    parts: tuple["Layout", ...]

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.parts))})"


class ListOf(msgspec.Struct, frozen=True, kw_only=True, tag="list"):
    """A list."""

    parts: tuple["Layout", ...]

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.parts))}]"


class DictOf(msgspec.Struct, frozen=True, kw_only=True, tag="dict"):
    """A dict with text as its keys."""

    keys: tuple[str, ...]
    parts: tuple["Layout", ...]

    def __str__(self) -> str:
        pairs = zip(self.keys, self.parts, strict=True)
        return f"{{{', '.join(f'{key!r}: {part}' for key, part in pairs)}}}"


Leaf: TypeAlias = TensorLeaf | ArrayLeaf | ScalarLeaf | NumberLeaf
Layout: TypeAlias = Leaf | TupleOf | ListOf | DictOf

_NUMBERS = {"bool": "|b1", "int": "<i8", "float": "<f8"}


def num_bytes(layout: Layout) -> int:
    """The length of a record."""
    return sum(_aligned(leaf.num_bytes) for leaf in _leaves(layout))


def pack_item(item: Any) -> tuple[Layout, bytes]:
    """A sample's layout, and its record.

    Raises:
        DataError: a part of it has no place in a record.
    """
    pieces: list[bytes] = []
    layout = _pack(item, pieces)
    return layout, b"".join(pieces)


def unpack_item(layout: Layout, record: bytearray) -> Any:
    """The sample. Its tensors and arrays lie in the record, which must be nobody else's."""
    return _unpack(layout, record, _offsets(layout))


def _pack(item: Any, pieces: list[bytes]) -> Layout:
    if type(item) is tuple:
        return TupleOf(parts=tuple(_pack(part, pieces) for part in item))
    if type(item) is list:
        return ListOf(parts=tuple(_pack(part, pieces) for part in item))
    if type(item) is dict and all(isinstance(key, str) for key in item):
        parts = tuple(_pack(part, pieces) for part in item.values())
        return DictOf(keys=tuple(item), parts=parts)
    leaf, data = _pack_leaf(item)
    pieces += [data, bytes(_aligned(len(data)) - len(data))]
    return leaf


def _pack_leaf(item: Any) -> tuple[Leaf, bytes]:
    if _is_plain_tensor(item):
        dtype = str(item.dtype).removeprefix("torch.")
        return TensorLeaf(dtype=dtype, shape=tuple(item.shape)), _bytes_of(item)
    if type(item) is np.ndarray and _is_plain_dtype(item.dtype):
        return ArrayLeaf(dtype=item.dtype.str, shape=item.shape), item.tobytes()
    if isinstance(item, np.generic) and _is_plain_dtype(item.dtype):
        return ScalarLeaf(dtype=item.dtype.str), item.tobytes()
    if type(item) in (bool, int, float):
        kind = type(item).__name__
        try:
            return NumberLeaf(kind=kind), np.array(item, _NUMBERS[kind]).tobytes()
        except OverflowError as error:
            raise _unfit(f"the number {item}, of more than 64 bits") from error
    raise _unfit(f"a {_described(item)} in it")


def _unfit(received: str) -> DataError:
    return DataError(
        "The samples of a cached dataset must be tensors on the CPU, arrays and numbers, in "
        "plain tuples, lists or dicts with text as keys.",
        received=received,
        fix="Convert it in __getitem__, or cache a dataset below the one that makes it.",
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


def _bytes_of(tensor: torch.Tensor) -> bytes:
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8).numpy().tobytes()


def _leaves(layout: Layout) -> Iterator[Leaf]:
    if isinstance(layout, TupleOf | ListOf | DictOf):
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
    if isinstance(layout, TupleOf | ListOf | DictOf):
        parts = [_unpack(part, record, offsets) for part in layout.parts]
        if isinstance(layout, DictOf):
            return dict(zip(layout.keys, parts, strict=True))
        return tuple(parts) if isinstance(layout, TupleOf) else parts
    return layout.load(record, next(offsets))


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch.{name} is no dtype")
    return dtype


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
