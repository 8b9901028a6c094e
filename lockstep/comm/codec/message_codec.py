"""Messages between hosts as bytes, without pickle: plain values, arrays, and records of them.

The bytes may come from a host that was taken over. So decoding imports nothing, calls nothing that
the bytes name, and allocates memory only for what has arrived. The worst that any bytes can cause
is a ``HostError``.

A message is a head in MessagePack, and the bytes of its tensors and arrays behind it, so that these
are copied once. In the head a list stands for everything that MessagePack has no type for: a tag,
and the parts. A tensor or array that occurs twice is sent once, and is one object again. Tensors
arrive on the CPU and require no gradient.
"""

import struct
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch

from lockstep.comm.codec import array_bytes, record_classes
from lockstep.errors import HostError, ShippingError

_DEEPEST = 100
_MOST_DIMS = 64
_SHOWN_CHARACTERS = 200
_HEAD_BYTES = struct.Struct("<Q")

_NATIVE = (type(None), bool, int, float, str, bytes)
_KEYS = (*_NATIVE, complex, torch.dtype, torch.Size)


def encode(obj: Any) -> bytes:
    """Bytes from which ``decode`` makes the same again.

    Raises:
        ShippingError: of a kind that is not sent, or nested too deep.
    """
    return b"".join(encoded(obj))


def encoded(obj: Any) -> list[bytes | memoryview]:
    """The same in parts; the parts of tensors and arrays are their own memory: no copy."""
    writer = _Writer()
    head = msgspec.msgpack.encode(writer.node(obj))
    return [_HEAD_BYTES.pack(len(head)), head, *writer.buffers]


def decode(payload: bytes | memoryview) -> Any:
    """The encoded object; tensors and arrays have memory of their own.

    Raises:
        HostError: the bytes are none that ``encode`` gives, or name a class that is not here.
    """
    try:
        return _Reader(memoryview(payload)).read()
    except HostError:
        raise
    except Exception as error:  # of msgspec, torch, numpy, or a class that got wrong parts
        raise HostError(
            "A message of another host cannot be decoded.",
            received=f"{len(payload)} bytes that cannot be read: {_shown(error)}",
            fix="Run the same version of Lockstep on every host.",
        ) from error


class _Writer:
    """Makes nodes, which MessagePack can encode, of objects.

    Attributes:
        buffers: the bytes of tensors and arrays, in the order in which nodes refer to them.
    """

    def __init__(self) -> None:
        self.buffers: list[memoryview] = []
        self._numbers: dict[int, int] = {}  # of tensors and arrays, by id
        self._kept: list[Any] = []  # or an id might be used again
        self._depth = 0

    def node(self, obj: Any) -> Any:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise _unsendable(f"something nested more than {_DEEPEST} deep, or within itself")
        node = (_WRITERS.get(type(obj)) or _writer_of(obj))(self, obj)
        self._depth -= 1
        return node

    def nodes(self, tag: str, items: Any) -> list[Any]:
        return [tag, *map(self.node, items)]

    def key(self, obj: Any) -> Any:
        node = self.node(obj)
        try:
            _check_key(obj)
        except TypeError as error:
            raise _unsendable(str(error)) from error
        return node

    def once(self, array: Any, describe: Callable[["_Writer", Any], Any]) -> Any:
        """The node of a tensor or array, or a reference to it if it was written before."""
        number = self._numbers.setdefault(id(array), len(self._kept))
        if number < len(self._kept):
            return ["=", number]
        self._kept.append(array)
        return describe(self, array)


def _writer_of(obj: Any) -> Callable[[_Writer, Any], Any]:
    if isinstance(obj, torch.Tensor):
        return lambda writer, tensor: writer.once(tensor, _tensor_node)
    if isinstance(obj, np.ndarray):
        return lambda writer, array: writer.once(array, lambda *it: ["a", *_array_node(*it)])
    if isinstance(obj, np.generic):
        return lambda writer, scalar: ["g", *_array_node(writer, np.asarray(scalar))]
    return _record_node


def _tensor_node(writer: _Writer, tensor: torch.Tensor) -> list[Any]:
    if not array_bytes.is_sendable(tensor):
        raise _unsendable(f"a {_name(type(tensor))} of {tensor.layout} on {tensor.device}")
    *description, data = array_bytes.describe_tensor(tensor)
    writer.buffers.append(data)
    return ["t", *description]


def _array_node(writer: _Writer, array: Any) -> list[Any]:
    found = array_bytes.describe_array(array) if type(array) in (np.ndarray, np.memmap) else None
    if found is None:
        raise _unsendable(f"a {_name(type(array))} of dtype {array.dtype}")
    *description, data = found
    writer.buffers.append(data)
    return description


def _record_node(writer: _Writer, record: Any) -> list[Any]:
    cls = type(record)
    if not record_classes.can_be_found(cls):
        raise _unsendable(f"a {_name(cls)}")
    try:
        items, attributes = record_classes.take_apart(record)
    except TypeError as error:
        raise _unsendable(f"a {_name(cls)} with {error}") from error
    return ["r", cls.__module__, cls.__qualname__, writer.node(items), writer.node(attributes)]


_WRITERS: dict[type, Callable[[_Writer, Any], Any]] = {
    **dict.fromkeys((type(None), bool, float, bytes), lambda writer, value: value),
    int: lambda writer, number: number if abs(number) < 1 << 63 else ["i", hex(number)],
    str: lambda writer, text: (
        text if text.isascii() else ["s", text.encode(errors="surrogatepass")]
    ),
    complex: lambda writer, value: ["c", value.real, value.imag],
    tuple: lambda writer, items: writer.nodes("(", items),
    list: lambda writer, items: writer.nodes("[", items),
    set: lambda writer, items: ["<", *map(writer.key, items)],
    frozenset: lambda writer, items: [">", *map(writer.key, items)],
    dict: lambda writer, items: [
        "{",
        *([writer.key(key), writer.node(value)] for key, value in items.items()),
    ],
    torch.dtype: lambda writer, dtype: ["d", str(dtype).removeprefix("torch.")],
    torch.Size: lambda writer, size: ["z", *size],
}


class _Reader:
    """Makes objects of nodes."""

    def __init__(self, payload: memoryview) -> None:
        (num_bytes,) = _HEAD_BYTES.unpack_from(payload)
        self._rest = payload[_HEAD_BYTES.size :]
        self._head = self.take(num_bytes)
        self.arrays: list[Any] = []

    def read(self) -> Any:
        """The object of the whole message."""
        obj = self.made(msgspec.msgpack.decode(self._head))
        if self._rest:
            raise ValueError(f"{len(self._rest)} bytes too many")
        return obj

    def take(self, num_bytes: int) -> memoryview:
        """The next bytes behind the head."""
        if num_bytes > len(self._rest):
            raise ValueError(f"{num_bytes} bytes of {len(self._rest)}")
        taken, self._rest = self._rest[:num_bytes], self._rest[num_bytes:]
        return taken

    def made(self, node: Any) -> Any:
        """The object of a node."""
        if type(node) is list:
            return _READERS[node[0]](self, *node[1:])
        if type(node) not in _NATIVE:
            raise TypeError(f"a {_name(type(node))}")
        return node

    def made_key(self, node: Any) -> Any:
        """The object of a node, checked to be hashable."""
        return _check_key(self.made(node))

    def noted(self, array: Any) -> Any:
        """A tensor or array that may be referred to."""
        self.arrays.append(array)
        return array


def _get_tensor(reader: _Reader, dtype: str, shape: Any, strides: Any) -> Any:
    num_bytes = array_bytes.num_tensor_bytes(dtype, _sizes(shape), _sizes(strides))
    return reader.noted(array_bytes.make_tensor(dtype, shape, strides, reader.take(num_bytes)))


def _get_array(reader: _Reader, dtype: str, shape: Any, by_columns: Any) -> Any:
    data = reader.take(array_bytes.num_array_bytes(dtype, _sizes(shape)))
    return array_bytes.make_array(dtype, shape, by_columns is True, data)


def _get_record(reader: _Reader, module: Any, name: Any, items: Any, attributes: Any) -> Any:
    cls = record_classes.find(module, name)
    if cls is None:
        raise HostError(
            "A message of another host contains a class that this host does not know.",
            received=_shown((module, name)),
            fix="Define or import it at the top of the script, which every host runs.",
        )
    return record_classes.put_together(cls, reader.made(items), reader.made(attributes))


_READERS: dict[str, Callable[..., Any]] = {
    "i": lambda reader, digits: int(digits, 16),
    "s": lambda reader, data: data.decode(errors="surrogatepass"),
    "c": lambda reader, real, imag: complex(real, imag),
    "(": lambda reader, *nodes: tuple(map(reader.made, nodes)),
    "[": lambda reader, *nodes: list(map(reader.made, nodes)),
    "<": lambda reader, *nodes: set(map(reader.made_key, nodes)),
    ">": lambda reader, *nodes: frozenset(map(reader.made_key, nodes)),
    "{": lambda reader, *pairs: {reader.made_key(key): reader.made(value) for key, value in pairs},
    "d": lambda reader, name: array_bytes.torch_dtypes()[name],
    "z": lambda reader, *sizes: torch.Size(_sizes(sizes)),
    "t": _get_tensor,
    "a": lambda reader, *description: reader.noted(_get_array(reader, *description)),
    "g": lambda reader, *description: _get_array(reader, *description)[()],
    "=": lambda reader, number: reader.arrays[number],
    "r": _get_record,
}


def _sizes(numbers: Any) -> Any:
    """Sizes or strides as they arrived, if they are valid ones."""
    if len(numbers) > _MOST_DIMS or any(type(number) is not int for number in numbers):
        raise ValueError(f"{len(numbers)} sizes: {_shown(numbers)}")
    return numbers


def _check_key(obj: Any) -> Any:
    """The object, if hashing and comparing it calls no code of a class that may be the user's."""
    if type(obj) in _KEYS or isinstance(obj, frozenset | np.generic | torch.Tensor):
        return obj
    if not isinstance(obj, tuple) or not record_classes.is_hashed_as_tuple(type(obj)):
        raise TypeError(f"a {_name(type(obj))} as a key")
    for item in obj:
        _check_key(item)
    return obj


def _shown(received: object) -> str:
    return f"{received!r:.{_SHOWN_CHARACTERS}}"


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _unsendable(received: str) -> ShippingError:
    return ShippingError(
        "Only tensors, arrays, plain values, and tuples, lists, dicts, sets, dataclasses and "
        "named tuples of these can be sent to another host; classes must be defined at the top "
        "of a module.",
        received=received,
        fix="Return tensors, in tuples, lists, dicts or dataclasses.",
    )
