"""Sharded training on accelerators: what a rank keeps there, and what lies beside the weights.

The parity table has rows for whole trainings.
"""

import gc
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.errors import ModelError, NonFiniteLossError, WorkerError
from lockstep.parallel.sharding.units import unit_of_parameters
from tests.devices.found import ACCELERATORS, ranks_on_devices
from tests.faults.jobs import helpers_of
from tests.parity import test_partitioned_copies
from tests.parity.test_sharded import (
    ADAM,
    INPUTS,
    MODELS,
    TARGETS,
    Blocks,
    Later,
    Reader,
    UsesAView,
    matrices,
    mlp,
)
from tests.thorough import core_of

LEVELS = ("slots", "gradients", "parameters")


def sharded(level: str = "parameters", count: int = 2) -> lockstep.Strategy:
    if level == "replicas":
        devices = ranks_on_devices(4)
        return lockstep.HybridStrategy(2, shard=2, devices=devices, num_shares=4, engine="gloo")
    return lockstep.FullyShardedStrategy(ranks_on_devices(count), level=level, engine="gloo")


def mirrored(num_shares: int = 2) -> lockstep.MirroredStrategy:
    return lockstep.MirroredStrategy(ranks_on_devices(2), num_shares=num_shares, engine="gloo")


def make_trainer(
    strategy: Any, model: Callable[[], nn.Module] = mlp, **options: Any
) -> lockstep.Trainer:
    torch.manual_seed(0)
    loss = nn.CrossEntropyLoss()
    options = {"loss": loss, "optimizer": ADAM, "precision": "fp64", "seed": 3, **options}
    return lockstep.Trainer(model(), strategy=strategy, **options)


def fit(trainer: lockstep.Trainer, epochs: int = 2, **options: Any) -> dict[str, Tensor]:
    """The weights after ``fit``."""
    trainer.fit((INPUTS, TARGETS), batch_size=16, epochs=epochs, verbose=0, **options)
    return {name: value.cpu() for name, value in trainer.model.state_dict().items()}


def check_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-12)


# --- what lies beside the weights ----------------------------------------------------------------


class Unknown(torch.optim.SGD):
    """Rank 0 alone steps it, on whole Parameters."""


OPTIONS: dict[str, dict[str, Any]] = {
    "clipping, accumulation and averages": {
        "clip_norm": 0.1,
        "accumulate": 3,
        "average": lockstep.EMA(0.9),
    },
    "bf16": {"precision": "bf16"},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "Muon": {"optimizer": partial(torch.optim.Muon, lr=1e-2)},
    "Adafactor": {"optimizer": torch.optim.Adafactor},
    "unknown": {"optimizer": partial(Unknown, lr=0.1, momentum=0.9)},
}


@pytest.mark.parametrize(
    ("name", "level"),
    core_of(
        [(name, level) for name in OPTIONS for level in (*LEVELS, "replicas")],
        lambda name, level: level == "parameters" or (name, level) == ("Muon", "replicas"),
    ),
)
def test_two_calls_give_the_bits_of_replicas(name: str, level: str) -> None:
    options = {"precision": "fp32", **OPTIONS[name]}
    make_model = matrices if name == "Muon" else mlp
    found = []
    for strategy in (mirrored(4 if level == "replicas" else 2), sharded(level)):
        trainer = make_trainer(strategy, make_model, **options)
        fit(trainer, 1)
        weights = fit(trainer, 1)
        slots = trainer.optimizer.state_dict()["state"]
        weights |= {
            f"{number} {slot}": torch.as_tensor(value).cpu()
            for number, own in slots.items()
            for slot, value in own.items()
        }
        found.append(weights)
    assert found[0].keys() == found[1].keys()
    assert [name for name in found[0] if not torch.equal(found[0][name], found[1][name])] == []


@pytest.mark.exhaustive  # test_device_offload.py has one that moves between more
@pytest.mark.parametrize("level", LEVELS)
def test_a_training_moves_from_devices_to_cores_and_back(level: str, tmp_path: Path) -> None:
    expected = fit(make_trainer(lockstep.SingleDeviceStrategy("cpu")), 3)
    cores = lockstep.FullyShardedStrategy(["cpu", "cpu"])
    for epochs, strategy in enumerate((sharded(level), cores, sharded(level, 3)), 1):
        kept = lockstep.Checkpoint(tmp_path)
        found = fit(make_trainer(strategy), epochs, checkpoint=kept)
    check_close(found, expected)


def make_partitioned(count: int, level: str = "parameters") -> lockstep.Trainer:
    return test_partitioned_copies.make_trainer(ranks_on_devices(count), level, engine="gloo")


@pytest.mark.thorough
def test_a_device_reads_its_part_of_a_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint, data = lockstep.Checkpoint(tmp_path, every="1 steps"), (INPUTS, TARGETS)
    trainer = make_partitioned(3)
    trainer.fit(data, batch_size=24, verbose=0, checkpoint=checkpoint)
    shutil.rmtree(max(tmp_path.glob("generation-*")))  # that of the end
    resumed = make_partitioned(3)
    caplog.set_level("INFO", "lockstep")
    resumed.fit(data, batch_size=24, verbose=0, checkpoint=checkpoint)
    assert test_partitioned_copies.digest(resumed) == test_partitioned_copies.digest(trainer)
    read = test_partitioned_copies.bytes_read(caplog)
    assert trainer.plan is not None
    assert trainer.plan.sharding is not None
    units = unit_of_parameters(trainer.plan.sharding, trainer.model)
    sizes = {name: one.nbytes for name, one in trainer.model.named_parameters()}
    everywhere = sum(size for name, size in sizes.items() if units[name] is None)
    parameters = sum(sizes.values())
    assert sum(read) >= 3 * parameters  # with Adam's two slots
    assert max(read) <= parameters + everywhere + test_partitioned_copies.HEADERS
    trainer.save(tmp_path / "weights")
    again = make_partitioned(3)
    again.load(tmp_path / "weights")
    for name, value in again.model.state_dict().items():
        assert torch.equal(value, trainer.model.state_dict()[name]), name
    _, read = test_partitioned_copies.all_bytes_read(caplog)
    assert sum(read) >= parameters
    assert max(read) <= parameters / 3 + everywhere + test_partitioned_copies.HEADERS


@pytest.mark.exhaustive
def test_stages_on_devices_write_and_read_their_parts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> lockstep.Trainer:
        torch.manual_seed(0)
        layers = [nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5)]
        strategy = lockstep.HybridStrategy(
            data=2, pipe=2, cuts=["2"], microbatches=2, devices=ranks_on_devices(4), engine="gloo"
        )
        return lockstep.Trainer(
            nn.Sequential(*layers),
            loss=nn.CrossEntropyLoss(),
            optimizer=partial(torch.optim.Adam, lr=1e-2),
            strategy=strategy,
        )

    checkpoint, data = lockstep.Checkpoint(tmp_path, every="1 steps"), (INPUTS, TARGETS)
    trainer, resumed = make(), make()
    trainer.fit(data, batch_size=24, verbose=0, checkpoint=checkpoint)
    shutil.rmtree(max(tmp_path.glob("generation-*")))  # that of the end
    caplog.set_level("INFO", "lockstep")
    resumed.fit(data, batch_size=24, verbose=0, checkpoint=checkpoint)
    assert test_partitioned_copies.digest(resumed) == test_partitioned_copies.digest(trainer)
    read = test_partitioned_copies.bytes_read(caplog)
    sizes = [sum(one.nbytes for one in part.parameters()) for part in trainer.model.children()]
    largest = max(sum(sizes[:2]), sum(sizes[2:]))
    assert sum(read) >= 3 * sum(sizes)
    assert max(read) <= 2 * largest + test_partitioned_copies.HEADERS  # half of two slots


@pytest.mark.exhaustive
def test_a_damaged_part_is_seen_and_an_older_checkpoint_used(tmp_path: Path) -> None:
    test_partitioned_copies.check_an_older_one_is_used(tmp_path, make_partitioned)


def test_callbacks_see_and_change_whole_weights() -> None:
    sums = []
    for strategy in (mirrored(), sharded()):
        reader = Reader()
        fit(make_trainer(strategy, callbacks=[reader], precision="bf16"), 1)
        sums.append(reader.sums)
    assert sums[0] == sums[1]


# --- the memory of a rank ------------------------------------------------------------------------


class Measured(nn.Module):
    """Notes what this process holds on its device when a training pass begins."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))
        self.held: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.held.append(torch.accelerator.memory_allocated())
        for block in self.blocks:
            x = block(x).tanh()
        return x


# Parameters, gradients and slots, in multiples of the parameters' bytes. Buckets of sums stay.
HELD = {"slots": 1 + 2 + 1, "gradients": 1 + 0 + 1, "parameters": 0.5 + 0 + 1}


@pytest.mark.parametrize("level", LEVELS)
def test_between_steps_a_rank_has_its_part(level: str) -> None:
    gc.collect()
    layer = nn.Linear(256, 256, device=ACCELERATORS[0])  # a device may keep memory for products
    layer(torch.ones(8, 256, device=ACCELERATORS[0])).tanh().sum().backward()
    del layer
    model, before = Measured(), torch.accelerator.memory_allocated()
    trainer = make_trainer(sharded(level), lambda: model, loss=nn.MSELoss(), precision="fp32")
    values = torch.randn(64, 256)
    trainer.fit((values, values), batch_size=16, verbose=0)
    num_bytes = sum(one.nbytes for one in model.parameters())
    assert (model.held[-1] - before) / num_bytes == pytest.approx(HELD[level], abs=0.25)
    left = torch.accelerator.memory_allocated() - before
    assert left == pytest.approx(num_bytes, rel=0.05)


def in_one_storage() -> nn.Module:
    model = mlp().to(ACCELERATORS[0])
    flat = torch.cat([one.detach().flatten() for one in model.parameters()])
    parts = flat.split([one.numel() for one in model.parameters()])
    for parameter, part in zip(model.parameters(), parts, strict=True):
        parameter.data = part.view(parameter.shape)
    return model


def test_the_parameters_stay_the_same_objects() -> None:
    """On their device, and with memory, also if all of them were in one storage."""
    expected = fit(make_trainer(mirrored(), precision="fp32"))
    trainer = make_trainer(sharded(), in_one_storage, precision="fp32")
    before = list(trainer.model.parameters())
    found = fit(trainer)
    assert all(one is other for one, other in zip(trainer.model.parameters(), before, strict=True))
    assert all(str(one.device) == ACCELERATORS[0] for one in before)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# --- memory that is away -------------------------------------------------------------------------


@pytest.mark.parametrize("has_order", [True, False])
def test_a_read_of_what_is_away_is_an_error(has_order: bool) -> None:
    """In later steps the model uses another module's weight, or its blocks in another order."""
    with pytest.raises(ModelError, match="in another order than in its first step"):
        fit(make_trainer(sharded(), partial(Later, has_order)), 4)


@pytest.mark.parametrize(
    "model",
    core_of(
        [UsesAView, *(MODELS[name][0] for name in ("recomputed in backward", "LSTM"))], [UsesAView]
    ),
)
def test_what_is_read_has_been_gathered(model: Callable[[], nn.Module]) -> None:
    options = {"optimizer": partial(torch.optim.SGD, lr=0.1)}
    expected = fit(make_trainer(lockstep.SingleDeviceStrategy("cpu"), model, **options))
    check_close(fit(make_trainer(sharded(), model, **options)), expected)


def test_a_loss_that_is_not_finite_leaves_whole_weights() -> None:
    inputs = INPUTS.clone()
    inputs[40] = torch.nan
    good, bad = make_trainer(sharded()), make_trainer(sharded())
    good.fit((inputs[:32], TARGETS[:32]), batch_size=16, shuffle=False, verbose=0)
    with pytest.raises(NonFiniteLossError, match="inputs are not finite already"):
        bad.fit((inputs, TARGETS), batch_size=16, shuffle=False, verbose=0)
    for one, other in zip(bad.model.parameters(), good.model.parameters(), strict=True):
        assert torch.equal(one, other)


class Fails(Blocks):
    left = 9

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        assert self.left
        return super().forward(x)


def test_a_failure_leaves_whole_storages() -> None:
    """Other ranks' parts of the weights are lost with them, and are not taken for weights."""
    trainer = make_trainer(sharded(), Fails)
    with pytest.raises(AssertionError) as raised:
        fit(trainer, 4)
    assert "NaN here" in str(raised.value.__notes__)
    weight = trainer.model.blocks[1].weight.detach().cpu()  # type: ignore[union-attr,index]
    assert 0.4 < float(weight.isnan().double().mean()) < 0.6
    assert not (weight == 0).any()


class Killer(lockstep.Callback):
    """Kills a helper after a step."""

    has_killed = False

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if batch == 1 and not self.has_killed:
            self.has_killed = True
            os.kill(helpers_of(self.trainer)[0], signal.SIGKILL)


@pytest.mark.parametrize("level", core_of(LEVELS, ["parameters"]))
def test_training_goes_on_without_a_killed_rank(level: str) -> None:
    expected = fit(make_trainer(lockstep.SingleDeviceStrategy("cpu")))
    killer = Killer()
    check_close(fit(make_trainer(sharded(level), callbacks=[killer]), restarts=1), expected)
    assert killer.has_killed


@pytest.mark.thorough
def test_a_killed_rank_is_named() -> None:
    trainer = make_trainer(sharded(), callbacks=[Killer()])
    with pytest.raises(WorkerError, match=r"Rank 1 .* ended"):
        fit(trainer)
    assert all(one.untyped_storage().nbytes() >= one.nbytes for one in trainer.model.parameters())
