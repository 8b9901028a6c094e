"""The reference's reading of a loss, against sums written out by hand."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import LossError
from lockstep.proof.batch_loss import batch_loss

N, CLASSES = 5, 3
OUTPUT = torch.linspace(-2, 2, N * CLASSES, dtype=torch.float64).reshape(N, CLASSES).sin()
TARGET = torch.tensor([0, 2, 1, -100, 2])
BY_CLASS = torch.tensor([0.5, 2.0, 3.0], dtype=torch.float64)
SAMPLE_WEIGHT = torch.tensor([1.0, 0.0, 2.0, 5.0, 0.5], dtype=torch.float64)


def value(loss: Any, output: Any, target: Any, weight: Tensor | None = None) -> float:
    result = batch_loss(loss, output, target, weight)
    assert result is not None
    return result.item()


def by_hand(weights: list[float], class_weights: list[float]) -> float:
    """sum(w c l) / sum(w c) over the targets that count."""
    logs = OUTPUT.log_softmax(1)
    total, weight = 0.0, 0.0
    for row in range(N):
        target = int(TARGET[row])
        if target >= 0:
            total -= weights[row] * class_weights[target] * logs[row, target].item()
            weight += weights[row] * class_weights[target]
    return total / weight


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(weight=BY_CLASS),
        partial(F.cross_entropy, weight=BY_CLASS),
        lambda output, target: nn.NLLLoss(weight=BY_CLASS)(output.log_softmax(1), target),
    ],
)
def test_scalar_is_torchs_own_mean(loss: Any) -> None:
    expected = by_hand([1.0] * N, BY_CLASS.tolist())
    assert value(loss, OUTPUT, TARGET) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(
    "loss",
    [nn.CrossEntropyLoss(weight=BY_CLASS), partial(F.cross_entropy, weight=BY_CLASS)],
)
def test_sample_weight_multiplies_class_weight(loss: Any) -> None:
    expected = by_hand(SAMPLE_WEIGHT.tolist(), BY_CLASS.tolist())
    assert value(loss, OUTPUT, TARGET, SAMPLE_WEIGHT) == pytest.approx(expected, rel=1e-14)


def test_sample_weight_without_class_weight() -> None:
    expected = by_hand(SAMPLE_WEIGHT.tolist(), [1.0] * CLASSES)
    for loss in (nn.CrossEntropyLoss(), F.cross_entropy):
        assert value(loss, OUTPUT, TARGET, SAMPLE_WEIGHT) == pytest.approx(expected, rel=1e-14)


def test_sample_weight_of_class_probabilities() -> None:
    probabilities = OUTPUT.flip(0).softmax(1)
    each = -(OUTPUT.log_softmax(1) * probabilities).sum(1)
    expected = (each * SAMPLE_WEIGHT).sum() / SAMPLE_WEIGHT.sum()
    found = value(nn.CrossEntropyLoss(), OUTPUT, probabilities, SAMPLE_WEIGHT)
    assert found == pytest.approx(expected.item(), rel=1e-14)


def test_sample_weight_of_positions() -> None:
    logits = torch.stack([OUTPUT, OUTPUT.flip(0)], 2)  # (n, classes, positions)
    target = torch.stack([TARGET, TARGET.flip(0)], 1)
    each = F.cross_entropy(logits, target, reduction="none")
    counts = (target != -100).double() * SAMPLE_WEIGHT[:, None]
    expected = (each * SAMPLE_WEIGHT[:, None]).sum() / counts.sum()
    found = value(nn.CrossEntropyLoss(), logits, target, SAMPLE_WEIGHT)
    assert found == pytest.approx(expected.item(), rel=1e-14)


@pytest.mark.parametrize("loss", [nn.MSELoss(), F.mse_loss])
def test_sample_weight_of_a_mean_over_elements(loss: Any) -> None:
    each = (OUTPUT - 1).pow(2).mean(1)
    expected = (each * SAMPLE_WEIGHT).sum() / SAMPLE_WEIGHT.sum()
    found = value(loss, OUTPUT, torch.ones_like(OUTPUT), SAMPLE_WEIGHT)
    assert found == pytest.approx(expected.item(), rel=1e-14)


def test_values_of_samples_are_averaged_or_weighted() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return output[:, 0]

    assert value(loss, OUTPUT, TARGET) == pytest.approx(OUTPUT[:, 0].mean().item())
    expected = (OUTPUT[:, 0] * SAMPLE_WEIGHT).sum() / SAMPLE_WEIGHT.sum()
    assert value(loss, OUTPUT, TARGET, SAMPLE_WEIGHT) == pytest.approx(expected.item())
    single = nn.CrossEntropyLoss(reduction="none")
    expected = (single(OUTPUT, TARGET) * SAMPLE_WEIGHT).sum() / SAMPLE_WEIGHT.sum()
    assert value(single, OUTPUT, TARGET, SAMPLE_WEIGHT) == pytest.approx(expected.item())


def test_pair_is_divided() -> None:
    assert value(lambda output, target: (output.sum(), 4), OUTPUT, TARGET) == pytest.approx(
        OUTPUT.sum().item() / 4
    )


def test_loss_that_takes_sample_weight_weighs_for_itself() -> None:
    def loss(output: Tensor, target: Tensor, sample_weight: Tensor) -> tuple[Tensor, Tensor]:
        return (output[:, 1] * sample_weight).sum(), sample_weight.sum()

    expected = (OUTPUT[:, 1] * SAMPLE_WEIGHT).sum() / SAMPLE_WEIGHT.sum()
    assert value(loss, OUTPUT, TARGET, SAMPLE_WEIGHT) == pytest.approx(expected.item())


NOTHING: dict[str, tuple[Callable[..., Any], Tensor | None]] = {
    "all targets ignored": (nn.CrossEntropyLoss(), None),
    "all targets ignored, weighted": (nn.CrossEntropyLoss(), SAMPLE_WEIGHT),
    "all targets ignored, function": (partial(F.cross_entropy, label_smoothing=0.1), None),
    "pair": (lambda output, target: (output.sum(), torch.tensor(0)), None),
    "no weight": (lambda output, target: output[:, 0], torch.zeros(N)),
}


@pytest.mark.parametrize("name", NOTHING)
def test_a_batch_of_no_weight_has_no_loss(name: str) -> None:
    loss, weight = NOTHING[name]
    assert batch_loss(loss, OUTPUT, torch.full((N,), -100), weight) is None


def test_a_loss_that_is_not_a_number_is_no_batch_of_no_weight() -> None:
    spoilt = OUTPUT.clone()
    spoilt[1, 1] = torch.nan
    assert math.isnan(value(nn.CrossEntropyLoss(), spoilt, TARGET))


@pytest.mark.parametrize("returned", [OUTPUT, "text", (1, 2, 3)])
def test_what_is_no_loss_is_refused(returned: Any) -> None:
    with pytest.raises(LossError, match="must return a scalar"):
        batch_loss(lambda output, target: returned, OUTPUT, TARGET, None)


def test_a_scalar_cannot_be_weighted() -> None:
    with pytest.raises(LossError, match="sample_weight"):
        batch_loss(lambda output, target: output.mean(), OUTPUT, TARGET, SAMPLE_WEIGHT)
