"""Hosts compare the data that each of them reads: its form, and values, as many as take no time."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.data.map_style.sources import Source, as_source
from lockstep.errors import DataError, HostError
from lockstep.train.input import same_data
from lockstep.train.input.same_data import check_same_data
from lockstep.train.multihost.hosts import Hosts
from tests.control_groups import address, together
from tests.map_datasets import AsRead, Rows
from tests.parallel.test_failing_together import enter

X, Y, W = torch.randn(50, 4), torch.arange(50), torch.ones(50)


@pytest.fixture
def hosts() -> Iterator[list[Hosts]]:
    where = address()
    met = together(lambda: enter(0, where), lambda: enter(1, where))
    yield met
    for each in met:
        each.close()


def compared(hosts: list[Hosts], left: Source | None, right: Source | None) -> list[Any]:
    """What the comparison raises on both hosts; None where it finds nothing."""
    return together(
        lambda: check_same_data(hosts[0], left, "data"),
        lambda: check_same_data(hosts[1], right, "data"),
    )


def changed(tensor: Tensor, place: Any, value: float = 7.0) -> Tensor:
    copy = tensor.clone()
    copy[place] = value
    return copy


class Counted(Rows):
    """Knows how often each sample was read."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.reads: Counter[int] = Counter()

    def __getitem__(self, index: int) -> Any:
        self.reads[index] += 1
        return super().__getitem__(index)


class Ragged(Rows):
    """Samples of different lengths."""

    def __getitem__(self, index: int) -> Any:
        row, target = super().__getitem__(index)
        return row[: 1 + index % 4], target


DIFFERENCES: dict[str, tuple[Any, Any, str]] = {
    "kind": ((X, Y), Rows(X, Y), "the kind of data. Received: arrays on"),
    "number": ((X, Y), (X[1:], Y[1:]), "the number of samples of data. Received: 50 on"),
    "inputs": (
        (X, Y),
        (X[:, :3], Y),
        "the form of inputs of data. Received: float32 of shape (4,)",
    ),
    "type": ((X, Y), (X, Y.int()), "the form of targets of data. Received: int64 of shape ()"),
    "weight": ((X, Y, W), (X, Y), "the form of sample_weight of data. Received: float32"),
    "names": (
        ({"a": X, "b": X}, Y),
        ({"a": X, "c": X}, Y),
        "the form of inputs['b'] of data. Received: float32 of shape (4,) on",
    ),
    "one number": ((X, Y), (changed(X, (31, 2)), Y), "the values of inputs of data."),
    "one target": ((X, Y), (X, changed(Y, 31)), "the values of targets of data."),
    "one weight": ((X, Y, W), (X, Y, changed(W, 31)), "the values of sample_weight of data."),
    "a sample": (Rows(X, Y), Rows(X, changed(Y, 0)), "targets of data, samples 0, 6, 12, 18, 24"),
    "order": (Rows(X, Y), Rows(X.flip(0), Y.flip(0)), "the values of inputs of data, samples"),
    "type of samples": (
        Rows(X, Y),
        Rows(X.double(), Y),
        "the form of inputs of data, samples 0, 6, 12, 18, 24 and 4 more. Received: float32",
    ),
    "every sample of few": (Rows(X, Y), Rows(X, changed(Y, 31)), "the values of targets of data"),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_what_differs_is_named_on_both_hosts(
    name: str, hosts: list[Hosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(same_data, "LONGEST_SECONDS", float("inf"))
    left, right, expected = DIFFERENCES[name]
    errors = compared(hosts, as_source(left), as_source(right))
    for error in errors:
        assert isinstance(error, HostError), errors
        assert expected in str(error)


ALIKE: dict[str, Any] = {
    "nothing": None,
    "arrays": (X, Y, W),
    "no samples": (X[:0], Y[:0]),
    "arrays that are not dense": (X.t().contiguous().t(), Y[::1], W.expand(50)),
    "reversed and mapped": (X.numpy()[::-1], np.arange(50)[::-1]),
    "a dataset": Rows(X, Y),
    "samples of different shapes": Ragged(X, Y),
}


@pytest.mark.parametrize("whole_bytes", [0, 1 << 20])
@pytest.mark.parametrize("name", ALIKE)
def test_what_is_the_same_passes(
    name: str, whole_bytes: int, hosts: list[Hosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(same_data, "WHOLE_BYTES", whole_bytes)
    data = None if ALIKE[name] is None else as_source(ALIKE[name])
    assert compared(hosts, data, data) == [None, None]


def test_of_large_arrays_many_samples_are_compared(
    hosts: list[Hosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(same_data, "WHOLE_BYTES", 0)
    monkeypatch.setattr(same_data, "LONGEST_SECONDS", float("inf"))
    large = torch.zeros(100_000, 2)
    one = 99_999 * 301 // 512
    errors = compared(
        hosts, as_source((large, large)), as_source((large, changed(large, (one, 1))))
    )
    for error in errors:
        assert isinstance(error, HostError)
        assert "the values of targets of data, samples " in str(error)


@pytest.mark.parametrize(
    ("num_samples", "longest", "expected"),
    [(3000, float("inf"), 513), (50, float("inf"), 50), (5, float("inf"), 5), (3000, -1.0, 9)],
)
def test_few_samples_are_read_and_each_once(
    num_samples: int,
    longest: float,
    expected: int,
    hosts: list[Hosts],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(same_data, "LONGEST_SECONDS", longest)
    rows = [Counted(torch.zeros(num_samples, 2), torch.zeros(num_samples)) for _ in range(2)]
    assert compared(hosts, *map(as_source, rows)) == [None, None]
    for each in rows:
        assert set(each.reads.values()) == {1}
        assert len(each.reads) == expected
        assert {0, num_samples - 1} <= set(each.reads)


def test_the_slowest_host_says_when_it_is_enough(hosts: list[Hosts]) -> None:
    seconds = 2 * same_data.LONGEST_SECONDS / 9
    fast, slow = Counted(X, Y), Counted(X, Y, seconds=seconds)
    assert compared(hosts, as_source(fast), as_source(slow)) == [None, None]
    assert len(fast.reads) == len(slow.reads) == 9


def test_a_sample_that_cannot_be_read_is_an_error_of_its_host(hosts: list[Hosts]) -> None:
    def bad() -> None:
        with hosts[1].failing_together():
            check_same_data(hosts[1], as_source(Rows(X, Y, bad=49)), "data")

    def good() -> None:
        with hosts[0].failing_together():
            check_same_data(hosts[0], as_source(Rows(X, Y)), "data")

    told, own = together(good, bad)
    assert isinstance(own, DataError)
    assert isinstance(own.__cause__, AsRead)
    assert isinstance(told, DataError)
    assert "Sample 49 of the dataset (Rows) cannot be read" in str(told)
