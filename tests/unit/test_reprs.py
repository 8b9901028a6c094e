"""What a user's objects say of themselves: one line that could be written in a script."""

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import lockstep


class Own(lockstep.MirroredStrategy):
    def __init__(self, number: int) -> None:
        super().__init__(devices=number)


STRATEGIES: dict[str, lockstep.Strategy] = {
    "SingleDeviceStrategy()": lockstep.SingleDeviceStrategy(),
    "MirroredStrategy(devices=2, num_shares=4)": lockstep.MirroredStrategy(2, num_shares=4),
    "MultiWorkerMirroredStrategy(compression='int8')": lockstep.MultiWorkerMirroredStrategy(
        compression="int8"
    ),
    "PipelineStrategy(stages=2, cuts=['a'])": lockstep.PipelineStrategy(2, ["a"]),
    "HybridStrategy(data=(3, 1))": lockstep.HybridStrategy((3, 1)),
    "LocalSGDStrategy(every='epoch', devices=2)": lockstep.LocalSGDStrategy("epoch", 2),
    "ParameterServerStrategy(workers=2, staleness=None)": lockstep.ParameterServerStrategy(
        workers=2, staleness=None
    ),
    "Own(number=2)": Own(2),
}


@pytest.mark.parametrize("text", STRATEGIES)
def test_a_strategy_is_what_it_was_made_with(text: str) -> None:
    strategy = STRATEGIES[text]
    assert repr(strategy) == text
    assert repr(copy.deepcopy(strategy)) == repr(pickle.loads(pickle.dumps(strategy))) == text
    known = {name: getattr(lockstep, name) for name in lockstep.__all__ if "Strategy" in name}
    assert repr(eval(text, {**known, "Own": Own})) == text


MODEL = nn.Sequential(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "Trainer(Sequential, precision='fp32')"),
        (
            {"loss": nn.MSELoss(), "optimizer": partial(torch.optim.Adam, lr=1e-4)},
            "Trainer(Sequential, loss=MSELoss(), optimizer=Adam(lr=0.0001), precision='fp32')",
        ),
        (
            {"loss": [nn.MSELoss(), nn.functional.l1_loss], "strategy": Own(2)},
            "Trainer(Sequential, loss=[MSELoss(), l1_loss], strategy=Own(number=2), "
            "precision='fp32')",
        ),
        (
            {"loss": {"a": nn.Sequential(nn.Linear(9, 9))}},
            "Trainer(Sequential, loss={'a': Sequential}, precision='fp32')",
        ),
    ],
)
def test_a_trainer_names_its_parts(options: dict[str, Any], text: str) -> None:
    assert repr(lockstep.Trainer(MODEL, **options)) == text
