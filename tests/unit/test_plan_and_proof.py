"""A Trainer's Plan and proof, without a function that makes a job."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import OptionError

X, Y = torch.randn(24, 4), torch.randint(0, 3, (24,))


def make_trainer(**options: Any) -> lockstep.Trainer:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    sgd = partial(torch.optim.SGD, lr=0.1)
    options = {"loss": "cross_entropy", "optimizer": sgd, **options}
    return lockstep.Trainer(model, **options)


@pytest.mark.parametrize(
    "strategy", [lockstep.MirroredStrategy(2), lockstep.PipelineStrategy(2, microbatches=2)]
)
def test_the_plan_is_that_of_a_fit(strategy: lockstep.Strategy) -> None:
    trainer = make_trainer(strategy=strategy, accumulate=2)
    plan = trainer.plan_for(X, Y, batch_size=12)
    trainer.fit(X, Y, batch_size=12, verbose=0)
    assert trainer.plan == plan


def test_the_plan_of_batches_that_the_data_makes() -> None:
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=1)
    plan = make_trainer(strategy=lockstep.MirroredStrategy(2)).plan_for(data)
    assert plan.notes == ("Batches of 1 leave 1 of 2 shares empty.",)


def test_a_trainer_is_proved_and_stays_as_it_is() -> None:
    trainer = make_trainer(strategy=lockstep.MirroredStrategy(2), clip_norm=1.0)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    report = trainer.verify(X, Y, batch_size=8, steps=2)
    assert report.passed
    assert report.status == 0
    assert "2 steps of 8 samples" in report.title
    assert "not part of the proof: ['clip_norm']" in report.notes[-1]
    assert all(map(torch.equal, before, trainer.model.parameters()))


def test_a_step_of_ones_own_with_time_first_is_proved() -> None:
    def step(model: nn.Module, batch: Any) -> Any:
        x, y = batch
        assert x.shape[0] == 3  # time is first, here too
        return (model(x).mean(0).sum(1) - y).square()

    data = torch.randn(3, 8, 4), torch.randn(8)
    trainer = make_trainer(
        strategy=lockstep.MirroredStrategy(2),
        loss=None,
        train_step=step,
        batch_dim={"inputs": 1, "targets": 0, "outputs": 1},
    )
    assert trainer.verify(data, batch_size=8, steps=1).passed


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "compares a strategy with one device"),
        ({"strategy": lockstep.MirroredStrategy(2), "loss": None}, "verify needs a loss"),
        ({"strategy": lockstep.MirroredStrategy(2), "optimizer": None}, "needs an optimizer"),
    ],
)
def test_what_cannot_be_proved(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        make_trainer(**options).verify(X, Y)
