"""Columns of data whose items are dicts, as in Hugging Face datasets, as items to train on.

Values become tensors here: when items are collated, a list of numbers would otherwise become as
many tensors as it has numbers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lockstep.errors import DataError, OptionError, Problems

Names = str | Sequence[str]


def columns(
    dataset: Any, *, inputs: Names, targets: Names | None = None, weight: str | None = None
) -> Any:
    """Make (input, target) items, or (input, target, weight), of items that are dicts.

    One name gives one tensor; several give a dict: the model's keyword arguments for inputs, and
    for targets the loss's argument.

    Args:
        dataset: a map-style dataset, an iterable one (of ``datasets`` or ``torch``), or a
            DataLoader of batches that are dicts.
        inputs: names of columns.
        targets: names of columns; None for inputs alone, as ``predict`` takes them.
        weight: name of the column of sample weights.

    Returns:
        Data of the same kind: read by index, sample by sample, or batch by batch.

    Raises:
        OptionError: invalid names, or columns that do not exist.
    """
    choice = _Choice(inputs=inputs, targets=targets, weight=weight)
    choice.check(getattr(dataset, "column_names", None))
    if isinstance(dataset, DataLoader):
        return _Batches(dataset, choice)
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        if not isinstance(dataset, dict):  # a dict has splits: the user must choose one
            return _Items(dataset, choice)
    elif hasattr(dataset, "__iter__"):
        return _Samples(dataset, choice)
    raise DataError(
        "`dataset` must be a dataset or a DataLoader whose items are dicts.",
        received=type(dataset).__name__,
        fix="Choose one of its splits: dataset['train'], for example."
        if isinstance(dataset, dict)
        else "Pass datasets.load_dataset(..., split='train'), for example.",
    )


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """The names of the columns."""

    inputs: Names
    targets: Names | None
    weight: str | None

    def check(self, known: object) -> None:
        """Refuse invalid names and, if the columns are known, names of other columns."""
        problems = Problems()
        for argument in ("inputs", "targets", "weight"):
            names = getattr(self, argument)
            if names is None and argument != "inputs":
                continue
            if not _are_names(names) or (argument == "weight" and not isinstance(names, str)):
                problems.add(
                    f"`{argument}` must be the name of a column"
                    + ("." if argument == "weight" else ", or several names."),
                    received=repr(names),
                    fix="Use 'label', for example.",
                )
            elif isinstance(known, list) and (strange := set(_listed(names)) - set(known)):
                problems.add(
                    f"`{argument}` must name columns of the dataset: {', '.join(known)}.",
                    received=", ".join(map(repr, sorted(strange))),
                    fix="Correct the name.",
                )
        if self.weight is not None and self.targets is None:
            problems.add(
                "`weight` needs `targets`.",
                received=f"weight={self.weight!r} without targets",
                fix="Name the targets, too.",
            )
        problems.raise_if_any(OptionError)

    def item(self, row: Any, *, is_batch: bool = False) -> Any:
        """An item as the inputs, or a tuple of these, targets and weight."""
        if not isinstance(row, Mapping):
            raise DataError(
                "lockstep.data.columns needs items that are dicts.",
                received=f"an item that is a {type(row).__name__}",
                fix="Pass the dataset as it is if its items are (input, target).",
            )

        def take(names: Names) -> Any:
            values = {name: _value(row, name, is_batch=is_batch) for name in _listed(names)}
            return values[names] if isinstance(names, str) else values

        chosen = (self.inputs, self.targets, self.weight)
        parts = tuple(take(names) for names in chosen if names is not None)
        return parts[0] if self.targets is None else parts


class _Items(Dataset[Any]):
    """A map-style dataset with chosen columns."""

    def __init__(self, dataset: Any, choice: _Choice) -> None:
        self.dataset = dataset
        self._choice = choice

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self._choice.item(self.dataset[index])

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if hasattr(self.dataset, "__getitems__"):
            rows = self.dataset.__getitems__(indices)
        else:
            rows = [self.dataset[index] for index in indices]
        return [self._choice.item(row) for row in rows]


class _Samples(IterableDataset[Any]):
    """An iterable dataset with chosen columns."""

    def __init__(self, dataset: Any, choice: _Choice) -> None:
        self.dataset = dataset
        self._choice = choice

    def __iter__(self) -> Iterator[Any]:
        return map(self._choice.item, self.dataset)


class _Batches:
    """A DataLoader's batches with chosen columns."""

    def __init__(self, loader: DataLoader[Any], choice: _Choice) -> None:
        self.loader = loader
        self._choice = choice

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield self._choice.item(batch, is_batch=True)

    def __len__(self) -> int:
        return len(self.loader)


def _listed(names: Names) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _are_names(names: object) -> bool:
    if isinstance(names, str):
        return bool(names)
    is_list = isinstance(names, tuple | list) and bool(names)
    return is_list and all(isinstance(name, str) and name for name in names)  # type: ignore[attr-defined]


def _value(row: Mapping[str, Any], name: str, *, is_batch: bool) -> Any:
    if name not in row:
        raise DataError(
            f"Every item must have a column {name!r}.",
            received=f"an item with {', '.join(map(repr, row))}",
            fix="Correct the name, or leave such items out.",
        )
    value = row[name]
    return value if is_batch else _as_tensor(value, name)


def _as_tensor(value: Any, name: str) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    try:
        return torch.tensor(np.asarray(value))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"Column {name!r} must hold numbers, of one shape within an item.",
            received=f"a {type(value).__name__}: {error}",
            fix="Turn it into numbers with dataset.map(...), texts with a tokenizer.",
        ) from error
