"""Accelerators whose host has a part of the training: the bits of one that has all of it."""

import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import OptionError
from tests.devices.found import ACCELERATORS, ranks_on_devices
from tests.parity.test_offload import ADAM, OPTIONS, check_same_bits, fit, make_trainer, state_of
from tests.thorough import core_of


def sharded(count: int = 1, **options: Any) -> lockstep.Strategy:
    return lockstep.FullyShardedStrategy(ranks_on_devices(count), engine="gloo", **options)


@pytest.mark.parametrize(
    ("name", "count", "level"),
    core_of(
        [
            (name, count, level)
            for name in OPTIONS
            for count, level in ((1, "parameters"), (2, "parameters"), (2, "slots"))
        ],
        [("clipping", 1, "parameters"), ("Adam", 2, "slots")],
        [("bf16", 2, "parameters"), ("averages", 1, "parameters")],
    ),
)
def test_slots_in_host_memory_have_the_same_bits(name: str, count: int, level: str) -> None:
    """Also in a second call of ``fit``."""
    found = []
    for offload in (None, "slots"):
        trainer = make_trainer(sharded(count, level=level, offload=offload), **OPTIONS[name])
        fit(trainer, epochs=1)
        fit(trainer, epochs=1)
        found.append(state_of(trainer))
    check_same_bits(found[1], found[0])


@pytest.mark.parametrize(("offload", "most"), [(None, 5.0), ("slots", 2.9), ("a directory", 2.9)])
def test_a_device_has_a_window_of_slots(offload: str | None, most: float, tmp_path: Path) -> None:
    """Peak of a training, in multiples of the parameters: they, gradients, slots, a window."""
    gc.collect()
    model = nn.Sequential(*(nn.Linear(1100, 1100) for _ in range(2)))
    place = str(tmp_path) if offload == "a directory" else offload
    options: dict[str, Any] = {"loss": nn.MSELoss(), "optimizer": ADAM}
    trainer = lockstep.Trainer(model, strategy=sharded(offload=place), **options)
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    values = torch.randn(8, 1100)
    trainer.fit((values, values), batch_size=4, verbose=0)
    num_bytes = sum(one.nbytes for one in model.parameters())
    peak = (torch.accelerator.max_memory_allocated() - before) / num_bytes
    assert most - 1 < peak < most


def test_trainings_resume_wherever_their_slots_are(tmp_path: Path) -> None:
    strategies = [
        lockstep.FullyShardedStrategy(["cpu", "cpu"]),
        sharded(2, offload="slots"),
        sharded(1, num_shares=2, offload="slots"),
        sharded(2),
    ]
    for epochs, strategy in enumerate(strategies, 1):
        trainer = make_trainer(strategy)
        fit(trainer, checkpoint=lockstep.Checkpoint(tmp_path), epochs=epochs)
    expected = make_trainer(sharded(2))
    fit(expected, epochs=len(strategies))
    check_same_bits(state_of(trainer), state_of(expected))


def test_an_optimizer_of_ones_own_is_refused() -> None:
    optimizer = partial(torch.optim.Muon, lr=1e-2)
    trainer = lockstep.Trainer(
        nn.Linear(12, 5, bias=False),
        loss=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        strategy=lockstep.FullyShardedStrategy(ACCELERATORS[:1], offload="slots"),
    )
    with pytest.raises(OptionError, match="treat each element separately"):
        fit(trainer)
