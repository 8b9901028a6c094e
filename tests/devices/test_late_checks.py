"""Steps that a host asks for before it knows the last one's verdict; and such that are refused."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics import Accuracy, MeanSquaredError

import lockstep
from lockstep.errors import NonFiniteError
from lockstep.parallel.data_parallel.late_check import LateCheck, LateStep
from tests.devices.found import ACCELERATORS

X = torch.randn(320, 16, generator=torch.Generator().manual_seed(1))
Y = torch.arange(320) % 3

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "Adam": partial(torch.optim.Adam, lr=0.01),
    "fused Adam": partial(torch.optim.Adam, lr=0.01, fused=True),
    "fused SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
}


class Found:
    """What is left after a fit."""

    def __init__(self, optimizer: str, x: torch.Tensor, **options: Any) -> None:
        torch.manual_seed(0)
        hidden = (nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.2))
        is_linear = "loss" in options
        model = nn.Linear(16, 3) if is_linear else nn.Sequential(*hidden, nn.Linear(32, 3))
        trainer = lockstep.Trainer(
            model,
            **{"loss": nn.CrossEntropyLoss(), **options},
            optimizer=OPTIMIZERS[optimizer],
            metrics={
                "metric": MeanSquaredError() if is_linear else Accuracy("multiclass", num_classes=3)
            },
            schedule=lambda given: torch.optim.lr_scheduler.StepLR(given, 3, 0.9),
            strategy=lockstep.SingleDeviceStrategy(ACCELERATORS[0]),
        )
        y = torch.zeros(len(x), 3) if is_linear else Y
        self.history, self.error = None, ""
        try:
            self.history = trainer.fit((x, y), batch_size=16, epochs=2, verbose=0).history
        except NonFiniteError as error:
            self.error = str(error)
        slots = trainer.optimizer.state.values()
        self.tensors = [
            *model.state_dict().values(),
            *(value for own in slots for value in own.values() if isinstance(value, torch.Tensor)),
        ]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The verdicts that hosts read a step later."""
    verdicts: list[bool] = []
    original = LateStep.settle

    def settle(step: LateStep) -> bool:
        is_valid = original(step)
        verdicts.append(not is_valid)
        return is_valid

    monkeypatch.setattr(LateStep, "settle", settle)
    return verdicts


def without_late_checks(*arguments: Any, **options: Any) -> Found:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LateCheck, "of", lambda *_: None)
        return Found(*arguments, **options)


def assert_same(found: Found, expected: Found) -> None:
    assert found.history == expected.history
    for one, other in zip(found.tensors, expected.tensors, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_is_the_same(optimizer: str, refused: list[bool]) -> None:
    found = Found(optimizer, X)
    assert len(refused) > 30
    assert not any(refused)
    assert_same(found, without_late_checks(optimizer, X))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_value_that_is_not_finite_is_the_same_error(optimizer: str, refused: list[bool]) -> None:
    """Weights, slots and buffers are those before its step, though another was asked for."""
    x = X.clone()
    for row in range(0, len(X), 7):  # until it is in a step that is checked late
        x.copy_(X)[row] = float("nan")
        refused.clear()
        found = Found(optimizer, x)
        if any(refused):
            break
    assert refused.count(True) == 1
    expected = without_late_checks(optimizer, x)
    assert found.error == expected.error != ""
    assert_same(found, expected)


def turned() -> nn.Module:
    """A model whose weight has a gradient in another order in memory, which no kernel reads."""
    torch.manual_seed(0)
    model = nn.Linear(16, 3)

    def turn(weight: torch.Tensor) -> None:
        assert weight.grad is not None
        weight.grad = weight.grad.t().contiguous().t()

    model.weight.register_post_accumulate_grad_hook(turn)
    return model


def test_a_step_that_no_kernel_makes_waits_for_its_verdict(
    refused: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its form of Adam cannot leave out an update."""
    x = X.clone()
    x[300, 3] = float("nan")
    found = []
    for is_late in (True, False):
        if not is_late:
            monkeypatch.setattr(LateCheck, "of", lambda *_: None)
        trainer = lockstep.Trainer(
            turned(),
            loss=nn.CrossEntropyLoss(),
            optimizer=OPTIMIZERS["Adam"],
            strategy=lockstep.SingleDeviceStrategy(ACCELERATORS[0]),
        )
        with pytest.raises(NonFiniteError) as raised:
            trainer.fit((x, Y), batch_size=16, shuffle=False, verbose=0)
        found.append((str(raised.value), trainer.model.state_dict()["weight"]))
    assert refused.count(True) == 1
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def test_counts_of_steps_are_in_host_memory_after_a_fit() -> None:
    """Where torch's own form of the user's optimizer reads them without waiting for the device."""
    found = Found("Adam", X)
    counts = [one for one in found.tensors if one.dim() == 0 and one.dtype == torch.float32]
    assert counts
    assert {(one.device.type, float(one)) for one in counts} == {("cpu", 40.0)}


def test_a_norm_that_overflows_is_no_refusal(refused: list[bool]) -> None:
    """The host looks again, in float64, and takes the step."""
    x = X.clone()
    x[::40] = 1e22
    found = Found("Adam", x, loss=nn.L1Loss())
    assert any(refused)
    assert found.error == ""
    assert_same(found, without_late_checks("Adam", x, loss=nn.L1Loss()))
