"""Averages and master weights: kept piece by piece, whole for whoever asks."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lockstep
from lockstep.errors import OptionError
from lockstep.strategies.base import Strategy
from tests.zoo import case

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "single": lockstep.SingleDeviceStrategy,
    "mirrored-2": partial(lockstep.MirroredStrategy, 2),
    "mirrored-3": partial(lockstep.MirroredStrategy, 3),
    "pipeline-2": partial(lockstep.PipelineStrategy, 2, microbatches=2),
}


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def train_averaged(strategy: Strategy, fits: int) -> tuple[lockstep.Trainer, dict[str, Tensor]]:
    one = case("mlp")
    model = one.make_model()
    trainer = lockstep.Trainer(
        model,
        loss=one.loss,
        optimizer=one.optimizer,
        strategy=strategy,
        precision="fp64",
        average=lockstep.EMA(0.8),
    )
    for _ in range(fits):
        trainer.fit((one.inputs, one.targets), batch_size=one.batch_size, shuffle=False, verbose=0)
    with trainer.averaged():
        averaged = state_of(model)
    return trainer, averaged


def torchs_average(fits: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    one = case("mlp")
    model = one.make_model().double()
    optimizer = one.optimizer(model.parameters())
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    assert isinstance(one.inputs, Tensor)
    for _ in range(fits):
        for start in range(0, len(one.inputs), one.batch_size):
            rows = slice(start, start + one.batch_size)
            optimizer.zero_grad()
            one.loss(model(one.inputs[rows]), one.targets[rows]).backward()
            optimizer.step()
            averaged.update_parameters(model)
    return state_of(averaged.module), state_of(model)


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    scale = torch.cat([value.flatten() for value in theirs.values()]).norm()
    for name, value in theirs.items():
        difference = (ours[name] - value).norm()
        assert difference <= 1e-12 * max(value.norm(), scale), name


@pytest.mark.parametrize("fits", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_averages_are_those_of_torch(strategy: str, fits: int, tmp_path: Path) -> None:
    trainer, averaged = train_averaged(STRATEGIES[strategy](), fits)
    theirs, last = torchs_average(fits)
    assert_close(averaged, theirs)
    assert_close(state_of(trainer.model), last)  # the trained weights are back
    with trainer.averaged():
        trainer.save(tmp_path / "averaged.safetensors")
    trainer.load(tmp_path / "averaged.safetensors")
    assert_close(state_of(trainer.model), theirs)


def test_averages_go_from_one_strategy_to_the_next() -> None:
    one = case("mlp")
    model = one.make_model()
    trainer = lockstep.Trainer(
        model,
        loss=one.loss,
        optimizer=one.optimizer,
        precision="fp64",
        average=lockstep.EMA(0.8),
    )
    for strategy in ("mirrored-3", "single"):
        trainer.strategy = STRATEGIES[strategy]()
        trainer.fit((one.inputs, one.targets), batch_size=one.batch_size, shuffle=False, verbose=0)
    with trainer.averaged():
        averaged = state_of(model)
    assert_close(averaged, torchs_average(2)[0])


def test_averages_are_asked_for_first() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(OptionError, match="average=None"), lockstep.Trainer(model).averaged():
        pass
    trainer = lockstep.Trainer(model, average=lockstep.EMA())
    with pytest.raises(OptionError, match="no update yet"), trainer.averaged():
        pass
    with pytest.raises(OptionError, match=r"must be a lockstep\.EMA"):
        lockstep.Trainer(model, average=0.9)  # type: ignore[arg-type]
    for decay in (1, -0.1, "slow", True):
        with pytest.raises(OptionError, match="from 0 to below 1"):
            lockstep.EMA(decay)  # type: ignore[arg-type]


# --- bfloat16 with float32 copies ----------------------------------------------------------------

X = torch.randn(64, 12, generator=torch.Generator().manual_seed(4))
Y = X[:, 0] * 2 - X[:, 3]


def train_low(strategy: Strategy, *, fits: int = 1, **options: Any) -> lockstep.Trainer:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 1), nn.Flatten(0))
    trainer = lockstep.Trainer(
        model,
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
        strategy=strategy,
        precision="bf16",
        **options,
    )
    for _ in range(fits):
        trainer.fit((X, Y), batch_size=16, epochs=5, shuffle=False, verbose=0)
    return trainer


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_small_updates_are_not_lost(strategy: str) -> None:
    trainer = train_low(STRATEGIES[strategy](), fits=2)
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.bfloat16}
    losses = [trainer.evaluate((X, Y), batch_size=16)["loss"]]
    trainer.fit((X, Y), batch_size=16, epochs=20, verbose=0)
    losses.append(trainer.evaluate((X, Y), batch_size=16)["loss"])
    assert losses[1] < 0.9 * losses[0]


def test_masters_are_kept_from_fit_to_fit() -> None:
    """Ten epochs in two calls are ten epochs in one, to the bit."""
    strategy = lockstep.MirroredStrategy(2)
    torch.manual_seed(1)
    twice = train_low(strategy, fits=2)
    once = train_low(strategy, fits=0)
    once.fit((X, Y), batch_size=16, epochs=10, shuffle=False, verbose=0)
    for own, other in zip(twice.model.parameters(), once.model.parameters(), strict=True):
        assert own.equal(other)


def test_bits_of_bfloat16_are_those_of_any_number_of_devices() -> None:
    found = [
        state_of(train_low(lockstep.MirroredStrategy(devices, num_shares=3)).model)
        for devices in (1, 2, 3)
    ]
    for other in found[1:]:
        assert all(value.equal(other[name]) for name, value in found[0].items())


def test_weights_that_are_set_win_over_their_copies(tmp_path: Path) -> None:
    trainer = train_low(lockstep.MirroredStrategy(2))
    first = state_of(trainer.model)
    trainer.save(tmp_path / "weights.safetensors")
    trainer.fit((X, Y), batch_size=16, epochs=2, verbose=0)
    trainer.load(tmp_path / "weights.safetensors")
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.0
    trainer.fit((X, Y), batch_size=16, verbose=0)
    assert all(value.equal(first[name]) for name, value in trainer.model.state_dict().items())


def test_averages_of_masters_are_in_float32() -> None:
    trainer = train_low(lockstep.MirroredStrategy(2), average=lockstep.EMA(0.9))
    averages = trainer._recipe.averages
    assert averages is not None
    assert {value.dtype for value in averages.by_name.values()} == {torch.float32}
    with trainer.averaged():
        averaged = state_of(trainer.model)
    assert not averaged["0.weight"].equal(trainer.model.state_dict()["0.weight"])


class Mine(torch.optim.SGD):
    """Nobody knows what it does."""


def test_bfloat16_needs_an_optimizer_that_is_known() -> None:
    trainer = lockstep.Trainer(
        nn.Linear(12, 1),
        loss=nn.MSELoss(),
        optimizer=partial(Mine, lr=0.1),
        precision="bf16",
    )
    with pytest.raises(OptionError, match=r'precision="bf16".*one of torch\.optim'):
        trainer.fit((X, Y[:, None]), verbose=0)
