"""Bad records: samples that cannot be read, or differ from the others in shape or type.

The first record that can be read is the model for all: tensors, arrays and numbers of its shapes
and types, in the same places.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import Dataset

from lockstep.data.map_style.map_datasets import name_of
from lockstep.data.map_style.sources import DatasetSource, Source
from lockstep.data.order import kept_streams
from lockstep.errors import BadRecordError, DataError

OnBadRecord = Literal["error", "skip"]

# Records at a dataset's beginning that are tried before it counts as broken.
_MOST_TRIED = 1000


class CheckedSource(DatasetSource):
    """A map-style dataset whose records must have the form of the first that can be read.

    Args:
        dataset: see ``DatasetSource``.

    Raises:
        DataError: none of the first records can be read.
    """

    def __init__(self, dataset: Dataset[Any]) -> None:
        super().__init__(dataset)
        self._form: str | None = None  # until the first is found
        self._readable = _Readable(self)
        with kept_streams():
            self._form = form_of(self._readable[0])

    @property
    def sample(self) -> Source:
        return DatasetSource(self._readable)

    def bad_among(self, indices: Sequence[int]) -> dict[int, str]:
        """The records that cannot be used, each with the reason."""
        found = {}
        for index in indices:
            try:
                self.read_one(index)
            except BadRecordError as error:
                found[index] = str(error)
        return found

    def read_one(self, index: int) -> Any:
        """The record at an index.

        Raises:
            BadRecordError: it is bad.
        """
        return self._items([index])[0]

    def _items(self, indices: list[int]) -> list[Any]:
        items = super()._items(indices)
        for index, item in zip(indices, items, strict=True):
            form = form_of(item)
            if self._form is not None and form != self._form:
                raise BadRecordError(
                    f"Sample {index} of {name_of(self.dataset)} must have the shapes and types of "
                    f"the first one that can be read: {self._form}.",
                    received=form,
                    fix="Give all samples one shape and type in __getitem__, or leave it out.",
                    index=index,
                )
        return items


class _Readable(Dataset[Any]):
    """The good records of a source, found as they are read."""

    def __init__(self, source: CheckedSource) -> None:
        self._source = source
        self._found: list[int] = []
        self._num_tried = 0

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Any:
        first: BadRecordError | None = None
        while len(self._found) <= index:
            place, self._num_tried = self._num_tried, self._num_tried + 1
            try:
                if place >= min(len(self), index + _MOST_TRIED):
                    raise DataError(
                        "If bad records are skipped, the dataset must have some good ones.",
                        received=f"{len(self._found)} among its first {place}",
                        fix="The exception above says why the first bad one cannot be read.",
                    ) from first
                self._source.read_one(place)
            except BadRecordError as error:
                first = first or error
            else:
                self._found.append(place)
        return self._source.read_one(self._found[index])


def form_of(item: Any) -> str:
    """The types and shapes of a record's parts."""
    if isinstance(item, dict):
        return "{" + ", ".join(f"{key!r}: {form_of(part)}" for key, part in item.items()) + "}"
    if isinstance(item, tuple | list):
        return "(" + ", ".join(map(form_of, item)) + ")"
    if isinstance(item, torch.Tensor | np.ndarray):
        return f"{str(item.dtype).removeprefix('torch.')} {tuple(item.shape)}"
    return str(item.dtype) if isinstance(item, np.generic) else type(item).__name__
