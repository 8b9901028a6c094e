"""Loaders left over from scripts with a process per device would train on a part of the data."""

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
)
from torch.utils.data.distributed import DistributedSampler

import lockstep
from lockstep.data.distributed_samplers import check_whole
from lockstep.errors import DataError

ROWS = TensorDataset(torch.rand(12, 4), torch.rand(12, 2))
HALF: Sampler[int] = DistributedSampler(ROWS, num_replicas=2, rank=0)


class OwnBatches:
    """A batch sampler that is nothing of torch's."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._rank = 0

    def __iter__(self) -> Iterator[list[int]]:
        yield [0, 1]


class SeveralTasks(Sampler[int]):
    """Takes turns between samplers."""

    def __init__(self) -> None:
        self.samplers = {"one": RandomSampler(ROWS), "other": HALF}

    def __iter__(self) -> Iterator[int]:
        return iter(self.samplers["one"])


class Sharded(IterableDataset[Any]):
    """Gives every ``num_processes``-th sample, as Accelerate's does."""

    def __init__(self, num_processes: int) -> None:
        self.num_processes = num_processes
        self.process_index = 0

    def __iter__(self) -> Iterator[Any]:
        return iter([ROWS[index] for index in range(0, len(ROWS), self.num_processes)])


def by_node() -> Any:
    """As Hugging Face's ``split_dataset_by_node`` leaves a dataset."""
    rows = Sharded(1)
    rows._distributed = SimpleNamespace(rank=0, world_size=2)  # type: ignore[attr-defined]
    return rows


def loader(**options: Any) -> Any:
    return DataLoader(ROWS, **options)


DIVIDED: dict[str, Callable[[], Any]] = {
    "a sampler": partial(loader, batch_size=4, sampler=HALF),
    "in torch's BatchSampler": partial(loader, batch_sampler=BatchSampler(HALF, 4, False)),
    "a batch sampler of one's own": partial(loader, batch_sampler=OwnBatches(2)),
    "one of several samplers": partial(loader, batch_size=4, sampler=SeveralTasks()),
    "by columns": lambda: lockstep.data.columns(loader(sampler=HALF), inputs="x", targets="y"),
    "a wrapped loader": lambda: SimpleNamespace(base_dataloader=loader(sampler=HALF)),
    "an iterable dataset": lambda: Sharded(2),
    "in a loader": lambda: DataLoader(Sharded(3), batch_size=4),
    "Hugging Face's": by_node,
}
WHOLE: dict[str, Callable[[], Any]] = {
    "no sampler": partial(loader, batch_size=4),
    "for one process": partial(
        loader, sampler=DistributedSampler(ROWS, num_replicas=1, rank=0), batch_size=4
    ),
    "for one process, its own": partial(loader, batch_sampler=OwnBatches(1)),
    "an iterable dataset": lambda: Sharded(1),
    "worker processes": lambda: SimpleNamespace(dataset=SimpleNamespace(num_processes=8)),
}


@pytest.mark.parametrize("name", DIVIDED)
def test_what_divides_the_data_is_found(name: str) -> None:
    with pytest.raises(DataError, match=r"`x` must give all samples.*one process of [23].*Leave"):
        check_whole(DIVIDED[name](), "x")


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_whole_is_not(name: str) -> None:
    check_whole(WHOLE[name](), "x")


def test_a_dataset_that_holds_itself_is_looked_at_once() -> None:
    rows = Sharded(1)
    rows.dataset = rows  # type: ignore[attr-defined]
    check_whole(rows, "x")


CALLS: dict[str, Callable[[lockstep.Trainer, Any], Any]] = {
    "data": lambda trainer, data: trainer.fit(data, verbose=0),
    "validation_data": lambda trainer, data: trainer.fit(ROWS, validation_data=data, verbose=0),
    "data of evaluate": lambda trainer, data: trainer.evaluate(data),
    "inputs": lambda trainer, data: trainer.predict(data),
}


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("name", CALLS)
def test_every_call_refuses_a_distributed_sampler(name: str, devices: int) -> None:
    model = nn.Linear(4, 2)
    before = model.weight.clone()
    trainer = lockstep.Trainer(
        model,
        loss=nn.MSELoss(),
        optimizer=torch.optim.SGD,
        strategy=lockstep.MirroredStrategy(devices),
    )
    with pytest.raises(DataError, match=f"`{name.split()[0]}` must give all samples.*Distributed"):
        CALLS[name](trainer, loader(batch_size=4, sampler=HALF))
    assert torch.equal(model.weight, before)
