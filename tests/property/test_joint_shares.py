"""However a batch is divided into shares, several losses add up to those of the whole batch."""

import math

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lockstep.parallel.loss.joint_losses import JointAdapter
from tests.batches import batch_of
from tests.property.test_loss_shares import TOLERANCE, Division, divisions, normal

CLASSES, IGNORED = 4, -100
FACTORS = st.floats(-2, 2)


def make_batch(division: Division) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (n, classes), classes of which some are ignored, weights of which some are zero."""
    generator = torch.Generator().manual_seed(division.seed)
    size = division.num_samples
    logits = normal(generator, size, CLASSES)
    targets = torch.randint(CLASSES, (size,), generator=generator)
    targets[torch.rand(size, generator=generator) < 0.5] = IGNORED
    weight = torch.randint(3, (size,), generator=generator).double()
    return logits, targets, weight


def whole_loss(
    logits: Tensor, targets: Tensor, weight: Tensor, factors: list[float]
) -> Tensor | None:
    """The formula: sum of factor times weighted mean, over what weighs anything."""
    counted = weight * (targets != IGNORED)
    each = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
    terms = []
    if counted.sum():
        terms.append(factors[0] * (each * weight).sum() / counted.sum())
    if weight.sum():
        squares = logits.square().mean(1)
        terms.append(factors[1] * (squares * weight).sum() / weight.sum())
    return sum(terms, torch.zeros((), dtype=torch.float64)) if terms else None


@given(divisions(), st.tuples(FACTORS, FACTORS).map(list))
def test_shares_add_up(division: Division, factors: list[float]) -> None:
    logits, targets, weight = make_batch(division)
    adapter = JointAdapter({"classes": nn.CrossEntropyLoss(), "size": nn.MSELoss()}, factors)
    leaf = logits.clone().requires_grad_()
    joint = []
    for low, high in division.bounds:
        outputs = {"classes": leaf[low:high], "size": leaf[low:high]}
        both = {"classes": targets[low:high], "size": torch.zeros(high - low, CLASSES).double()}
        joint.append(adapter(outputs, batch_of(both, weight[low:high])))
    weights = [math.fsum(column) for column in zip(*(one.weights for one in joint), strict=True)]
    shares = [one.settled(weights, division.num_samples) for one in joint]
    for share in shares:
        share.backward(float(division.num_samples))

    other = logits.clone().requires_grad_()
    expected = whole_loss(other, targets, weight, factors)
    if expected is None:
        assert all(share.weight == 0 for share in shares)
        assert leaf.grad is None
        return
    assert math.fsum(share.weight for share in shares) == division.num_samples
    total = math.fsum(share.total for share in shares) / division.num_samples
    scale = max(1.0, *map(abs, factors)) * max(1.0, logits.square().sum().item())
    assert abs(total - expected.item()) <= TOLERANCE * scale
    (gradient,) = torch.autograd.grad(expected, other)
    assert leaf.grad is not None
    assert (leaf.grad - gradient).norm() <= TOLERANCE * scale
    logs = adapter.parts.logs([one.sums for one in joint])
    assert abs(logs["loss"] - expected.item()) <= TOLERANCE * scale
