"""``no_grad`` and ``inference_mode`` around calls: the same as without, on every rank."""

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn

import lockstep
from lockstep.errors import ModelError
from tests.thorough import core_of

X = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 3, (48,), generator=torch.Generator().manual_seed(1))
MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
STRATEGIES: dict[str, Callable[[], lockstep.Strategy]] = {
    "single": lockstep.SingleDeviceStrategy,
    "mirrored": partial(lockstep.MirroredStrategy, 2),
    "shares": partial(lockstep.MirroredStrategy, 1, num_shares=2),
    "pipeline": partial(lockstep.PipelineStrategy, 2, ["3"], 2),
}


def make_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def make_trainer(strategy: lockstep.Strategy, model: Any = None, **options: Any) -> Any:
    return lockstep.Trainer(
        model or make_model(),
        loss=nn.CrossEntropyLoss(),
        optimizer=options.pop("optimizer", partial(torch.optim.Adam, lr=1e-2)),
        metrics={"accuracy": torchmetrics.Accuracy(task="multiclass", num_classes=3)},
        strategy=strategy,
        **options,
    )


def results(trainer: Any) -> list[Any]:
    history = trainer.fit((X, Y), epochs=2, batch_size=16, validation_data=(X, Y), verbose=0)
    with trainer.rewound():
        trainer.fit((X, Y), verbose=0)
    trainer.fit(lambda: iter([(X[:20], Y[:20]), (X[20:], Y[20:])]), verbose=0)
    logs = trainer.evaluate((X, Y))
    return [history.history, logs, trainer.predict(X), trainer.model.state_dict()]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return all(map(same, one, other))
    return bool(one == other)


@cache
def plain_results(strategy: str) -> list[list[Any]]:
    """Those of one Trainer, the first time and the second."""
    trainer = make_trainer(STRATEGIES[strategy]())
    return [copy.deepcopy(results(trainer)) for _ in range(2)]


@pytest.mark.parametrize("strategy", core_of(STRATEGIES, ["mirrored"]))
@pytest.mark.parametrize("mode", MODES)
def test_calls_within_are_as_those_without(mode: str, strategy: str) -> None:
    trainer = make_trainer(STRATEGIES[strategy]())
    with MODES[mode]():
        first = copy.deepcopy(results(trainer))
    assert same([first, results(trainer)], plain_results(strategy))


@pytest.mark.parametrize("strategy", core_of(["single", "mirrored"], ["mirrored"]))
@pytest.mark.parametrize("precision", core_of(["fp32", "fp64"], ["fp64"]))
def test_a_trainer_may_be_made_within(precision: str, strategy: str) -> None:
    options = {"precision": precision, "optimizer": torch.optim.Adagrad, "average": lockstep.EMA()}
    expected = results(make_trainer(STRATEGIES[strategy](), **options))
    model = make_model()
    with torch.inference_mode():
        trainer = make_trainer(STRATEGIES[strategy](), model, **options)
    assert same(results(trainer), expected)
    with torch.inference_mode(), trainer.averaged():
        averaged = trainer.evaluate((X, Y))
    with trainer.averaged():
        assert averaged == trainer.evaluate((X, Y))
    trainer.fit((X, Y), verbose=0)


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["single", "mirrored"])
def test_a_model_made_by_a_function_may_be_made_within(strategy: str) -> None:
    with torch.inference_mode():
        trainer = make_trainer(STRATEGIES[strategy](), make_model)
    assert same(results(trainer), results(make_trainer(STRATEGIES[strategy](), make_model)))


def test_a_model_made_within_is_refused() -> None:
    with torch.inference_mode():
        model = make_model()
    with pytest.raises(ModelError, match=r"inference_mode.*0\.weight, .*and 4 more\. Make the"):
        make_trainer(lockstep.SingleDeviceStrategy(), model)
    model = make_model()
    with torch.inference_mode():
        model[1].running_mean = torch.zeros(8)  # type: ignore[index]
    with pytest.raises(ModelError, match=r"Received: 1\.running_mean\."):
        make_trainer(lockstep.SingleDeviceStrategy(), model)


def test_what_else_is_made_within_is_told_of() -> None:
    with torch.inference_mode():
        loss = nn.CrossEntropyLoss(weight=torch.ones(3))
    trainer = lockstep.Trainer(make_model(), loss=loss, optimizer=torch.optim.SGD)
    with pytest.raises(ModelError, match=r"inference_mode.*cannot be saved.*Make the model"):
        trainer.fit((X, Y), verbose=0)


def test_data_made_within_can_be_trained_on() -> None:
    with torch.inference_mode():
        data = X.clone(), Y.clone()
    trainer, expected = (make_trainer(lockstep.MirroredStrategy(2)) for _ in range(2))
    trainer.fit(data, verbose=0)
    expected.fit((X, Y), verbose=0)
    assert same(trainer.model.state_dict(), expected.model.state_dict())


@pytest.mark.parametrize("mode", MODES)
def test_plans_and_proofs_are_made_within(mode: str) -> None:
    job = lockstep.Job(make_model(), nn.CrossEntropyLoss(), torch.optim.SGD, (X, Y), 13)
    with MODES[mode]():
        plan = lockstep.PipelineStrategy(2).plan(job.model, batch_size=16, sample=(X, Y))
        report = lockstep.verify(job, lockstep.MirroredStrategy(2))
    assert plan.num_ranks == 2
    assert report.passed, report
