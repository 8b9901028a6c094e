"""Streams: global batches that can only be read one after the other, in one process.

A DataLoader with an order of its own, a generator, a ``tf.data.Dataset``: none of them can be read
by index, and few can be sent to another process. So one process reads them, and each batch becomes
an ``ArraySource`` whose rows all ranks find in shared memory (``train.input.stream_broadcast``).
This module recognises streams and checks their elements. ``data.iterable.stream_reader`` keeps the
position and the random states.

Not covered: elements with anything but numbers (texts, None), because their division into samples
is unknown.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lockstep.data.map_style.huggingface import collate_rows, has_plain_rows
from lockstep.data.map_style.sources import ArraySource, Source, array_source
from lockstep.data.trees import Tree
from lockstep.errors import DataError

_INFINITE = -1  # tf.data.INFINITE_CARDINALITY


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Global batches in an order of their own.

    Attributes:
        name: of the user's argument, for messages.
        kind: the kind of data, for messages.
        begin: begins a pass over the data.
        restarts: True if every pass begins again; False if it continues the one before.
        has_batches: True if its batches are its own, and not made of samples here.
        num_batches: of a pass; None if it does not say.
        is_endless: True if it says that a pass never ends.
        with_targets: True if elements are (inputs, targets) or (inputs, targets, sample_weight).
    """

    name: str
    kind: str
    begin: Callable[[], Iterator[Any]]
    restarts: bool = True
    has_batches: bool = True
    num_batches: int | None = None
    is_endless: bool = False
    with_targets: bool = True

    def batch(self, element: Any) -> ArraySource:
        """An element as a global batch.

        Raises:
            DataError: it is no batch.
        """
        parts = self._parts(element)
        source = array_source(*map(_arguments, parts), name=self.name)
        if len(source) == 0:
            raise DataError(
                "A batch must hold a sample.", received="an empty batch", fix="Leave it out."
            )
        return source

    def _parts(self, element: Any) -> list[Any]:
        is_tuple = isinstance(element, tuple) or _holds_arrays(element)
        if not self.with_targets:
            return [element[0] if is_tuple and len(element) in (1, 2, 3) else element]
        if is_tuple and len(element) in (1, 2, 3):
            return list(element)
        if isinstance(element, Mapping):  # inputs of a model that computes its own loss
            return [element]
        raise DataError(
            f"A batch of `{self.name}` must be (inputs, targets) or "
            "(inputs, targets, sample_weight), or (inputs,) or a dict of inputs where no "
            "targets are needed.",
            received=_describe(element),
            fix="Make such a tuple of it.",
        )


def as_stream(data: Any, *, name: str, batch_size: int, with_targets: bool = True) -> Stream | None:
    """A stream of data that can only be iterated; None for data that is read by index.

    Args:
        data: the user's.
        name: the argument's name, for messages.
        batch_size: of the batches that are made of an IterableDataset's samples.
        with_targets: see ``Stream``.
    """
    make = partial(Stream, name=name, kind=type(data).__name__, with_targets=with_targets)
    if isinstance(data, IterableDataset) or (has_plain_rows(data) and not _is_indexed(data)):
        collate = collate_rows if has_plain_rows(data) else None
        samples: DataLoader[Any] = DataLoader(data, batch_size=batch_size, collate_fn=collate)
        return make(begin=partial(iter, samples), has_batches=False)
    if isinstance(data, DataLoader) or _is_of_tensorflow(data):
        return make(
            begin=partial(iter, data),
            num_batches=_length(data),
            is_endless=_is_of_tensorflow(data) and int(data.cardinality()) == _INFINITE,
        )
    if _is_function(data):
        return make(begin=lambda: iter(data()), kind="a function")
    if not isinstance(data, Iterable) or _is_indexed(data):
        return None
    if isinstance(data, Iterator):
        return make(begin=lambda: data, restarts=False)
    return make(begin=partial(iter, data), num_batches=_length(data))


def _is_of_tensorflow(data: Any) -> bool:
    """Whether it is a ``tf.data.Dataset``; the user has then imported TensorFlow."""
    tensorflow = sys.modules.get("tensorflow")
    return tensorflow is not None and isinstance(data, tensorflow.data.Dataset)


def _is_function(data: Any) -> bool:
    return callable(data) and not (isinstance(data, type | Iterable) or _is_indexed(data))


def _is_indexed(data: Any) -> bool:
    """Whether it is no stream: arrays, containers of arrays, tables, map-style datasets."""
    if isinstance(data, Source | Dataset | nn.Module | torch.Tensor | np.ndarray):
        return True
    if isinstance(data, Mapping | list | tuple | str | bytes) or hasattr(data, "__array__"):
        return True
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")


def _length(data: Any) -> int | None:
    """The number of batches of a pass; None if it does not say."""
    try:
        return len(data)
    except TypeError:  # it is unknown, or endless
        return None


def _holds_arrays(part: Any) -> bool:
    """Whether a list has arrays (as ``default_collate`` makes), and not numbers."""
    return isinstance(part, list) and any(
        isinstance(one, dict | tuple) or hasattr(one, "__array__") for one in part
    )


def _arguments(part: Any) -> Tree:
    """A part with tuples, which mean positional arguments, for a DataLoader's lists."""
    if isinstance(part, Mapping):
        return {key: _arguments(value) for key, value in part.items()}
    if isinstance(part, tuple) or _holds_arrays(part):
        return tuple(_arguments(one) for one in part)
    return part


def _describe(element: Any) -> str:
    if hasattr(element, "keys"):
        return f"a {type(element).__name__} with {', '.join(map(repr, element.keys()))}"
    if isinstance(element, tuple | list):
        return f"a {type(element).__name__} of {len(element)}"
    return f"a {type(element).__name__}"
