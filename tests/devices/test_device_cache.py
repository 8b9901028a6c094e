"""Samples that a cache keeps on the device: the batches of the host, and nothing read twice."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lockstep
from lockstep.data import cache, prefetch
from lockstep.data.map_style.sources import as_input_source, as_source
from lockstep.data.records import device_samples
from lockstep.data.records.device_samples import DeviceSamples, kept_on
from lockstep.data.records.sample_cache import Cache
from lockstep.data.trees import tensors_of
from lockstep.errors import BadRecordError, OptionError
from lockstep.parallel.data_parallel.staging import moved
from tests.devices.found import ACCELERATORS, ranks_on_devices
from tests.map_datasets import Listed, Rows

DEVICE = torch.device(ACCELERATORS[0] if ACCELERATORS else "cpu")
INPUTS = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))
TARGETS = torch.arange(20) % 3

SAMPLES: dict[str, Callable[[int], Any]] = {
    "tensors": lambda n: (INPUTS[n], TARGETS[n]),
    "numbers and weights": lambda n: (INPUTS[n].double(), n % 3, n / 7),
    "arrays": lambda n: (np.full((2, 3), n, "float16"), np.int32(n)),
    "several inputs": lambda n: ((INPUTS[n], torch.tensor(n > 4)), [TARGETS[n], INPUTS[n, 0]]),
    "names": lambda n: {"x": INPUTS[n], "mask": torch.ones(2, dtype=torch.bool)},
}


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, None], ids=str)
def test_batches_are_those_of_the_host(
    name: str, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_samples, "_NUM_ROWS", 7)
    cached = cache(Listed([SAMPLES[name](n) for n in range(20)]), device=True)
    for make in (as_source, as_input_source):
        source = make(cached)
        there = kept_on(DEVICE, source)
        assert isinstance(there, DeviceSamples)
        for indices in (torch.tensor([3, 0, 19]), torch.arange(20), torch.tensor([5])):
            expected = moved(source.read(indices, dtype), DEVICE)
            found = there.read(indices, dtype)
            parts = [(one.inputs, one.targets, one.sample_weight) for one in (expected, found)]
            assert found.num_samples == len(indices)
            for one, other in zip(*map(tensors_of, parts), strict=True):
                assert (one.dtype, one.device) == (other.dtype, other.device)
                assert torch.equal(one, other)


class Counting(lockstep.Callback):
    """How many samples this process has read from caches, at the end of each epoch."""

    def __init__(self, read: Sequence[int] = ()) -> None:
        self.read = read
        self.counts: list[int] = []

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        self.counts.append(len(self.read))


def trained(
    data: Any, strategy: Any, counting: Counting | None = None
) -> tuple[list[torch.Tensor], float]:
    """Weights and predictions, and the loss of an evaluation."""
    torch.manual_seed(0)
    trainer = lockstep.Trainer(
        nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3)),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=0.01),
        strategy=strategy,
        callbacks=[counting or Counting()],
    )
    trainer.fit(data, batch_size=8, epochs=3, validation_data=data, verbose=0)
    loss = trainer.evaluate(data, batch_size=8)["loss"]
    return [*(one.cpu() for one in trainer.model.parameters()), trainer.predict(data).cpu()], loss


@pytest.mark.thorough
@pytest.mark.parametrize("count", [1, 2])
def test_training_is_the_same_and_reads_nothing_later(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    plain = Cache.__getitems__

    def noted(self: Cache, indices: Sequence[int]) -> list[Any]:
        read.extend(indices)
        return plain(self, indices)

    strategy = lockstep.MirroredStrategy(ranks_on_devices(count), engine="gloo")
    expected, loss = trained(cache(Rows(INPUTS, TARGETS)), strategy)
    monkeypatch.setattr(Cache, "__getitems__", noted)
    counting = Counting(read)
    found, found_loss = trained(
        prefetch(cache(Rows(INPUTS, TARGETS), device=True)), strategy, counting
    )
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)
    assert found_loss == loss
    assert counting.counts[0] >= len(INPUTS)
    assert counting.counts == counting.counts[:1] * 3


def test_a_sample_that_cannot_be_read_is_named() -> None:
    data = cache(Rows(INPUTS, TARGETS, bad=13), device=True)
    with pytest.raises(BadRecordError, match="Sample 13"):
        trained(data, lockstep.SingleDeviceStrategy(str(DEVICE)))


def test_on_cores_nothing_is_kept() -> None:
    source = as_source(cache(Rows(INPUTS, TARGETS), device=True))
    assert kept_on(torch.device("cpu"), source) is source


def test_device_is_a_choice() -> None:
    with pytest.raises(OptionError, match="`device` must be True or False"):
        cache(Rows(INPUTS, TARGETS), device="cuda")  # type: ignore[arg-type]
