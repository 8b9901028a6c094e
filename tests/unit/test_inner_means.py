"""What is seen of a loss that is computed in a model: what it is a mean over."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.data.map_style.sources import Batch
from lockstep.errors import LossError
from lockstep.parallel.data_parallel.step_functions import StepFunction
from lockstep.parallel.independence.reduction_trial import check_mean
from lockstep.parallel.independence.split_trial import is_tried
from lockstep.parallel.loss.share_losses import ShareLoss

X = torch.linspace(-2, 2, 18, dtype=torch.float64).reshape(6, 3).cos()
Y = X.flip(0).exp()
MASK = (torch.arange(18).reshape(6, 3) % 7 < 4).double()
TOKENS = torch.tensor([2, -100, 0, -100, -100, 1])
MODEL = torch.nn.Sequential(
    torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.5)
).double()


def bce(x: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(x, MASK[: len(x)], weight=Y[:1])


def grown(x: Tensor) -> Tensor:
    loss = F.mse_loss(x, Y)
    loss += 0.5 * F.l1_loss(x, Y)
    return loss


SEEN: dict[str, tuple[Callable[[Tensor], Tensor], float | None]] = {
    "cross-entropy": (lambda x: F.cross_entropy(x @ x.T, TOKENS), 3.0),
    "a factor": (lambda x: 0.5 * F.cross_entropy(x @ x.T, TOKENS).float(), 3.0),
    "a mean": (lambda x: ((x - Y) ** 2).mean(), 18.0),
    "of what is selected": (lambda x: F.mse_loss(x[MASK > 0], Y[MASK > 0]), 12.0),
    "a masked mean": (lambda x: ((x - Y).abs() * MASK).sum() / MASK.sum(), 12.0),
    "a sum of cross-entropies": (
        lambda x: F.cross_entropy(x, TOKENS, reduction="sum") / (TOKENS != -100).sum(),
        3.0,
    ),
    "two of one weight": (lambda x: F.mse_loss(x, Y) + x.square().mean() / 2, 18.0),
    "in place": (grown, 18.0),
    "weights of elements": (bce, 18.0),
    "a batch mean": (
        lambda x: F.kl_div(x.log_softmax(1), Y.softmax(1), reduction="batchmean"),
        6.0,
    ),
}
# Taken to be means over the samples.
UNSEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "a root": lambda x: F.mse_loss(x, Y).sqrt(),
    "two of different weights": lambda x: F.mse_loss(x, Y) + F.cross_entropy(x, TOKENS),
    "clamped": lambda x: (x * MASK).sum() / MASK.sum().clamp(min=13),
    "over what is trained": lambda x: x.exp().sum() / x.square().sum(),
    "changed in place": lambda x: F.mse_loss(x, Y).sqrt_(),
}


def batch_of(inputs: Tensor) -> Batch:
    return Batch(inputs=inputs, targets=None, sample_weight=None, num_samples=len(inputs))


def read(function: Callable[[Tensor], Tensor], x: Tensor = X) -> ShareLoss:
    leaf = x.clone().requires_grad_()
    step = StepFunction(function=lambda model, batch: function(batch * 1.0))
    return step.loss_of(MODEL, batch_of(leaf), 6)


@pytest.mark.parametrize("name", SEEN)
def test_what_it_is_a_mean_over_is_seen(name: str) -> None:
    function, weight = SEEN[name]
    share = read(function)
    assert share.weight == weight
    assert share.total == pytest.approx(float(function(X)) * float(weight or 0), rel=1e-6)


@pytest.mark.parametrize("name", UNSEEN)
def test_others_are_means_over_samples(name: str) -> None:
    assert read(UNSEEN[name]).weight == 6.0


def test_a_sum_is_one() -> None:
    share = read(lambda x: F.mse_loss(x, Y, reduction="sum") / 4)
    assert share.sums == ((6 * float((X - Y).square().sum()) / 4, 6.0),)


def test_a_loss_that_is_seen_at_times_is_refused() -> None:
    step = StepFunction(function=lambda model, x: x.mean() if len(x) > 4 else x.mean().sqrt())
    x = X.abs().requires_grad_()
    step.loss_of(MODEL, batch_of(x * 1), 9)
    with pytest.raises(LossError, match="must have the same reduction in every step"):
        step.loss_of(MODEL, batch_of(x[:3] * 1), 9)


# --- compared with its halves -------------------------------------------------------------------


def noisy(model: Any, x: Tensor) -> Tensor:
    """As in a diffusion: what is drawn differs from share to share."""
    noise, time = torch.randn_like(x), torch.randint(9, (len(x), 1))
    loss: Tensor = F.mse_loss(model(x + time * noise), noise)
    return loss


GOOD: dict[str, Callable[[Any, Tensor], Any]] = {
    "with dropout and BatchNorm": lambda model, x: model(x).exp().square().mean(1).mean(),
    "with noise": noisy,
    "a masked mean": lambda model, x: (model(x) * (x > 0)).sum() / (x > 0).sum(),
    "a pair": lambda model, x: ((model(x) * (x > 0)).sum(), (x > 0).sum()),
    "in training only": lambda model, x: model(x).square().mean() if model.training else None,
    "a permutation, which is not compared": lambda model, x: (
        model(x[torch.randperm(len(x))]).norm(dim=1).mean().square()
    ),
}
BAD: dict[str, Callable[[Any, Tensor], Any]] = {
    "a masked mean with a floor": lambda model, x: (
        (model(x).square() * (x > 0)).sum() / ((x > 0).sum() + 1)
    ),
    "a root": lambda model, x: model(x).square().mean().sqrt(),
    "a contrast": lambda model, x: F.cross_entropy(model(x) @ x.T, torch.arange(len(x))),
    "a contrast of values": lambda model, x: F.cross_entropy(
        model(x) @ x.T, torch.arange(len(x)), reduction="none"
    ),
    "weights that are no counts": lambda model, x: (model(x).sum(), (x > 0).double().mean()),
}


def check(function: Callable[[Any, Tensor], Any], num_samples: int = 5) -> None:
    step = StepFunction(function=function)
    check_mean(MODEL, lambda part: step.loss_of(MODEL, part, 6), batch_of(X[:num_samples]))


@pytest.mark.parametrize("name", GOOD)
def test_means_are_let_through(name: str) -> None:
    stream = torch.get_rng_state()
    before = {name: value.clone() for name, value in MODEL.state_dict().items()}
    for num_samples in (1, 2, 5):
        check(GOOD[name], num_samples)
    assert torch.get_rng_state().equal(stream)
    assert all(value.equal(before[name]) for name, value in MODEL.state_dict().items())
    assert all(module.training for module in MODEL.modules())


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_mean_is_refused(name: str) -> None:
    with pytest.raises(LossError, match="must be a weighted mean"):
        check(BAD[name])


def test_few_steps_are_tried() -> None:
    assert [step for step in range(5000) if is_tried(step)] == [0, 256, 512, 1024, 2048, 4096]
    assert not is_tried(None)
