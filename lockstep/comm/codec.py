"""What hosts tell each other, as bytes, without pickle: plain values, arrays, and records of them.

Bytes may come from a host that is not what it seems. So decoding imports nothing, calls nothing
that they name, and takes memory only for what is there; whatever they are, the worst they can cause
is a ``HostError``.

A value is a tag of one byte, then what belongs to it; lengths are words of 64 bits. Tensors and
arrays that occur twice are sent once, and are one again. Tensors arrive on the CPU and require no
gradient.
"""

import struct
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np
import torch

from lockstep.comm import array_bytes, record_classes
from lockstep.errors import HostError, ShippingError, problem

_DEEPEST = 100
_MOST_DIMS = 64
_SHOWN_CHARACTERS = 200


def encode(obj: Any) -> bytes:
    """Bytes from which ``decode`` makes the same again.

    Raises:
        ShippingError: of a kind that is not sent, or nested too deep.
    """
    writer = _Writer()
    writer.put(obj)
    return b"".join(writer.parts)


def decode(payload: bytes | memoryview) -> Any:
    """What was encoded; tensors and arrays have memory of their own.

    Raises:
        HostError: the bytes are none that ``encode`` gives, or name a class that is not here.
    """
    reader = _Reader(memoryview(payload))
    try:
        obj = reader.get()
        reader.check_end()
    # What torch and numpy make of shapes and types that cannot be, and classes of wrong parts.
    except (
        ArithmeticError,
        AttributeError,
        BufferError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
        struct.error,
    ) as error:
        if isinstance(error, HostError):
            raise
        raise HostError(
            problem(
                "What another host sends must be whole.",
                received=f"{len(payload)} bytes that cannot be read: {_shown(error)}",
                fix="Run the same version of Lockstep on every host.",
            )
        ) from error
    return obj


class _Writer:
    """Gathers the pieces: bytes, and views of what is not copied before they are joined."""

    def __init__(self) -> None:
        self.parts: list[bytes | memoryview] = []
        self._arrays: dict[int, int] = {}  # numbers of tensors and arrays by id
        self._kept: list[Any] = []  # or an id might be used again
        self._depth = 0
        self._num_keys = 0

    def put(self, obj: Any) -> None:
        """Write any object."""
        self._depth += 1
        if self._depth > _DEEPEST:
            raise _unsendable(f"something nested more than {_DEEPEST} deep, or within itself")
        (_WRITERS.get(type(obj)) or _writer_of(obj))(self, obj)
        self._depth -= 1

    def put_key(self, obj: Any) -> None:
        """Write what will be hashed."""
        self._num_keys += 1
        self.put(obj)
        self._num_keys -= 1

    @property
    def is_in_key(self) -> bool:
        """Whether what is written now will be hashed."""
        return self._num_keys > 0

    def tag(self, tag: bytes, *numbers: int) -> None:
        """Write what a value begins with."""
        self.parts.append(tag + struct.pack(f"<{len(numbers)}q", *numbers))

    def data(self, tag: bytes, data: bytes | memoryview) -> None:
        """Write a tag, a length, and so many bytes."""
        self.tag(tag, len(data))
        self.parts.append(data)

    def all(self, tag: bytes, items: Iterable[Any]) -> None:
        """Write a tag, a count, and so many values."""
        listed = list(items)
        self.tag(tag, len(listed))
        for item in listed:
            self.put(item)

    def is_known(self, array: Any) -> bool:
        """Refer to an array that was written before; else note it."""
        number = self._arrays.setdefault(id(array), len(self._arrays))
        if number < len(self._kept):
            self.tag(b"=", number)
            return True
        self._kept.append(array)
        return False


def _writer_of(obj: Any) -> Callable[[_Writer, Any], None]:
    if isinstance(obj, torch.Tensor):
        return _put_tensor
    if isinstance(obj, np.ndarray):
        return _put_array
    if isinstance(obj, np.generic):
        return _put_scalar
    return _put_record


def _put_int(writer: _Writer, number: int) -> None:
    num_bytes = number.bit_length() // 8 + 1
    writer.data(b"i", number.to_bytes(num_bytes, "little", signed=True))


def _put_dict(writer: _Writer, items: dict[Any, Any]) -> None:
    writer.tag(b"{", len(items))
    for key, value in items.items():
        writer.put_key(key)
        writer.put(value)


def _put_set(tag: bytes, writer: _Writer, items: Collection[Any]) -> None:
    writer.tag(tag, len(items))
    for item in items:
        writer.put_key(item)


def _put_tensor(writer: _Writer, tensor: torch.Tensor) -> None:
    if not array_bytes.is_sendable(tensor):
        raise _unsendable(f"a {_name(type(tensor))} of {tensor.layout} on {tensor.device}")
    if writer.is_known(tensor):
        return
    dtype, shape, strides, data = array_bytes.describe_tensor(tensor)
    writer.data(b"t", dtype.encode())
    writer.tag(b"", len(shape), *shape, *strides)
    writer.parts.append(data)


def _put_array(writer: _Writer, array: Any) -> None:
    if not writer.is_known(array):
        _put_array_as(b"a", writer, array)


def _put_scalar(writer: _Writer, scalar: Any) -> None:
    _put_array_as(b"g", writer, np.asarray(scalar))


def _put_array_as(tag: bytes, writer: _Writer, array: Any) -> None:
    found = array_bytes.describe_array(array) if type(array) in (np.ndarray, np.memmap) else None
    if found is None:
        raise _unsendable(f"a {_name(type(array))} of dtype {array.dtype}")
    dtype, shape, by_columns, data = found
    writer.data(tag, dtype.encode())
    writer.tag(b"", by_columns, len(shape), *shape)
    writer.parts.append(data)


def _put_record(writer: _Writer, record: Any) -> None:
    cls = type(record)
    name = record_classes.name_of(cls) if record_classes.is_record(cls) else None
    if name is None:
        raise _unsendable(f"a {_name(cls)}")
    if writer.is_in_key and not record_classes.is_hashed_as_tuple(cls):
        raise _unsendable(f"a {_name(cls)} as a key")
    try:
        items, attributes = record_classes.take_apart(record)
    except TypeError as error:
        raise _unsendable(f"a {_name(cls)} with {error}") from error
    writer.tag(b"r")
    for part in (*name, items, attributes):
        writer.put(part)


_WRITERS: dict[type, Callable[[_Writer, Any], None]] = {
    type(None): lambda writer, _: writer.tag(b"N"),
    bool: lambda writer, value: writer.tag(b"T" if value else b"F"),
    int: _put_int,
    float: lambda writer, value: writer.parts.append(b"f" + struct.pack("<d", value)),
    complex: lambda writer, value: writer.parts.append(
        b"c" + struct.pack("<2d", value.real, value.imag)
    ),
    str: lambda writer, text: writer.data(b"s", text.encode(errors="surrogatepass")),
    bytes: lambda writer, data: writer.data(b"b", data),
    tuple: lambda writer, items: writer.all(b"(", items),
    list: lambda writer, items: writer.all(b"[", items),
    set: lambda writer, items: _put_set(b"<", writer, items),
    frozenset: lambda writer, items: _put_set(b">", writer, items),
    dict: _put_dict,
    torch.dtype: lambda writer, dtype: writer.data(b"d", str(dtype)[len("torch.") :].encode()),
    torch.Size: lambda writer, size: writer.tag(b"z", len(size), *size),
}


class _Reader:
    """Reads what ``_Writer`` wrote; believes no length."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._position = 0
        self._depth = 0
        self._num_keys = 0
        self.arrays: list[Any] = []

    def get_key(self) -> Any:
        """Read what will be hashed."""
        self._num_keys += 1
        obj = self.get()
        self._num_keys -= 1
        return obj

    @property
    def is_in_key(self) -> bool:
        """Whether what is read now will be hashed."""
        return self._num_keys > 0

    def get(self) -> Any:
        """Read any object."""
        self._depth += 1
        if self._depth > _DEEPEST:
            raise ValueError("nested too deep")
        obj = _READERS[bytes(self.take(1))](self)
        self._depth -= 1
        return obj

    def take(self, num_bytes: int) -> memoryview:
        """So many bytes."""
        if not 0 <= num_bytes <= len(self._data) - self._position:
            raise ValueError(f"{num_bytes} bytes at {self._position}")
        self._position += num_bytes
        return self._data[self._position - num_bytes : self._position]

    def check_end(self) -> None:
        """See that nothing is left."""
        if self._position != len(self._data):
            raise ValueError(f"more after {self._position}")

    def numbers(self, count: int) -> tuple[int, ...]:
        """So many numbers."""
        return struct.unpack(f"<{count}q", self.take(8 * count))

    def number(self) -> int:
        """One number."""
        return self.numbers(1)[0]

    def data(self) -> memoryview:
        """A length and so many bytes."""
        return self.take(self.number())

    def text(self) -> str:
        """A length and so many bytes of text."""
        return str(self.data(), "utf-8", "surrogatepass")

    def all(self) -> list[Any]:
        """A count and so many values. The list grows with what is there."""
        return [self.get() for _ in range(self.number())]

    def shape(self) -> tuple[int, ...]:
        """A number of dims and their sizes."""
        count = self.number()
        if count > _MOST_DIMS:
            raise ValueError(f"{count} dims")
        return self.numbers(count)

    def noted(self, array: Any) -> Any:
        """Note an array that may be referred to."""
        self.arrays.append(array)
        return array


def _get_dict(reader: _Reader) -> dict[Any, Any]:
    found = {}
    for _ in range(reader.number()):
        key = reader.get_key()
        found[key] = reader.get()
    return found


def _get_set(reader: _Reader) -> set[Any]:
    return {reader.get_key() for _ in range(reader.number())}


def _get_tensor(reader: _Reader) -> torch.Tensor:
    dtype, shape = reader.text(), reader.shape()
    strides = reader.numbers(len(shape))
    data = reader.take(array_bytes.num_tensor_bytes(dtype, shape, strides))
    tensor: torch.Tensor = reader.noted(array_bytes.make_tensor(dtype, shape, strides, data))
    return tensor


def _get_array(reader: _Reader) -> Any:
    dtype, by_columns, shape = reader.text(), bool(reader.number()), reader.shape()
    data = reader.take(array_bytes.num_array_bytes(dtype, shape))
    return array_bytes.make_array(dtype, shape, by_columns, data)


def _get_record(reader: _Reader) -> Any:
    module, name, items, attributes = (reader.get() for _ in range(4))
    cls = record_classes.find(module, name)
    if cls is None:
        raise HostError(
            problem(
                "A class in what another host sends must be known here, too.",
                received=_shown((module, name)),
                fix="Define or import it at the top of the script, which every host runs.",
            )
        )
    if reader.is_in_key and not record_classes.is_hashed_as_tuple(cls):
        raise TypeError(f"a {_name(cls)} as a key")
    return record_classes.put_together(cls, items, attributes)


_READERS: dict[bytes, Callable[[_Reader], Any]] = {
    b"N": lambda _: None,
    b"T": lambda _: True,
    b"F": lambda _: False,
    b"i": lambda reader: int.from_bytes(reader.data(), "little", signed=True),
    b"f": lambda reader: struct.unpack("<d", reader.take(8))[0],
    b"c": lambda reader: complex(*struct.unpack("<2d", reader.take(16))),
    b"s": _Reader.text,
    b"b": lambda reader: bytes(reader.data()),
    b"(": lambda reader: tuple(reader.all()),
    b"[": _Reader.all,
    b"<": lambda reader: _get_set(reader),
    b">": lambda reader: frozenset(_get_set(reader)),
    b"{": _get_dict,
    b"d": lambda reader: array_bytes.torch_dtypes()[reader.text()],
    b"z": lambda reader: torch.Size(reader.shape()),
    b"t": _get_tensor,
    b"a": lambda reader: reader.noted(_get_array(reader)),
    b"g": lambda reader: _get_array(reader)[()],
    b"=": lambda reader: reader.arrays[reader.number()],
    b"r": _get_record,
}


def _shown(received: object) -> str:
    return f"{received!r:.{_SHOWN_CHARACTERS}}"


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _unsendable(received: str) -> ShippingError:
    return ShippingError(
        problem(
            "Only tensors, arrays, plain values, and tuples, lists, dicts, sets, dataclasses and "
            "named tuples of these can be sent to another host; classes must be defined at the top "
            "of a module.",
            received=received,
            fix="Return tensors, in tuples, lists, dicts or dataclasses.",
        )
    )
