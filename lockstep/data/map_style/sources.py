"""Sources: data that every rank reads by index.

A source turns indices into a ``Batch``. Arrays and map-style datasets are sources. Data that can
only be iterated is a stream (``data.iterable.streams``), and refused here with a reason.
"""

from abc import ABC, abstractmethod
from collections import UserDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from lockstep.data.iterable.read_ahead import Prefetch, ReadAhead
from lockstep.data.map_style.arrays import as_array, from_numpy, holds_texts
from lockstep.data.map_style.huggingface import collate_rows, has_plain_rows
from lockstep.data.map_style.map_datasets import name_of, read_items
from lockstep.data.map_style.sent_order import SentOrder
from lockstep.data.trees import Tree, map_tensors, named_tensors, tensors_of
from lockstep.errors import BadRecordError, DataError, Problems

SUPPORTED = (
    "(inputs, targets) or (inputs, targets, sample_weight) of arrays or tensors, "
    "or a map-style Dataset; without targets (inputs,) or a dict; fit, evaluate and predict also "
    "take global batches: a DataLoader, a generator function, an iterable, a tf.data.Dataset, and "
    "samples of an IterableDataset"
)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Some samples.

    Attributes:
        inputs: a tensor of shape (n, ...), a tuple of positional arguments of the model, or a
            dict of keyword arguments.
        targets: of the loss, shape (n, ...); None without.
        sample_weight: shape (n,); None for equal weights.
        num_samples: n.
        least_target: none of the targets, which are one tensor of integers, is below it; None if
            that is unknown. On a device the host cannot look without waiting.
    """

    inputs: Tree
    targets: Tree
    sample_weight: torch.Tensor | None
    num_samples: int
    least_target: int | None = None

    @property
    def as_given(self) -> Tree:
        """The samples in the form of the user's data."""
        if self.sample_weight is not None:
            return self.inputs, self.targets, self.sample_weight
        return self.inputs if self.targets is None else (self.inputs, self.targets)


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Source(ABC):
    """Samples that can be read by index.

    Attributes:
        ahead: how to read ahead; None to read samples when they are needed.
    """

    ahead: ReadAhead | None = None

    @property
    def sample(self) -> "Source":
        """Samples to find the shapes and types of the data."""
        return self

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples."""

    @abstractmethod
    def read(self, indices: torch.Tensor, dtype: torch.dtype | None) -> Batch:
        """Copy the samples at ``indices`` (int64, shape (n,)).

        Floating numbers become ``dtype``; None leaves them unchanged.
        """


class Constant:
    """An input without samples: a leaf of a tree that every batch gets unchanged."""

    def __init__(self, value: Any) -> None:
        self.value = value


class ArraySource(Source):
    """Samples along the first dim of arrays or tensors."""

    _version = -1  # of the targets, when the least was read
    _sent: SentOrder | None = None

    def __init__(self, inputs: Tree, targets: Tree, sample_weight: Any) -> None:
        self.inputs = inputs
        self.targets = targets
        self.sample_weight = sample_weight
        self._least: int | None = None

    def __len__(self) -> int:
        first = next(tensors_of((self.inputs, self.targets)), None)
        return 0 if first is None else len(first)

    def is_on(self, device: torch.device) -> bool:
        """True if a device can read its samples itself."""
        return all(tensor.device == device for tensor in tensors_of((self.inputs, self.targets)))

    def between(self, first: int, last: int) -> "ArraySource":
        """Consecutive samples, in the same memory."""

        def cut(tree: Tree) -> Tree:
            return map_tensors(lambda tensor: tensor[first:last], tree)

        return ArraySource(cut(self.inputs), cut(self.targets), cut(self.sample_weight))

    def read(self, indices: torch.Tensor, dtype: torch.dtype | None) -> Batch:
        places_on = {indices.device: indices}

        def pick(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device not in places_on:
                places_on[tensor.device] = self._places(indices, tensor.device)
            places = places_on[tensor.device]
            # The faster index_select lacks some integer types for a single dim.
            rows = tensor[places] if tensor.dim() == 1 else tensor.index_select(0, places)
            return rows.to(dtype) if dtype is not None and rows.is_floating_point() else rows

        weight = self.sample_weight
        return Batch(
            inputs=map_tensors(pick, self.inputs),
            targets=map_tensors(pick, self.targets),
            sample_weight=None if weight is None else pick(weight).to(dtype or weight.dtype),
            num_samples=indices.shape[0],
            least_target=self.least_target(),
        )

    def _places(self, indices: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The indices on another device, which gets the order of all batches once."""
        if self._sent is None or not self._sent.has(indices, device):
            self._sent = SentOrder(indices, device)
        return self._sent.part(indices)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_sent"}

    def least_target(self) -> int | None:
        """See ``Batch``: of all targets on a device, read again where they have changed."""
        targets = self.targets
        if not isinstance(targets, torch.Tensor) or targets.is_cpu or targets.is_inference():
            return None
        if self._version != targets._version:
            self._version, self._least = targets._version, least_of(targets)
        return self._least


def least_of(targets: Tree) -> int | None:
    """The least of integer targets; None for others. Waits for a device."""
    if not isinstance(targets, torch.Tensor) or not targets.numel():
        return None
    return int(targets.min()) if targets.dtype in _INTEGERS else None


class DatasetSource(Source):
    """A map-style dataset whose items are (input, target) or (input, target, weight).

    Or (input,), or a dict of inputs by name, where the model needs no targets.
    """

    def __init__(self, dataset: Dataset[Any], *, with_targets: bool = True) -> None:
        self.dataset = dataset
        self.with_targets = with_targets
        self.ahead = dataset.ahead if isinstance(dataset, Prefetch) else None

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # as_source has seen its __len__

    def read(self, indices: torch.Tensor, dtype: torch.dtype | None) -> Batch:
        items = self._items(indices.tolist())
        if not self.with_targets:
            items = [_first_part(item) for item in items]
        inputs, targets, weight = self._split(items[0], self._collated(items, indices))
        if weight is not None:
            _check_collated_weight(weight)

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor

        return Batch(
            inputs=map_tensors(cast, inputs),
            targets=map_tensors(cast, targets),
            sample_weight=None if weight is None else weight.to(dtype or weight.dtype),
            num_samples=len(indices),
        )

    def _items(self, indices: list[int]) -> list[Any]:
        return read_items(self.dataset, indices)

    def _collated(self, items: list[Any], indices: torch.Tensor) -> Any:
        if has_plain_rows(self.dataset):
            return collate_rows(items)
        try:
            return _collated(items)
        except RuntimeError as error:  # torch's, of tensors that cannot be stacked
            shapes = [_shapes_of(item) for item in items]
            if len(set(shapes)) == 1:
                raise
            odd = min(shapes, key=shapes.count)  # the first of the rarest
            index = int(indices[shapes.index(odd)])
            listed = " and of ".join(sorted(set(shapes)))
            raise BadRecordError(
                "The items of a batch must have the same shapes.",
                received=f"items of {listed}: sample {index} of {name_of(self.dataset)} is {odd}",
                fix="Pad them in __getitem__, or make batches with a DataLoader's collate_fn.",
                index=index,
            ) from error

    def _split(self, item: Any, collated: Any) -> tuple[Tree, Tree, Any]:
        if not self.with_targets:
            return _arguments(item, collated), None, None
        if isinstance(item, Mapping):
            return dict(collated), None, None
        if isinstance(item, tuple) and len(item) == 1:
            return _arguments(item[0], collated[0]), None, None
        parts = len(item) if isinstance(item, tuple | list) else 0
        if parts not in (2, 3):
            raise DataError(
                "An item of the dataset must be (input, target) or (input, target, weight), "
                "or (input,) or a dict of inputs where no targets are needed.",
                received=_describe(item),
                fix="Return such a tuple from __getitem__; of items that are dicts "
                "lockstep.data.columns makes them.",
            )
        inputs, targets, *weight = collated
        return _arguments(item[0], inputs), targets, weight[0] if weight else None


def _first_part(item: Any) -> Any:
    """The input of an item, which may also have a target and a weight."""
    return item[0] if isinstance(item, tuple | list) and len(item) in (1, 2, 3) else item


def _collated(items: list[Any]) -> Any:
    try:
        return default_collate(items)
    except TypeError as error:
        item = items[0]
        lacks_part = isinstance(item, tuple | list) and any(part is None for part in item)
        raise DataError(
            "The items of a dataset must consist of tensors, arrays and numbers.",
            received=f"an item that is a {_describe(item)}",
            fix="Where there is no target, give the input twice and let the loss ignore it."
            if lacks_part
            else "Convert the rest in __getitem__.",
        ) from error


def _shapes_of(item: Any) -> str:
    return "(" + ", ".join(str(tuple(one.shape)) for one in tensors_of(item)) + ")"


def _arguments(part: Any, collated: Any) -> Tree:
    """Inputs as a tuple for positional arguments, for which default_collate gives a list."""
    return tuple(collated) if isinstance(part, tuple | list) else collated


def _check_collated_weight(weight: Any) -> None:
    problems = Problems()
    _check_weight(weight, problems)
    problems.raise_if_any(DataError)


def as_source(data: Any, *, name: str = "data") -> Source:
    """Make a source of a user's training data.

    Args:
        data: see ``SUPPORTED``.
        name: the argument's name, for messages.

    Raises:
        DataError: another kind of data, or parts of different length.
    """
    if isinstance(data, Source):
        return data
    if isinstance(data, tuple | list) and len(data) in (2, 3) and not isinstance(data[0], str):
        return array_source(*data, name=name)
    if isinstance(data, Mapping):
        return as_input_source(dict(data), name=name)
    if isinstance(data, tuple) and len(data) == 1 and not isinstance(data[0], str):
        return array_source(data[0], name=name)
    return _dataset_source(data, name, with_targets=True)


def joined(data: Any, targets: Any, sample_weight: Any) -> Any:
    """Data, targets and weights as one argument.

    Raises:
        DataError: weights without targets.
    """
    if targets is None and sample_weight is not None:
        raise DataError(
            "`sample_weight` needs `y`.",
            received="weights without targets",
            fix="Pass (inputs, targets, sample_weight) as the data.",
        )
    if targets is None:
        return data
    return (data, targets) if sample_weight is None else (data, targets, sample_weight)


def as_input_source(inputs: Any, *, name: str = "x") -> Source:
    """Make a source without targets of a user's data for ``predict``.

    Arrays, or a tuple or dict of them, are the model's arguments. If a dataset's items are tuples
    of two or three, the first part is the input.

    Raises:
        DataError: another kind of data, or parts of different length.
    """
    if isinstance(inputs, Source):
        return inputs
    if _is_dataset(inputs):
        return _dataset_source(inputs, name, with_targets=False)
    return array_source(inputs, name=name)


def array_source(inputs: Any, *others: Any, name: str) -> ArraySource:
    """A source of arrays with a row per sample: inputs alone, with targets, or also with weights.

    Raises:
        DataError: a part is no array, or parts have different lengths.
    """
    targets = _as_tensors(others[0], name) if others else None
    weight = _as_tensors(others[1], name) if others[1:] and others[1] is not None else None
    source = ArraySource(_as_tensors(inputs, name), targets, weight)
    check_lengths(source, name)
    return source


def _is_dataset(data: Any) -> bool:
    if isinstance(data, Dataset | DataLoader):
        return True
    # Tables (pandas) and files (h5py) have rows and are arrays.
    is_array = hasattr(data, "__array__") or isinstance(data, dict | UserDict | tuple | list)
    return hasattr(data, "__getitem__") and not is_array


def _dataset_source(data: Any, name: str, *, with_targets: bool) -> Source:
    map_style = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    unfit = isinstance(
        data,
        DataLoader | IterableDataset | torch.Tensor | np.ndarray | str | dict | list | tuple,
    )
    if unfit or not map_style:
        raise DataError(
            f"`{name}` must be {SUPPORTED}.",
            received=_describe(data),
            fix="Pass a DataLoader's dataset, and its batch size as batch_size."
            if isinstance(data, DataLoader)
            else "Put it into one of these forms.",
        )
    return DatasetSource(data, with_targets=with_targets)


def _as_tensors(value: Any, name: str) -> Tree:
    """Arrays become tensors that share their memory."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, np.ndarray):
        return from_numpy(value, name)
    if isinstance(value, tuple):
        return tuple(_as_tensors(part, name) for part in value)
    if isinstance(value, dict | UserDict):
        return {key: _as_tensors(part, name) for key, part in value.items()}
    if isinstance(value, Constant):
        return Constant(_as_tensors(value.value, name))
    if isinstance(value, list) or hasattr(value, "__array__"):
        return from_numpy(as_array(value, name), name)
    if isinstance(value, str | bytes):
        raise holds_texts(name, [value])
    raise DataError(
        f"`{name}` must be {SUPPORTED}.",
        received=_describe(value),
        fix="Put it into one of these forms.",
    )


def check_lengths(source: ArraySource, name: str) -> None:
    """Refuse parts without a row for each sample.

    Raises:
        DataError: with their shapes.
    """
    problems = Problems()
    parts = named_parts(source)
    for label, tensor in parts:
        if tensor.dim() == 0:
            problems.add(
                f"{label} of `{name}` must have one row per sample.",
                received="a scalar",
                fix="Give an array of shape (samples, ...).",
            )
    problems.raise_if_any(DataError)
    if len({len(tensor) for _, tensor in parts}) > 1:
        lengths = ", ".join(f"{label} {len(tensor)}" for label, tensor in parts)
        problems.add(
            f"All parts of `{name}` must have the same number of samples.",
            received=lengths,
            fix="Cut or pad them to one length.",
        )
    weight = source.sample_weight
    if weight is not None:
        _check_weight(weight, problems)
    problems.raise_if_any(DataError)


def _check_weight(weight: Any, problems: Problems) -> None:
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1:
        shape = f"shape {tuple(weight.shape)}" if isinstance(weight, torch.Tensor) else None
        problems.add(
            "sample_weight must have one number per sample.",
            received=shape or _describe(weight),
            fix="Pass an array of shape (samples,). Pass other data with the inputs: "
            "((inputs, others), targets).",
        )
    elif not bool(torch.isfinite(weight.double()).all()) or bool((weight < 0).any()):
        problems.add(
            "sample_weight must be finite and not negative.",
            received=f"values from {weight.min().item()} to {weight.max().item()}",
            fix="Correct them; or put what is no weight beside the inputs: ((inputs, more), y).",
        )


def named_parts(data: ArraySource | Batch) -> list[tuple[str, torch.Tensor]]:
    """All tensors of a source or batch: ``inputs``, ``targets[0]``, ``sample_weight``."""
    parts = "inputs", "targets", "sample_weight"
    return [each for part in parts for each in named_tensors(getattr(data, part), part)]


def _describe(value: Any) -> str:
    if isinstance(value, tuple | list) and len(value) <= 4:
        return f"{type(value).__name__} of ({', '.join(_describe(part) for part in value)})"
    return type(value).__name__
