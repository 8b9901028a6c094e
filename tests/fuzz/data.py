"""Data of a case, in the form that a user would have it."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tests.fuzz.cases import STREAMS, Case
from tests.fuzz.layers import LENGTH, VOCABULARY
from tests.fuzz.losses import LOSSES, targets_of
from tests.fuzz.nets import NUM_CLASSES, inputs_of
from tests.fuzz.plain import Batch

NAMES = ("first", "second")


class Data:
    """Inputs, targets and weights of all samples."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(case.seed)
        self.case = case
        self.inputs = inputs_of(case.shape, case.count, generator)
        has_words = case.shape.per_token and case.shape.ties and case.shape.entry in TIED
        classes = VOCABULARY if has_words else NUM_CLASSES
        kind = LOSSES[case.loss].target
        targets = targets_of(kind, case.count, classes, LENGTH, generator)
        self.targets: Any = targets
        if case.shape.heads == 2:
            other = targets_of("values", case.count, NUM_CLASSES, LENGTH, generator)
            self.targets = {"main": targets, "other": other}
        self.weights = None
        if case.weighted:
            self.weights = torch.randint(0, 3, (case.count,), generator=generator).double()
            if case.shuffle:  # in every batch something counts
                self.weights += 1
            self.weights[:: case.batch_size] = 1.0

    def batch(self, rows: Any) -> Batch:
        """Some samples, for the plain loop."""
        weights = None if self.weights is None else self.weights[rows]
        return tuple(one[rows] for one in self.inputs), taken(self.targets, rows), weights

    def batches(self, order: Tensor | None = None) -> list[Batch]:
        order = torch.arange(self.case.count) if order is None else order
        return [self.batch(rows) for rows in order.split(self.case.batch_size)]

    def given(self, form: str) -> Any:
        """What a user gives to ``fit``."""
        match form:
            case "tensors":
                return self.item(slice(None))
            case "numpy":
                return _mapped(self.item(slice(None)), lambda one: one.numpy())
            case "dataset":
                return Samples(self.item(slice(None)), self.case.count)
            case "loader":
                samples = Samples(self.item(slice(None)), self.case.count)
                return DataLoader(samples, batch_size=self.case.batch_size)
            case "function":
                return self._walk
            case "batches":
                return Batches(list(self._walk()))
            case _:
                return self._walk()

    def given_inputs(self) -> Any:
        """What a user gives to ``predict``."""
        if self.case.own == "model":
            return dict(zip(NAMES, self.inputs, strict=False))
        return self._inputs(slice(None))

    def item(self, rows: Any) -> Any:
        """Some samples, as the user has them."""
        if self.case.own == "model":
            return {**self._inputs(rows), "labels": taken(self.targets, rows)}
        whole = (self._inputs(rows), taken(self.targets, rows))
        return whole if self.weights is None else (*whole, self.weights[rows])

    def _inputs(self, rows: Any) -> Any:
        own = tuple(one[rows] for one in self.inputs)
        if self.case.keyed:
            return dict(zip(NAMES, own, strict=False))
        return own if len(own) > 1 else own[0]

    def _walk(self) -> Iterator[Any]:
        for rows in torch.arange(self.case.count).split(self.case.batch_size):
            yield self.item(rows)

    @property
    def options(self) -> dict[str, Any]:
        """Of ``fit``, that go with the form."""
        if self.case.form in STREAMS:
            return {}
        return {"batch_size": self.case.batch_size, "shuffle": self.case.shuffle}


TIED = ("tokens", "tokens, padded", "tokens, sparse")


class Batches:
    """Batches that can be gone through as often as is wanted."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Samples(Dataset[Any]):
    """A map-style dataset over tensors."""

    def __init__(self, whole: Any, count: int) -> None:
        self.whole, self.count = whole, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return taken(self.whole, index)


def taken(tree: Any, rows: Any) -> Any:
    return _mapped(tree, lambda one: one[rows])


def _mapped(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    if isinstance(tree, dict):
        return {name: _mapped(one, change) for name, one in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_mapped(one, change) for one in tree)
    return change(tree)
