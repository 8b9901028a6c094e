"""Averages and master weights: kept piece by piece, whole for whoever asks."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lockstep
from lockstep.checkpoint.reading import read_checkpoint
from lockstep.errors import OptionError
from lockstep.strategies.base import Strategy
from tests.thorough import core_of
from tests.zoo import case

pytestmark = pytest.mark.thorough

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


@pytest.mark.parametrize("fits", core_of([1, 2], [2]))
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


class Rotating(nn.Module):
    """Its weight is complex."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex128))
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last((x.to(self.weight.dtype) @ self.weight).abs())
        return output


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_averages_of_complex_weights_are_complex(strategy: str) -> None:
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    y = x.argmax(1) % 3
    model, plain = Rotating(), Rotating().double()
    trainer = lockstep.Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        strategy=STRATEGIES[strategy](),
        precision="fp64",
        average=lockstep.EMA(0.8),
    )
    trainer.fit((x, y), batch_size=8, shuffle=False, verbose=0)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    theirs: dict[str, Tensor] = {}
    for batch, target in zip(x.split(8), y.split(8), strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(batch), target).backward()
        optimizer.step()
        theirs = {
            name: 0.8 * theirs.get(name, one) + 0.2 * one for name, one in state_of(plain).items()
        }
    with trainer.averaged():
        assert_close(state_of(model), theirs)


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


class Sums(nn.Module):
    """Its gradients do not depend on how old its weights are; one part has none after a while."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.early = nn.Linear(6, 1, bias=False), nn.Linear(6, 1, bias=False)
        self.num_passes = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.num_passes += 1
        out: Tensor = self.always(inputs)
        return out + self.early(inputs) if self.num_passes <= 5 else out


@pytest.mark.parametrize("replicas", [1, 2])
def test_servers_average_while_workers_do_not_wait(replicas: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs, model = torch.randn(40, 6, dtype=torch.float64), Sums().double()
    plain = copy.deepcopy(model)
    trainer = lockstep.Trainer(
        model,
        train_step=lambda model, batch: model(batch).mean(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        strategy=lockstep.ParameterServerStrategy(2, 1, staleness=2, replicas=replicas),
        precision="fp64",
        average=lockstep.EMA(0.8),
    )
    for checkpoint in (None, tmp_path):
        trainer.fit((inputs,), batch_size=4, shuffle=False, checkpoint=checkpoint, verbose=0)
    theirs = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in inputs.split(4) * 2:
        optimizer.zero_grad()
        plain(batch).mean().backward()
        optimizer.step()
        theirs.update_parameters(plain)
    own, written = trainer.state_dict()["averages"], read_checkpoint(tmp_path).tree()["averages"]
    assert own["num_updates"] == written["num_updates"] == 20
    assert_close(written["weights"], own["weights"])
    with trainer.averaged():
        assert_close(state_of(model), state_of(theirs.module))


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


@pytest.mark.parametrize("strategy", ["single", "mirrored-2"])
def test_what_thaws_is_averaged_from_its_first_update_on(strategy: str) -> None:
    one = case("mlp")
    model = one.make_model()
    frozen = next(model.parameters())
    frozen.requires_grad_(False)
    trainer = lockstep.Trainer(
        model,
        loss=one.loss,
        optimizer=partial(torch.optim.SGD, lr=1e-3),
        strategy=STRATEGIES[strategy](),
        precision="fp64",
        average=lockstep.EMA(0.9),
    )
    data = (one.inputs, one.targets)
    trainer.fit(data, batch_size=one.batch_size, verbose=0)
    frozen.requires_grad_(True)
    trainer.fit(data, batch_size=len(one.targets), verbose=0)
    trained = frozen.detach().clone()
    with trainer.averaged():
        assert frozen.equal(trained)


@pytest.mark.parametrize("strategy", ["single", "mirrored-2"])
def test_the_average_of_what_is_frozen_rests(strategy: str) -> None:
    trainer, averaged = train_averaged(STRATEGIES[strategy](), 1)
    one = case("mlp")
    name, frozen = next(trainer.model.named_parameters())
    frozen.requires_grad_(False)
    trainer.fit((one.inputs, one.targets), batch_size=one.batch_size, shuffle=False, verbose=0)
    with trainer.averaged():
        assert frozen.equal(averaged[name])


def test_what_would_be_lost_is_refused(tmp_path: Path) -> None:
    trainer, _ = train_averaged(lockstep.SingleDeviceStrategy(), 1)
    trainer.save(tmp_path / "weights.safetensors")
    one = case("mlp")
    with trainer.averaged():
        with pytest.raises(OptionError, match=r"Within averaged\(\).*fit"):
            trainer.fit((one.inputs, one.targets), verbose=0)
        with pytest.raises(OptionError, match=r"Within averaged\(\).*load"):
            trainer.load(tmp_path / "weights.safetensors")


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


@pytest.mark.thorough
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
    averages = trainer._runner.update_config.averages
    assert averages is not None
    assert {value.dtype for value in averages.by_name.values()} == {torch.float32}
    with trainer.averaged():
        averaged = state_of(trainer.model)
    assert not averaged["0.weight"].equal(trainer.model.state_dict()["0.weight"])


class SetHalf(lockstep.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 3:  # one more epoch follows, at a rate of nothing
            self.trainer.optimizer.param_groups[0].update(lr=0.0)
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.fill_(0.5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_that_a_callback_sets_win_over_their_copies(strategy: str) -> None:
    trainer = train_low(STRATEGIES[strategy](), callbacks=[SetHalf()])
    assert all(bool((one == 0.5).all()) for one in trainer.model.parameters())


def test_a_schedule_by_step_reaches_copies_on_any_number_of_devices() -> None:
    stop = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.0)
    found = [
        state_of(
            train_low(
                lockstep.MirroredStrategy(devices, num_shares=2),
                schedule=lockstep.Schedule(stop, every="step"),
            ).model
        )
        for devices in (1, 2)
    ]
    assert all(value.equal(found[1][name]) for name, value in found[0].items())
    other = state_of(train_low(lockstep.MirroredStrategy(1, num_shares=2)).model)
    assert not other["0.weight"].equal(found[0]["0.weight"])


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
