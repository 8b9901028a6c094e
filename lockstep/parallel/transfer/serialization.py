"""Serialized objects: objects for another process, with their tensors in shared memory.

A serialized object is a pickle (``lockstep.pickling``: code that helpers cannot import is sent by
value) in which every CPU tensor and large array is replaced by its place in a shared region, or, if
all of them are small, in bytes that follow the pickle. Parameters in a store are replaced by their
number there, so that both sides use the same memory, and arrays in mapped files by their place in
the file, which the receiver maps itself.
"""

import io
import pickle
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lockstep import accelerators
from lockstep.comm.shared_memory.shared_region import SharedRegion, dense_stride, tensor_in
from lockstep.data.map_style.mapped_files import file_part
from lockstep.parallel.transfer import torch_objects
from lockstep.parallel.transfer.deep_stack import with_deep_stack
from lockstep.pickling import Pickler
from lockstep.plan.layout import align

_SMALL_ARRAY_BYTES = 4096
# Tensors up to this size in bytes are sent, not shared: mapping a region takes longer than a copy.
_MOST_SENT_BYTES = 1 << 17
_HEADER = struct.Struct("!QQ")  # bytes of the tensors that follow; the next hook's number

# Reduces an object for pickling, as ``__reduce_ex__`` does; NotImplemented for other objects.
Reduce = Callable[[Any], Any]
_reduce: ContextVar[Reduce | None] = ContextVar("lockstep_reduce", default=None)


@contextmanager
def reducing(reduce: Reduce) -> Iterator[None]:
    """Within the block, ``reduce`` packs the objects of a front end."""
    token = _reduce.set(reduce)
    try:
        yield
    finally:
        _reduce.reset(token)


@dataclass(frozen=True)
class SerializedObject:
    """A packed object: bytes, and a region for its tensors if they are large."""

    payload: bytes
    region: SharedRegion | None

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The descriptors to send with the payload."""
        return () if self.region is None else (self.region.descriptor,)

    def close(self) -> None:
        """Close the region's descriptor after it was sent."""
        if self.region is not None:
            self.region.close()


def pack(obj: Any, parameters: Sequence[torch.Tensor] = ()) -> SerializedObject:
    """Pack an object.

    Args:
        obj: anything that cloudpickle can pickle.
        parameters: Parameters, and other tensors, that the receiver has already, in this order.

    Raises:
        Exception: pickling a part of the object fails.
    """
    text, pickler = _pickled(obj, parameters)
    is_sent = pickler.num_bytes <= _MOST_SENT_BYTES
    region = None if is_sent else SharedRegion.create(pickler.num_bytes)
    memory: Any = _own_memory(pickler.num_bytes) if region is None else region.memory
    for place, tensor in pickler.tensors:
        tensor_in(memory, *place).copy_(tensor)
    sent = bytes(memory) if is_sent else b""
    header = _HEADER.pack(len(sent), RemovableHandle.next_id)
    return SerializedObject(header + sent + text, region)


def describe(obj: Any, parameters: Sequence[torch.Tensor] = ()) -> bytes:
    """An object without the values of its tensors, as bytes."""
    return _pickled(obj, parameters)[0]


def describe_values(obj: Any, parameters: Sequence[torch.Tensor] = ()) -> object:
    """The result of ``describe``, and the address and version of each tensor."""
    text, pickler = _pickled(obj, parameters)
    return text, [(tensor.data_ptr(), tensor._version) for _, tensor in pickler.tensors]


def has_tensors(obj: Any) -> bool:
    """True if an object holds or refers to tensors, also in a closure."""
    return bool(_pickled(obj, ())[1].tensors)


def parameters_in(obj: Any, parameters: Sequence[torch.Tensor]) -> list[int]:
    """The numbers of those parameters that an object holds or refers to, also in a closure."""
    return sorted(_pickled(obj, parameters)[1].found)


def _pickled(obj: Any, parameters: Sequence[torch.Tensor]) -> tuple[bytes, "_Pickler"]:
    try:
        return _dumped(obj, parameters)
    except pickle.PicklingError as error:
        if not isinstance(error.__cause__, RecursionError):
            raise
        return with_deep_stack(lambda: _dumped(obj, parameters))


def _dumped(obj: Any, parameters: Sequence[torch.Tensor]) -> tuple[bytes, "_Pickler"]:
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, parameters)
    pickler.dump(obj)
    return buffer.getvalue(), pickler


def unpack(
    payload: bytes, region: SharedRegion | None, parameters: Sequence[torch.Tensor] = ()
) -> Any:
    """The object that ``pack`` packed; its tensors lie in the region, or in memory of their own."""
    (length, next_hook), start = _HEADER.unpack_from(payload), _HEADER.size
    # A module's hooks have numbers of the sender: a new hook must not replace one of them.
    RemovableHandle.next_id = max(RemovableHandle.next_id, next_hook)
    memory: Any = _own_memory(length) if region is None else region.memory
    if region is None:
        memory[:] = np.frombuffer(payload, np.uint8, length, start)
    return _Unpickler(io.BytesIO(payload[start + length :]), memory, parameters).load()


def _own_memory(num_bytes: int) -> Any:
    """Memory aligned like torch's tensors: the results of a kernel may depend on it."""
    return torch.empty(num_bytes, dtype=torch.uint8).numpy()


# A tensor's place in the region: offset in bytes, dtype, shape, strides.
_Place = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]


class _Pickler(Pickler):
    def __init__(self, file: io.BytesIO, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__(file)
        self._numbers = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._places: dict[int, tuple[Any, ...]] = {}
        self._keep: list[Any] = []  # an id is valid only while its object lives
        self.tensors: list[tuple[_Place, torch.Tensor]] = []
        self.num_bytes = 0
        self.found: set[int] = set()  # numbers of parameters

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        if id(obj) in self._numbers:
            self.found.add(self._numbers[id(obj)])
            return ("parameter", self._numbers[id(obj)], obj.requires_grad)
        if id(obj) in self._places:
            return self._places[id(obj)]
        if isinstance(obj, torch.Tensor | np.memmap) and (part := file_part(obj)) is not None:
            kind = "file tensor" if isinstance(obj, torch.Tensor) else "file array"
            return self._remember(obj, (kind, part))
        if type(obj) in (torch.Tensor, nn.Parameter, nn.Buffer) and _is_plain(obj):
            kind = "parameter-like" if isinstance(obj, nn.Parameter) else "tensor"
            place = self._place(obj.detach())
            return self._remember(obj, (kind, *place, obj.requires_grad, obj.device.type))
        if type(obj) is np.ndarray and _is_large_and_numeric(obj):
            return self._remember(obj, ("array", *self._place(torch.from_numpy(_writable(obj)))))
        return None

    def reducer_override(self, obj: Any) -> Any:
        reduce = _reduce.get()
        reduced = NotImplemented if reduce is None else reduce(obj)
        if reduced is not NotImplemented:
            return reduced
        if isinstance(obj, Optimizer):
            # Its own pickling drops attributes of subclasses and wrappers of schedulers.
            contents = optimizer_contents(obj)
            return torch_objects.blank, (type(obj),), contents, None, None, _fill_optimizer
        reduced = torch_objects.reduce(obj, self)
        if reduced is not NotImplemented:
            return reduced
        return super().reducer_override(obj)

    def _remember(self, obj: Any, place: tuple[Any, ...]) -> tuple[Any, ...]:
        self._places[id(obj)] = place
        self._keep.append(obj)
        return place

    def _place(self, tensor: torch.Tensor) -> _Place:
        place = self.num_bytes, tensor.dtype, tuple(tensor.shape), dense_stride(tensor)
        self.num_bytes = align(self.num_bytes + tensor.numel() * tensor.element_size())
        self.tensors.append((place, tensor))
        return place


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, memory: Any, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__(file)
        self._memory = memory
        self._parameters = parameters
        self._loaded: dict[tuple[Any, ...], Any] = {}

    def persistent_load(self, place: Any) -> Any:
        if place not in self._loaded:
            self._loaded[place] = self._load(*place)
        return self._loaded[place]

    def _load(self, kind: str, *details: Any) -> Any:
        if kind == "parameter":
            number, requires_grad = details
            return self._parameters[number].requires_grad_(requires_grad)
        if kind.startswith("file"):
            (part,) = details
            return part.open_tensor() if kind == "file tensor" else part.open()
        offset, dtype, shape, stride, *rest = details
        tensor = tensor_in(self._memory, offset, dtype, shape, stride)
        if kind == "array":
            return tensor.numpy()
        if rest[1] != "cpu":  # tensors of the sender's device move to the rank's own
            tensor = tensor.to(accelerators.current(rest[1]))
        if kind == "parameter-like":
            return nn.Parameter(tensor, requires_grad=rest[0])
        return tensor.requires_grad_(rest[0])


def optimizer_contents(optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's attributes without its hooks and the wrapped ``step`` of a scheduler."""
    return {
        key: value
        for key, value in vars(optimizer).items()
        if key != "step" and not (key.startswith("_optimizer_") and key.endswith("_hooks"))
    }


def rebuild_optimizer(kind: type[Optimizer], contents: dict[str, Any]) -> Optimizer:
    """An optimizer with these attributes, made without its constructor."""
    optimizer: Optimizer = torch_objects.blank(kind)
    _fill_optimizer(optimizer, contents)
    return optimizer


def _fill_optimizer(optimizer: Optimizer, contents: dict[str, Any]) -> None:
    optimizer.__setstate__({"defaults": {}, "state": {}, "param_groups": [], **contents})


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type in ("cpu", accelerators.kind())
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and not torch.nn.parameter.is_lazy(tensor)
        and (tensor.is_leaf or not tensor.requires_grad)
    )


def _is_large_and_numeric(array: np.ndarray[Any, Any]) -> bool:
    if array.nbytes < _SMALL_ARRAY_BYTES or not array.dtype.isnative:
        return False
    return array.dtype.kind in "fiub" and array.dtype.itemsize <= 8


def _writable(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    strides_fit = all(stride >= 0 and stride % array.itemsize == 0 for stride in array.strides)
    return array if array.flags.writeable and strides_fit else array.copy()
