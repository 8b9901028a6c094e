"""How many functions of Python a training step calls: what decides how fast small steps are.

A count, not a time: it is the same on every machine. What torch itself calls is counted, too.
"""

import sys
from itertools import pairwise
from statistics import median
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.train.fit.fit_task import FitTask

# Calls in waits depend on who comes first.
WAITING = "status_board.py"

# With some room for other versions of torch. Before steps were bound: 502, 717.
MOST = {1: 158, 2: 239}


class Counting:
    """Counts the calls in each step of this process."""

    def __init__(self) -> None:
        self.calls = 0
        self.steps: list[int] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and not frame.f_code.co_filename.endswith(WAITING):
            self.calls += 1

    def begin_step(self) -> None:
        self.steps.append(self.calls)


@pytest.mark.parametrize("devices", list(MOST))
def test_a_step_makes_few_calls(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Counting()
    make_step = FitTask._make_step

    def counted(*arguments: Any) -> Any:
        counting.begin_step()
        return make_step(*arguments)

    monkeypatch.setattr(FitTask, "_make_step", counted)
    model = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    trainer = lockstep.Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.Adam(model.parameters()),
        strategy=lockstep.MirroredStrategy(devices) if devices > 1 else None,
    )
    data = torch.randn(8 * 60, 784), torch.randint(0, 10, (8 * 60,))
    before = sys.getprofile()
    sys.setprofile(counting)
    try:
        trainer.fit(data, batch_size=8, verbose=0)
    finally:
        sys.setprofile(before)
    counts = [after - step for step, after in pairwise(counting.steps)]
    assert median(counts) <= MOST[devices], counts
