"""What is known of a scalar that a loss function returns, and what is not."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.parallel.loss.function_losses import FunctionAdapter
from lockstep.parallel.loss.reduction_inference import Known, KnownMeans
from tests.batches import batch_of

N = 4
LOGITS = torch.linspace(-1, 1, N * 5 * 7, dtype=torch.float64).reshape(N, 5, 7).sin()
TOKENS = torch.arange(N * 5).reshape(N, 5) % 7
TOKENS[1, :3] = -100
WEIGHT = torch.linspace(0, 1, 7, dtype=torch.float64)
X = torch.linspace(-2, 2, N * 3, dtype=torch.float64).reshape(N, 3).cos()
Y = X.flip(0).exp()
COLUMN = torch.linspace(1, 2, 3, dtype=torch.float64)[:, None]

Loss = Callable[[Tensor, Tensor], Any]


def unpacked(logits: Tensor, tokens: Tensor) -> Tensor:
    samples, length, classes = logits.shape
    return F.cross_entropy(
        logits.view(samples * length, classes), tokens.view(samples * length), ignore_index=-100
    )


OF_TOKENS: dict[str, Loss] = {
    "flattened": lambda logits, tokens: F.cross_entropy(logits.flatten(0, 1), tokens.flatten()),
    "viewed": lambda logits, tokens: F.cross_entropy(
        logits.view(-1, logits.size(-1)), tokens.view(-1)
    ),
    "unpacked": unpacked,
    "shifted": lambda logits, tokens: F.cross_entropy(
        logits[:, :-1].reshape(-1, logits.shape[-1]), tokens[..., 1:].reshape(-1)
    ),
    "with weights": lambda logits, tokens: nn.CrossEntropyLoss(weight=WEIGHT)(
        logits.transpose(1, 2), tokens
    ),
    "of log-probabilities": lambda logits, tokens: F.nll_loss(
        logits.log_softmax(-1).permute(0, 2, 1), tokens
    ),
    "time first": lambda logits, tokens: F.cross_entropy(
        logits.transpose(0, 1).flatten(0, 1), tokens.transpose(0, 1).flatten(), weight=WEIGHT
    ),
    "time first, turned as data is": lambda logits, tokens: F.nll_loss(
        logits.movedim(0, 1).contiguous().log_softmax(-1).view(-1, 7),
        tokens.permute(1, 0).reshape(-1),
    ),
}

OF_VALUES: dict[str, Loss] = {
    "squares": lambda x, y: ((x - y) ** 2).mean(),
    "torch's own": lambda x, y: F.smooth_l1_loss(x, y),
    "a sum of two": lambda x, y: F.mse_loss(x, y) + 0.1 * F.l1_loss(x, y),
    "of values and of rows": lambda x, y: F.mse_loss(x, y) + x.square().sum(1).mean(),
    "a list of two": lambda x, y: sum([F.mse_loss(x, y), F.l1_loss(x, y)]),
    "with factors": lambda x, y: 1 - F.mse_loss(x, y) / 4,
    "of rows": lambda x, y: (x.softmax(1) - y).square().sum(dim=1).mean(),
    "one by one": lambda x, y: F.huber_loss(x, y, reduction="none").mean(),
    "a batch mean": lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"),
    "a sum": lambda x, y: (x - y).abs().sum() / 7,
    "torch's own sum": lambda x, y: (
        -F.binary_cross_entropy_with_logits(x, (y > 1).double(), reduction="sum")
    ),
    "picked by hand": lambda x, y: (x.logsumexp(1) - x.gather(1, (y > 1).long())[:, 0]).mean(),
    "of one class against all": lambda x, y: (
        -(F.one_hot((y[:, 0] > 1).long(), 3) * x.log_softmax(1)).sum(1).mean()
    ),
    "time first": lambda x, y: F.l1_loss(x.transpose(0, 1), y.transpose(0, 1)),
    "time first, by elements": lambda x, y: (
        (x.transpose(0, 1) * COLUMN - y.transpose(0, 1)).square().sum()
    ),
    "against one": lambda x, y: F.binary_cross_entropy_with_logits(x, torch.ones_like(x)),
}

UNKNOWN: dict[str, Loss] = {
    "picked from other samples": lambda x, y: x.gather(0, (y > 9).long()).mean(),
    "as many classes as there are": lambda x, y: (
        F.one_hot((y > 1).long()).double().mean() * x.mean()
    ),
    "classes by the batch": lambda x, y: (
        (F.one_hot((y[:, 0] > 9).long(), len(y)) * x.sum(1, keepdim=True)).double().mean()
    ),
    "a root": lambda x, y: F.mse_loss(x, y).sqrt(),
    "a product of the batch": lambda x, y: F.cross_entropy(x @ y.T, torch.arange(len(x))),
    "normalised by the batch": lambda x, y: F.mse_loss(x / x.sum(), y),
    "along the samples": lambda x, y: F.mse_loss(x.softmax(0), y),
    "centred": lambda x, y: F.mse_loss(x - x.mean(0), y),
    "turned": lambda x, y: F.mse_loss(x.T.softmax(-1), y.T),
    "turned, and along the samples": lambda x, y: F.mse_loss(
        x.transpose(0, 1).softmax(1), y.transpose(0, 1)
    ),
    "one turned, one not": lambda x, y: F.mse_loss(x.transpose(0, 1).flatten(), y.flatten()),
    "turned, other rows": lambda x, y: F.mse_loss(
        x.transpose(0, 1).reshape(-1, 1, 1), y.transpose(0, 1).reshape(-1, 1, 1)
    ),
    "turned, with a weight for each sample": lambda x, y: (
        (x.transpose(0, 1) * torch.arange(len(x)) - y.transpose(0, 1)).square().mean()
    ),
    "in another order": lambda x, y: F.mse_loss(x.flip(0), y),
    "a number": lambda x, y: F.mse_loss(x, y) * x.sum().item(),
    "a decision": lambda x, y: F.mse_loss(x, y) if x.sum() < 100 else x.sum(),
    "a mask": lambda x, y: F.mse_loss(x[y > 1], y[y > 1]),
    "changed in place": lambda x, y: F.mse_loss(x.clone().mul_(2), y),
    "the largest": lambda x, y: F.mse_loss(x, y, reduction="none").flatten().topk(3)[0].mean(),
    "a mean and a sum": lambda x, y: F.mse_loss(x, y) + F.mse_loss(x, y, reduction="sum"),
    "two denominators": lambda x, y: (
        F.mse_loss(x, y) + F.cross_entropy(x, torch.where(y[:, 0] > 1, 1, -100), weight=WEIGHT[:3])
    ),
    "by their number": lambda x, y: (x - y).square().sum() / len(x),
    "by their number within": lambda x, y: ((x - y) / x.shape[0]).square().sum(),
    "weighted by the batch": lambda x, y: F.binary_cross_entropy_with_logits(
        x, (y > 1).double(), pos_weight=y.sum()
    ),
    "chance": lambda x, y: F.mse_loss(F.dropout(x), y),
    "numpy": lambda x, y: F.mse_loss(x, torch.from_numpy(y.numpy() / y.numpy().sum())),
    "one row": lambda x, y: F.mse_loss(x.reshape(1, -1).softmax(1), y.reshape(1, -1)),
    "a constant": lambda x, y: x.new_zeros(()),
    "pairs": lambda x, y: (x[:, 0] - y[:, :1]).square().mean(),
}


def known(loss: Loss, output: Tensor, target: Tensor) -> Known | None:
    watching = KnownMeans((output, target), len(output))
    with watching:
        returned = loss(output, target)
    return watching.known(returned)


def of_shares(loss: Loss, output: Tensor, target: Tensor) -> float:
    """The loss of a batch from three shares of it, one of a single sample."""
    adapter = FunctionAdapter(loss)
    adapter.begin(len(output), 3)
    parts = [slice(0, 2), slice(2, 3), slice(3, None)]
    shares = [adapter(output[rows], batch_of(target[rows])) for rows in parts]
    assert not any(share.is_guess for share in shares)
    return math.fsum(share.total for share in shares) / math.fsum(share.weight for share in shares)


@pytest.mark.parametrize("name", OF_TOKENS)
def test_denominators_of_classes_are_known(name: str) -> None:
    loss = OF_TOKENS[name]
    output = LOGITS.clone().requires_grad_() * 1
    assert of_shares(loss, output, TOKENS) == pytest.approx(loss(LOGITS, TOKENS).item(), rel=1e-14)


@pytest.mark.parametrize("name", OF_VALUES)
def test_means_and_sums_of_values_are_known(name: str) -> None:
    loss = OF_VALUES[name]
    output = X.clone().requires_grad_() * 1
    assert of_shares(loss, output, Y) == pytest.approx(float(loss(X, Y)), rel=1e-14)


@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.parametrize("num_samples", [1, N])
def test_nobody_knows_the_rest(name: str, num_samples: int) -> None:
    output = X[:num_samples].clone().requires_grad_() * 1
    assert known(UNKNOWN[name], output, Y[:num_samples]) is None


def test_a_parameter_that_a_model_returns_belongs_to_no_sample() -> None:
    prototypes = nn.Parameter(X)
    assert known(lambda x, y: F.mse_loss(x, y), prototypes, Y) is None


def test_a_share_in_which_nothing_counts_adds_nothing() -> None:
    output = LOGITS.clone().requires_grad_()
    tokens = torch.full_like(TOKENS, -100)
    share = FunctionAdapter(OF_TOKENS["flattened"])(output * 1, batch_of(tokens))
    assert (share.total, share.weight) == (0.0, 0.0)
    share.backward(1.0)
    assert output.grad is not None
    assert not output.grad.any()
