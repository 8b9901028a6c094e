"""The learning-rate finder: its sweep, its suggestion, and that nothing is left of it."""

import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep import errors
from lockstep.callbacks import LearningRateFinder
from lockstep.train.callbacks.callback import Logs
from tests.thorough import core_of

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(64, 6, generator=GENERATOR)
Y = X @ torch.randn(6, 2, generator=GENERATOR)
STRATEGIES = {
    "single": lockstep.SingleDeviceStrategy(),
    "mirrored": lockstep.MirroredStrategy(2),
    "mirrored-3": lockstep.MirroredStrategy(3),
    "pipeline": lockstep.PipelineStrategy(2, microbatches=1),
}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 2)
    )


def make_trainer(strategy: Any = None, optimizer: Any = None, **options: Any) -> lockstep.Trainer:
    return lockstep.Trainer(
        make_model(),
        loss=nn.MSELoss(),
        optimizer=optimizer or partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        strategy=strategy,
        precision="fp64",
        **options,
    )


def fit(trainer: lockstep.Trainer) -> dict[str, list[Any]]:
    return trainer.fit((X, Y), epochs=2, batch_size=16, verbose=0).history


def state_of(trainer: lockstep.Trainer) -> dict[str, Any]:
    optimizer = trainer.optimizer
    assert optimizer is not None
    slots = {
        f"{number}: {name}": value
        for number, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
    }
    return {**trainer.model.state_dict(), **slots}


@pytest.mark.parametrize("trained_before", [False, True])
@pytest.mark.parametrize("strategy", core_of(STRATEGIES, ["mirrored"]))
def test_nothing_is_left_of_a_sweep(strategy: str, trained_before: bool) -> None:
    """Training that follows has the same bits: weights, slots, order, random streams, rates."""
    outcomes = []
    for sweeps in (False, True):
        trainer = make_trainer(STRATEGIES[strategy], partial(torch.optim.Adam, lr=0.01))
        if trained_before:
            fit(trainer)
        if sweeps:
            finder = LearningRateFinder(start=1e-5, num_steps=12)
            finder.sweep(trainer, (X, Y), batch_size=16)
            assert len(finder.history) > 5
        outcomes.append((fit(trainer), state_of(trainer), trainer.optimizer))
    (history, state, optimizer), (other_history, other_state, other_optimizer) = outcomes
    assert history == other_history
    assert optimizer is not None
    assert other_optimizer is not None
    assert optimizer.param_groups[0]["lr"] == other_optimizer.param_groups[0]["lr"]
    assert state.keys() == other_state.keys()
    for name, value in state.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(other_state[name])), name


def test_every_strategy_sweeps_alike() -> None:
    histories = []
    for strategy in (lockstep.MirroredStrategy(devices, num_shares=3) for devices in (1, 2, 3)):
        finder = LearningRateFinder(start=1e-4, end=1.0, num_steps=10)
        finder.sweep(make_trainer(strategy), (X, Y), batch_size=16)
        histories.append(finder.history)
    assert histories[0] == histories[1] == histories[2]


def test_rates_grow_exponentially_and_losses_are_smoothed() -> None:
    finder = LearningRateFinder(start=1e-6, end=1e-2, num_steps=9, smoothing=0.5)
    finder.sweep(make_trainer(), (X, Y), batch_size=16)
    rates = [point.learning_rate for point in finder.history]
    assert rates == pytest.approx([10 ** (-6 + number / 2) for number in range(9)])
    losses = [point.loss for point in finder.history]
    weights = [0.5 ** (8 - number) for number in range(9)]
    expected = sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights)
    assert finder.history[-1].smoothed == pytest.approx(expected)


def test_a_sweep_ends_where_training_diverges_and_suggests_less() -> None:
    finder = LearningRateFinder(start=1e-4, end=1e4, num_steps=60, smoothing=0.5)
    suggestion = finder.sweep(make_trainer(), (X, Y), batch_size=16)
    assert len(finder.history) < 60
    assert 1e-4 < suggestion < finder.history[-1].learning_rate / 2
    best = min(point.smoothed for point in finder.history)
    assert finder.history[-1].smoothed > 4 * best
    trainer = make_trainer(optimizer=partial(torch.optim.SGD, lr=suggestion, momentum=0.9))
    losses = trainer.fit((X, Y), epochs=5, batch_size=16, verbose=0).history["loss"]
    assert losses[-1] < losses[0] / 2


class Overflowing(nn.Module):
    """Its loss becomes infinite from one step to the next."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean().exp()


def test_a_loss_that_is_not_finite_ends_the_sweep() -> None:
    trainer = lockstep.Trainer(
        make_model(), loss=Overflowing(), optimizer=partial(torch.optim.SGD, lr=1.0)
    )
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    finder = LearningRateFinder(start=1e-4, end=1e6, num_steps=20, divergence=1e30)
    finder.sweep(trainer, (X, Y), batch_size=16)
    assert len(finder.history) < 20
    assert all(math.isfinite(point.loss) for point in finder.history)
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_groups_keep_their_ratios() -> None:
    model = make_model()
    first, *rest = model.parameters()
    groups: list[dict[str, Any]] = [{"params": [first], "lr": 0.4}, {"params": rest}]
    rates: list[list[float]] = []

    class Rates(lockstep.Callback):
        def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
            optimizer = self.trainer.optimizer
            assert optimizer is not None
            rates.append([group["lr"] for group in optimizer.param_groups])

    finder = LearningRateFinder(start=1e-3, end=1e-1, num_steps=3)
    trainer = lockstep.Trainer(
        model,
        loss=nn.MSELoss(),
        optimizer=torch.optim.SGD(groups, lr=0.1),
        callbacks=[finder, Rates()],
    )
    trainer.fit((X, Y), batch_size=16, verbose=0)
    assert torch.tensor(rates[:3]).allclose(
        torch.tensor([[1e-3, 2.5e-4], [1e-2, 2.5e-3], [1e-1, 2.5e-2]])
    )
    assert trainer.optimizer is not None
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.4, 0.1]


def test_as_a_callback_it_sweeps_once() -> None:
    finder = LearningRateFinder(start=1e-4, num_steps=5)
    trainer = make_trainer(callbacks=[finder])
    assert len(trainer.fit((X, Y), epochs=9, batch_size=16, verbose=0).epoch) == 2
    assert len(finder.history) == 5
    assert finder.acts_in("on_train_batch_end") is False
    assert fit(trainer) == fit(make_trainer())
    assert len(finder.history) == 5


def test_a_sweep_leaves_the_trainers_callbacks_alone() -> None:
    class Fails(lockstep.Callback):
        def on_train_begin(self, logs: Logs | None = None) -> None:
            raise AssertionError("called during a sweep")

    other = Fails()
    trainer = make_trainer(callbacks=[other])
    LearningRateFinder(start=1e-4, num_steps=20).sweep(trainer, (X, Y), batch_size=16)
    assert trainer.callbacks == [other]


def test_it_is_drawn(tmp_path: Path) -> None:
    finder = LearningRateFinder(start=1e-4, num_steps=20)
    finder.sweep(make_trainer(), (X, Y), batch_size=16)
    finder.plot(tmp_path / "sweep.svg")
    assert "learning rate" in (tmp_path / "sweep.svg").read_text()


def test_without_matplotlib_it_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(errors.ExtraError, match=r'`pip install "\.\[plot\]"` in a clone'):
        LearningRateFinder().plot("sweep.svg")


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "start": ({"start": 0}, "`start` must be greater than 0"),
    "end": ({"end": -1.0}, "`end` must be greater than 0"),
    "no number": ({"end": "10"}, "`end` must be a finite number"),
    "order": ({"start": 1.0, "end": 0.1}, "`start` must be less than `end`"),
    "steps": ({"num_steps": 2}, "`num_steps` must be an integer of at least 3"),
    "smoothing": ({"smoothing": 1.0}, "`smoothing` must be from 0 to less than 1"),
    "smoothing's type": ({"smoothing": None}, "`smoothing` must be a finite number"),
    "divergence": ({"divergence": 1}, "`divergence` must be greater than 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_option_is_told_at_once(name: str) -> None:
    options, message = WRONG[name]
    with pytest.raises(errors.OptionError, match=message):
        LearningRateFinder(**options)


def test_without_a_fall_there_is_no_suggestion() -> None:
    finder = LearningRateFinder()
    with pytest.raises(errors.OptionError, match="sweep of 0 steps"):
        _ = finder.suggestion


def test_a_learning_rate_of_zero_is_refused() -> None:
    trainer = make_trainer(optimizer=partial(torch.optim.SGD, lr=0.0))
    with pytest.raises(errors.OptionError, match="must have a learning rate"):
        LearningRateFinder().sweep(trainer, (X, Y))
