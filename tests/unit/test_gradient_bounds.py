"""Bounds of gradients, with which ranks know without another meeting that a sum is finite."""

import math
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.comm.collectives.gradients import OwnGradients, norms_on_host
from lockstep.errors import NonFiniteGradientError
from lockstep.parallel.data_parallel.gradient_rules import GradientJudge


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.scale


def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The verdicts for which ranks had to meet, of this process."""
    found: list[bool] = []
    are_finite = GradientJudge._are_finite

    def noted(self: GradientJudge) -> bool:
        found.append(are_finite(self))
        return found[-1]

    monkeypatch.setattr(GradientJudge, "_are_finite", noted)
    return found


def train(value: float, devices: int, **options: Any) -> lockstep.Trainer:
    trainer = lockstep.Trainer(
        Scaled(),
        loss=nn.L1Loss(reduction="sum"),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-40),
        strategy=lockstep.MirroredStrategy(devices),
        **options,
    )
    trainer.fit((torch.full((2,), value), torch.zeros(2)), batch_size=2, verbose=0)
    return trainer


@pytest.mark.parametrize("devices", [1, 2])
def test_small_gradients_need_no_verdict(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = asked(monkeypatch)
    train(1.0, devices)
    assert found == []


def test_finite_gradients_whose_sum_overflows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each share's is finite, so the ranks look at the sum itself."""
    found = asked(monkeypatch)
    with pytest.raises(NonFiniteGradientError):
        train(2.5e38, 2)
    assert found == [False]


def test_large_sums_that_are_finite_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    found = asked(monkeypatch)
    trainer = train(1e38, 2, on_nonfinite="skip")
    assert found == [True]
    (scale,) = trainer.model.parameters()
    assert scale.detach().item() != 1.0


@pytest.mark.parametrize(
    "gradient",
    [
        torch.ones(3).to_sparse(),
        torch.ones(3, dtype=torch.float16),
        torch.ones(3, requires_grad=True),
        torch.ones(3, dtype=torch.int64),
    ],
)
def test_others_than_plain_tensors_have_no_bound(gradient: torch.Tensor) -> None:
    assert norms_on_host([torch.ones(3), gradient]) == [math.inf] * 2
    own = OwnGradients()
    own.write(0, [None, gradient])
    assert own.bound() == math.inf


def test_a_bound_keeps_nan() -> None:
    own = OwnGradients()
    own.write(0, [torch.tensor([1.0, math.nan]), None, torch.ones(4)])
    assert math.isnan(own.bound())
