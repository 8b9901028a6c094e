"""Schedules: when they step, what they look at, what is in the logs, and what is refused."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn, optim
from torch.optim import lr_scheduler

import lockstep
from lockstep import errors
from lockstep.train.optim.learning_rates import RunningSchedule, make_schedule
from lockstep.train.runtime.shared_options import SharedOptions, options_spec

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 3, (40,), generator=torch.Generator().manual_seed(1))
SGD = partial(optim.SGD, lr=0.1)
STEP = partial(lr_scheduler.StepLR, step_size=1, gamma=0.5)
ONE_CYCLE = partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=20)
PLATEAU = partial(lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.1)


def make_trainer(schedule: Any, devices: int = 1, **options: Any) -> lockstep.Trainer:
    torch.manual_seed(5)
    given: dict[str, Any] = {"loss": nn.CrossEntropyLoss(), "optimizer": SGD, **options}
    model = given.pop("model", None) or nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    strategy = lockstep.MirroredStrategy(devices)
    return lockstep.Trainer(model, schedule=schedule, strategy=strategy, **given)


def fit(trainer: lockstep.Trainer, **options: Any) -> dict[str, list[Any]]:
    data = options.pop("data", (X, Y))
    return trainer.fit(data, **{"batch_size": 8, "verbose": 0, **options}).history


def running(trainer: lockstep.Trainer) -> RunningSchedule:
    assert trainer.schedule is not None
    return trainer.schedule


# --- when ---------------------------------------------------------------------------------------

EVERY: dict[str, tuple[Any, str]] = {
    "a class with its options": (STEP, "epoch"),
    "OneCycleLR": (ONE_CYCLE, "step"),
    "CyclicLR": (partial(lr_scheduler.CyclicLR, base_lr=0.1, max_lr=0.2), "step"),
    "ReduceLROnPlateau": (PLATEAU, "epoch"),
    "a class alone": (lr_scheduler.ConstantLR, "epoch"),
    "steps on demand": (lockstep.Schedule(STEP, every="step"), "step"),
    "epochs on demand": (lockstep.Schedule(ONE_CYCLE, every="epoch"), "epoch"),
}


@pytest.mark.parametrize("name", EVERY)
def test_each_scheduler_steps_when_it_is_made_to(name: str) -> None:
    schedule, every = EVERY[name]
    assert running(make_trainer(schedule)).every == every


@pytest.mark.parametrize("devices", [1, 2])
def test_logs_have_the_rate_of_the_epochs_last_update(devices: int) -> None:
    assert fit(make_trainer(STEP, devices), epochs=3)["lr"] == [0.1, 0.05, 0.025]
    by_step = fit(make_trainer(lockstep.Schedule(STEP, every="step"), devices), epochs=2)
    assert by_step["lr"] == pytest.approx([0.1 / 2**4, 0.1 / 2**9], rel=1e-15)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_second_fit_goes_on(devices: int) -> None:
    trainer = make_trainer(STEP, devices)
    assert [*fit(trainer, epochs=2)["lr"], *fit(trainer)["lr"]] == [0.1, 0.05, 0.025]
    assert running(trainer).scheduler.state_dict()["last_epoch"] == 3


@pytest.mark.parametrize("devices", [1, 2])
def test_a_scheduler_over_the_optimizer_given_is_stepped_itself(devices: int) -> None:
    model = nn.Linear(4, 3)
    optimizer = SGD(model.parameters())
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    trainer = make_trainer(scheduler, devices, model=model, optimizer=optimizer)
    fit(trainer, epochs=2)
    assert scheduler.last_epoch == 2
    assert running(trainer).scheduler is scheduler
    assert optimizer.param_groups[0]["lr"] == 0.025


@pytest.mark.parametrize("devices", [1, 2])
def test_a_batch_that_makes_no_update_moves_no_schedule(devices: int) -> None:
    ignored = Y.clone()
    ignored[8:24] = -100  # the second and third of five batches
    trainer = make_trainer(lockstep.Schedule(STEP, every="step"), devices)
    assert fit(trainer, data=(X, ignored), shuffle=False)["lr"] == [0.1 / 2**2]
    assert running(trainer).scheduler.last_epoch == 3


def test_a_first_batch_without_weight_is_no_warning() -> None:
    """torch warns of a scheduler that steps before its optimizer: here neither does."""
    ignored = Y.clone()
    ignored[:8] = -100
    schedule = lockstep.Schedule(STEP, every="step")
    assert fit(make_trainer(schedule), data=(X, ignored), shuffle=False)["lr"] == [0.1 / 2**3]


def test_rates_of_groups_are_logged_apart_where_they_differ() -> None:
    def grouped(lr: float, *lambdas: Callable[[int], float]) -> list[str]:
        model = nn.Linear(4, 3)
        groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": lr}]
        optimizer = optim.SGD(groups)
        schedule = partial(lr_scheduler.LambdaLR, lr_lambda=list(lambdas))
        history = fit(make_trainer(schedule, model=model, optimizer=optimizer), epochs=2)
        return [name for name in history if name.startswith("lr")]

    def half(count: int) -> float:
        return 0.5**count

    assert grouped(0.1, half, half) == ["lr"]
    assert grouped(0.2, half, half) == ["lr_0", "lr_1"]
    assert grouped(0.1, half, lambda count: 1.0) == ["lr_0", "lr_1"]


def test_there_is_no_rate_in_the_logs_without_a_schedule() -> None:
    trainer = make_trainer(None)
    assert list(fit(trainer)) == ["loss"]
    assert trainer.schedule is None


# --- what it looks at ---------------------------------------------------------------------------


class Fixed(nn.Module):
    """Its validation loss goes up in the second epoch, whatever its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.epochs = 0.0

    def train(self, mode: bool = True) -> "Fixed":
        self.epochs += not mode
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :3] * 0 + self.weight * 0 + (0.0 if self.training else self.epochs)


def mean_output(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.mean(1)


def test_a_plateau_is_one_of_the_validation_loss_by_default() -> None:
    trainer = make_trainer(PLATEAU, model=Fixed(), loss=mean_output)
    history = fit(trainer, epochs=3, validation_data=(X, Y))
    assert history["val_loss"] == [1.0, 2.0, 3.0]
    assert history["lr"] == pytest.approx([0.1, 0.1, 0.01])
    unseen = make_trainer(PLATEAU, model=Fixed(), loss=mean_output)
    assert fit(unseen, epochs=3)["lr"] == pytest.approx([0.1, 0.1, 0.01])  # the loss stays 0


@pytest.mark.parametrize("devices", [1, 2])
def test_a_plateau_may_be_one_of_a_metric(devices: int) -> None:
    accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
    rising = partial(PLATEAU, mode="max", threshold=1e9, threshold_mode="abs")
    trainer = make_trainer(
        lockstep.Schedule(rising, monitor="accuracy"), devices, metrics={"accuracy": accuracy}
    )
    assert fit(trainer, epochs=3)["lr"] == pytest.approx([0.1, 0.1, 0.01])


# --- what is refused ----------------------------------------------------------------------------

OTHER = optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a number": (lambda: 0.1, "`schedule` must be a torch scheduler, or make one.*0.1"),
    "no scheduler made": (lambda: lambda optimizer: None, "must make a torch scheduler.*NoneType"),
    "missing options": (
        lambda: lr_scheduler.StepLR,
        "when it is called with the optimizer.*step_size.*functools.partial",
    ),
    "another optimizer's": (
        lambda: lr_scheduler.ConstantLR(OTHER),
        "over the Trainer's own optimizer.*another SGD",
    ),
    "another time": (lambda: lockstep.Schedule(STEP, every="batch"), "`every`.*'batch'"),
    "a number to monitor": (
        lambda: lockstep.Schedule(PLATEAU, monitor=3),  # type: ignore[arg-type]
        "`monitor` of a Schedule must be a name.*3",
    ),
    "a plateau per step": (
        lambda: lockstep.Schedule(PLATEAU, every="step"),
        "ReduceLROnPlateau monitors an epoch's logs.*every='step'",
    ),
    "something to monitor for nobody": (
        lambda: lockstep.Schedule(STEP, monitor="loss"),
        "`monitor` is for a scheduler that monitors a metric.*StepLR",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_schedule_that_cannot_be_is_refused_at_once(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(errors.OptionError, match=f"(?s){message}"):
        make_trainer(make())


def test_a_schedule_needs_an_optimizer() -> None:
    with pytest.raises(errors.OptionError, match="`schedule` needs an optimizer"):
        make_trainer(STEP, optimizer=None)


def test_all_that_is_wrong_with_a_schedule_is_told_at_once() -> None:
    with pytest.raises(errors.OptionError, match="3 problems"):
        lockstep.Schedule(None, every="day", monitor=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("devices", [1, 2])
def test_an_unknown_name_is_refused_before_training(devices: int) -> None:
    trainer = make_trainer(lockstep.Schedule(PLATEAU, monitor="val_loss"), devices)
    with pytest.raises(errors.OptionError, match=r"'val_loss'.*Use one of \['loss'\]"):
        fit(trainer)
    assert "lr" in fit(trainer, validation_data=(X, Y))


def test_a_metric_of_several_values_cannot_be_looked_at() -> None:
    each = torchmetrics.Accuracy(task="multiclass", num_classes=3, average="none")
    trainer = make_trainer(lockstep.Schedule(PLATEAU, monitor="each"), metrics={"each": each})
    with pytest.raises(errors.OptionError, match=r"ReduceLROnPlateau cannot step.*TypeError"):
        fit(trainer)


@pytest.mark.parametrize("devices", [1, 2])
def test_too_many_steps_are_refused_before_training(devices: int) -> None:
    trainer = make_trainer(ONE_CYCLE, devices)
    before = [value.clone() for value in trainer.model.parameters()]
    with pytest.raises(errors.OptionError, match="25 steps where 20 of 20 are left"):
        fit(trainer, epochs=5)
    for value, old in zip(trainer.model.parameters(), before, strict=True):
        assert torch.equal(value, old)
    fit(trainer, epochs=3)
    with pytest.raises(errors.OptionError, match="10 steps where 5 of 20 are left"):
        fit(trainer, epochs=2)
    fit(trainer)


def test_a_metric_cannot_be_called_as_the_rate() -> None:
    accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
    for name in ("lr", "lr_1"):
        with pytest.raises(errors.OptionError, match=f"name of.*learning rate.*{name}"):
            make_trainer(STEP, metrics={name: accuracy})
    assert "lr" in fit(make_trainer(None, metrics={"lr": accuracy}))


# --- options in memory --------------------------------------------------------------------------


def groups() -> list[dict[str, Any]]:
    rate = torch.tensor(0.125, dtype=torch.float32)
    return [
        {"params": [], "lr": 0.1, "betas": (0.9, 0.999), "foreach": None, "nesterov": True},
        {"params": [], "lr": rate, "dampening": 0, "bounds": [1, 2.5], "names": ("a", "b")},
    ]


def test_numbers_travel_to_the_last_bit() -> None:
    ours, theirs = groups(), groups()
    spec = options_spec(ours)
    tensor = torch.zeros(spec.shape, dtype=spec.dtype)
    shared = SharedOptions(ours, tensor)
    rate = theirs[1]["lr"]
    ours[0].update(lr=0.1 + 1e-17 + 1 / 3, betas=(0.85, 0.999))
    ours[1]["lr"].fill_(1 / 3)
    ours[1]["bounds"] = [7, 2.5]
    shared.read_into(theirs)
    assert theirs[0] == groups()[0]  # nothing was written yet
    shared.write(ours)
    shared.read_into(theirs)
    assert theirs[0] == ours[0]
    assert theirs[1]["lr"] is rate
    assert torch.equal(rate, ours[1]["lr"])
    assert (theirs[1]["bounds"], theirs[1]["dampening"]) == ([7, 2.5], 0)
    assert type(theirs[1]["dampening"]) is int


def test_a_schedule_is_made_of_what_the_trainer_is_given() -> None:
    optimizer = SGD(nn.Linear(2, 2).parameters())
    assert isinstance(make_schedule(STEP, optimizer).scheduler, lr_scheduler.StepLR)


def test_rates_of_numpy_reach_all_ranks() -> None:
    factors = np.linspace(0.1, 1, 30, dtype=np.float32)
    schedule = lockstep.Schedule(
        partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: factors[step]), every="step"
    )
    found = []
    for devices in (1, 2):
        trainer = make_trainer(schedule, devices, precision="fp64")
        fit(trainer, shuffle=False)
        found.append([one.detach().clone() for one in trainer.model.parameters()])
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-12)


def test_a_rule_and_a_schedule_are_one_too_many() -> None:
    with pytest.raises(errors.OptionError, match="cannot scale the rates of a schedule"):
        fit(make_trainer(STEP), learning_rate_rule="linear")


def test_a_schedule_rests_while_a_rate_is_looked_for() -> None:
    found = []
    for sweeps in (False, True):
        trainer = make_trainer(lockstep.Schedule(ONE_CYCLE, every="step"))
        if sweeps:
            finder = lockstep.callbacks.LearningRateFinder(start=1e-4, end=1e-1, num_steps=8)
            finder.sweep(trainer, (X, Y), batch_size=8)
        found.append((fit(trainer, epochs=2), running(trainer).scheduler.last_epoch))
    assert found[0] == found[1]
