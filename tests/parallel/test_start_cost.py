"""What must not be done before the first step: import for seconds."""

import sys
from pathlib import Path

import pytest
import torch
import torchmetrics
from torch import nn

import lockstep
from lockstep.launch.workers import pool
from lockstep.train.preloadable_modules import known_modules
from lockstep.train.runtime import session
from tests.faults.jobs import fit, make_trainer
from tests.faults.mishaps import fail
from tests.faults.processes import run
from tests.kept_teams import keep_teams

# Torch imports the first for its own optimizers, settings and decorators, unless asked not to, and
# the second for gradients that backward starts from.
SLOW = ("torch._dynamo", "sympy")


def check_imports() -> None:
    found = [name for name in SLOW if name in sys.modules]
    if found:
        fail(AssertionError(f"{found} were imported"))


@pytest.mark.thorough
def test_the_first_steps_of_a_helper_do_not_import_for_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The template and the helpers of other tests may have imported it: Keras does, and torch's own
    # recomputation.
    monkeypatch.setattr(pool, "_servers", {})
    with keep_teams():
        fit(make_trainer(2, check_imports, step=2))


SCRIPT = """
import sys
from functools import partial
import torch
from torch import nn
import lockstep

trainer = lockstep.Trainer(
    nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)),
    loss={loss},
    optimizer=partial(torch.optim.{optimizer}, lr=0.1),
    strategy=lockstep.{strategy},
)
trainer.fit((torch.ones(64, 8), torch.ones(64, 1)), verbose=0)
print([name for name in {slow} if name in sys.modules])
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("strategy", "optimizer", "loss"),
    [
        pytest.param(
            *("SingleDeviceStrategy()", "Adam", "nn.MSELoss()"), marks=pytest.mark.exhaustive
        ),
        ("PipelineStrategy(2)", "AdamW", "nn.MSELoss()"),
        pytest.param(
            *("MirroredStrategy(2)", "Adam", "lambda out, y: (out - y).square().mean().sqrt()"),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_nor_do_those_of_the_script(
    strategy: str, optimizer: str, loss: str, tmp_path: Path
) -> None:
    source = SCRIPT.format(strategy=strategy, optimizer=optimizer, loss=loss, slow=SLOW)
    assert run(source, directory=tmp_path) == "[]\n"


@pytest.mark.thorough
def test_what_metrics_need_is_imported_before_helpers_are_born(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    take_team = pool.take_team

    def take(num: int, threads: int | None, preload: tuple[str, ...], *, first_rank: int) -> object:
        asked.append(preload)
        return take_team(num, threads, preload, first_rank=first_rank)

    monkeypatch.setattr(session, "take_team", take)
    for metrics in ({}, {"accuracy": torchmetrics.Accuracy(task="multiclass", num_classes=3)}):
        trainer = lockstep.Trainer(
            nn.Linear(4, 3),
            loss=nn.CrossEntropyLoss(),
            metrics=metrics,
            strategy=lockstep.MirroredStrategy(2),
        )
        trainer.evaluate((torch.ones(4, 4), torch.zeros(4, dtype=torch.long)))
    assert asked == [session.PRELOAD, (*session.PRELOAD, "torchmetrics.classification.accuracy")]


def test_modules_of_users_are_not_imported_before_they_are_sent() -> None:
    class Own(nn.Module):
        pass

    class OwnMetric(torchmetrics.MeanMetric):
        pass

    assert known_modules([nn.Linear(1, 1), Own(), OwnMetric(), None]) == ()
    assert known_modules([torchmetrics.MeanMetric()]) == ("torchmetrics.aggregation",)
