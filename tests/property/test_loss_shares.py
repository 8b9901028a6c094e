"""However a batch is divided into shares, their losses add up to the loss of the whole batch.

The reference is torch's own loss on the whole batch, or a formula written out here, in float64.
"""

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor, nn

from lockstep.parallel.loss.function_losses import FunctionAdapter
from tests.batches import batch_of

CLASSES = 5
IGNORED = 2  # a class, so that random targets hold it
TOLERANCE = 1e-13

CLASS_WEIGHT = torch.tensor([0.5, 2.0, 1.0, 0.25, 3.0], dtype=torch.float64)


class RenamedCrossEntropy(nn.CrossEntropyLoss):
    """A subclass that leaves what is computed alone."""


@dataclass(frozen=True)
class Division:
    """A batch and where it is cut into shares."""

    num_samples: int
    cuts: tuple[int, ...]
    seed: int

    @property
    def bounds(self) -> list[tuple[int, int]]:
        edges = [0, *self.cuts, self.num_samples]
        return [(low, high) for low, high in pairwise(edges) if low < high]


@st.composite
def divisions(draw: st.DrawFn) -> Division:
    num_samples = draw(st.integers(1, 12))
    cuts = draw(st.lists(st.integers(0, num_samples), max_size=4).map(sorted))
    return Division(num_samples, tuple(cuts), draw(st.integers(0, 1000)))


def normal(generator: Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def recombine(
    loss: Any, output: Tensor, target: Tensor, weight: Tensor | None, division: Division
) -> tuple[float, Tensor, float]:
    """(loss, its gradient, the weight) as a Worker puts them together from the shares."""
    adapter = FunctionAdapter(loss)
    leaf = output.clone().requires_grad_()
    totals, weights = [], []
    for low, high in division.bounds:
        part = None if weight is None else weight[low:high]
        share = adapter(leaf[low:high], batch_of(target[low:high], part))
        share.backward(float(division.num_samples))
        totals.append(share.total)
        weights.append(share.weight)
    total, weight_sum = math.fsum(totals), math.fsum(weights)
    assert leaf.grad is not None
    if weight_sum == 0:
        return total, leaf.grad, 0.0
    return total / weight_sum, leaf.grad * (division.num_samples / weight_sum), weight_sum


def assert_equal_to_whole(
    whole: Callable[[Tensor], Tensor],
    loss: Any,
    output: Tensor,
    target: Tensor,
    weight: Tensor | None,
    division: Division,
) -> None:
    value, gradient, weight_sum = recombine(loss, output, target, weight, division)
    leaf = output.clone().requires_grad_()
    reference = whole(leaf)
    if weight_sum == 0:  # torch divides by zero: there is nothing to compare with
        assert value == 0
        assert not gradient.any()
        assert not torch.isfinite(reference)
        return
    (expected,) = torch.autograd.grad(reference, leaf)
    assert abs(value - reference.item()) <= TOLERANCE * max(1.0, abs(reference.item()))
    assert (gradient - expected).norm() <= TOLERANCE * max(1.0, expected.norm().item())


# --- losses over classes --------------------------------------------------------------------------

CLASS_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ignore_index": {"ignore_index": IGNORED},
    "class weights": {"weight": CLASS_WEIGHT},
    "class weights and ignore_index": {"weight": CLASS_WEIGHT, "ignore_index": IGNORED},
}
SMOOTH: dict[str, Any] = {"label_smoothing": 0.2}

CLASS_LOSSES: dict[str, Any] = {}
for name, options in CLASS_OPTIONS.items():
    CLASS_LOSSES |= {
        f"CrossEntropyLoss, {name}": nn.CrossEntropyLoss(**options),
        f"smoothed CrossEntropyLoss, {name}": nn.CrossEntropyLoss(**options, **SMOOTH),
        f"cross_entropy, {name}": functools.partial(F.cross_entropy, **options),
        f"smoothed cross_entropy, {name}": functools.partial(F.cross_entropy, **options, **SMOOTH),
        f"NLLLoss, {name}": nn.NLLLoss(**options),
        f"nll_loss, {name}": functools.partial(F.nll_loss, **options),
    }
CLASS_LOSSES |= {
    "bare cross_entropy": F.cross_entropy,
    "bare nll_loss": F.nll_loss,
    "partial of a partial": functools.partial(
        functools.partial(F.cross_entropy, ignore_index=0), ignore_index=IGNORED
    ),
    "subclass": RenamedCrossEntropy(ignore_index=IGNORED),
    "class weights of another dtype": nn.CrossEntropyLoss(weight=CLASS_WEIGHT.float()),
}


def class_targets(generator: Generator, *shape: int) -> Tensor:
    return torch.randint(CLASSES, shape, generator=generator)


def in_double(loss: Any) -> Any:
    """The same loss for the reference: torch takes no class weights of another dtype."""
    return copy.deepcopy(loss).double() if isinstance(loss, nn.Module) else loss


@pytest.mark.parametrize(
    "places",
    [(3,), *(pytest.param(each, marks=pytest.mark.thorough) for each in ((), (2, 3)))],
    ids=str,
)
@pytest.mark.parametrize("name", CLASS_LOSSES)
@given(division=divisions())
@settings(max_examples=20)
def test_class_losses(name: str, places: tuple[int, ...], division: Division) -> None:
    loss = CLASS_LOSSES[name]
    generator = Generator().manual_seed(division.seed)
    output = normal(generator, division.num_samples, CLASSES, *places).log_softmax(1)
    target = class_targets(generator, division.num_samples, *places)
    whole = in_double(loss)
    assert_equal_to_whole(lambda leaf: whole(leaf, target), loss, output, target, None, division)


@pytest.mark.parametrize("places", [(), (3,)], ids=str)
@pytest.mark.parametrize("options", [{}, {"weight": CLASS_WEIGHT}, SMOOTH], ids=lambda one: [*one])
@given(division=divisions())
@settings(max_examples=20)
def test_probability_targets(
    options: dict[str, Any], places: tuple[int, ...], division: Division
) -> None:
    generator = Generator().manual_seed(division.seed)
    shape = (division.num_samples, CLASSES, *places)
    target = normal(generator, *shape).softmax(1)
    loss = nn.CrossEntropyLoss(**options)
    output = normal(generator, *shape)
    assert_equal_to_whole(lambda leaf: loss(leaf, target), loss, output, target, None, division)


@pytest.mark.parametrize("name", ["CrossEntropyLoss, ignore_index", "nll_loss, ignore_index"])
@given(division=divisions())
@settings(max_examples=20)
def test_a_share_whose_targets_are_all_ignored_counts_nothing(
    name: str, division: Division
) -> None:
    generator = Generator().manual_seed(division.seed)
    output = normal(generator, division.num_samples, CLASSES)
    target = class_targets(generator, division.num_samples)
    low, high = division.bounds[-1]
    target[low:high] = IGNORED
    share = FunctionAdapter(CLASS_LOSSES[name])(output[low:high], batch_of(target[low:high]))
    assert (share.total, share.weight) == (0, 0)
    loss = CLASS_LOSSES[name]
    assert_equal_to_whole(lambda leaf: loss(leaf, target), loss, output, target, None, division)


# --- losses that are plain means ------------------------------------------------------------------

MEANS: dict[str, Any] = {
    "MSELoss": nn.MSELoss(),
    "mse_loss": F.mse_loss,
    "L1Loss": nn.L1Loss(),
    "SmoothL1Loss": nn.SmoothL1Loss(beta=0.3),
    "partial smooth_l1_loss": functools.partial(F.smooth_l1_loss, beta=0.3),
    "HuberLoss": nn.HuberLoss(delta=0.4),
    "BCEWithLogitsLoss": nn.BCEWithLogitsLoss(),
    "BCEWithLogitsLoss with pos_weight": nn.BCEWithLogitsLoss(pos_weight=CLASS_WEIGHT),
    "SoftMarginLoss": nn.SoftMarginLoss(),
    "PoissonNLLLoss": nn.PoissonNLLLoss(),
    "KLDivLoss": nn.KLDivLoss(),
    "MultiLabelSoftMarginLoss": nn.MultiLabelSoftMarginLoss(weight=CLASS_WEIGHT),
    "a function of the user's": lambda output, target: ((output - target) ** 4).mean(),
}


def mean_problem(division: Division) -> tuple[Tensor, Tensor, Tensor]:
    generator = Generator().manual_seed(division.seed)
    output = normal(generator, division.num_samples, CLASSES).log_softmax(1)
    target = torch.rand(output.shape, generator=generator, dtype=torch.float64)
    weight = torch.randint(4, (division.num_samples,), generator=generator).double() / 2
    return output, target, weight


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("name", MEANS)
@given(division=divisions())
@settings(max_examples=20)
def test_means_over_samples(name: str, division: Division) -> None:
    output, target, _ = mean_problem(division)
    loss = MEANS[name]
    assert_equal_to_whole(lambda leaf: loss(leaf, target), loss, output, target, None, division)


@given(division=divisions())
@settings(max_examples=20)
def test_margins_of_classes(division: Division) -> None:
    loss = nn.MultiMarginLoss(weight=CLASS_WEIGHT)
    generator = Generator().manual_seed(division.seed)
    output = normal(generator, division.num_samples, CLASSES)
    target = class_targets(generator, division.num_samples)
    assert_equal_to_whole(lambda leaf: loss(leaf, target), loss, output, target, None, division)


@given(division=divisions())
@settings(max_examples=20)
def test_values_per_sample(division: Division) -> None:
    generator = Generator().manual_seed(division.seed)
    output = normal(generator, division.num_samples, CLASSES)
    target = class_targets(generator, division.num_samples)
    loss = nn.CrossEntropyLoss(reduction="none")
    assert_equal_to_whole(
        lambda leaf: F.cross_entropy(leaf, target), loss, output, target, None, division
    )


@given(division=divisions())
@settings(max_examples=20)
def test_pairs_of_total_and_weight(division: Division) -> None:
    output, target, weight = mean_problem(division)
    rows = torch.cat([target, weight[:, None]], dim=1)

    def loss(output: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        squares = (output - rows[:, :-1]).square().sum(1)
        return (squares * rows[:, -1]).sum(), rows[:, -1].sum()

    def whole(leaf: Tensor) -> Tensor:
        total, weight_sum = loss(leaf, rows)
        return total / weight_sum

    assert_equal_to_whole(whole, loss, output, rows, None, division)


# --- sample weights -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["MSELoss", "partial smooth_l1_loss", "BCEWithLogitsLoss with pos_weight"]
)
@given(division=divisions())
@settings(max_examples=20)
def test_sample_weights_with_means(name: str, division: Division) -> None:
    output, target, weight = mean_problem(division)
    loss = MEANS[name]
    unreduced: dict[str, Callable[..., Tensor]] = {
        "MSELoss": nn.MSELoss(reduction="none"),
        "partial smooth_l1_loss": nn.SmoothL1Loss(reduction="none", beta=0.3),
        "BCEWithLogitsLoss with pos_weight": nn.BCEWithLogitsLoss(
            reduction="none", pos_weight=CLASS_WEIGHT
        ),
    }

    def whole(leaf: Tensor) -> Tensor:
        return (unreduced[name](leaf, target).mean(1) * weight).sum() / weight.sum()

    assert_equal_to_whole(whole, loss, output, target, weight, division)


@pytest.mark.parametrize("places", [(), (3,)], ids=str)
@given(division=divisions())
@settings(max_examples=20)
def test_sample_weights_with_class_weights_and_ignored_targets(
    places: tuple[int, ...], division: Division
) -> None:
    generator = Generator().manual_seed(division.seed)
    output = normal(generator, division.num_samples, CLASSES, *places)
    target = class_targets(generator, division.num_samples, *places)
    _, _, weight = mean_problem(division)
    loss = nn.CrossEntropyLoss(weight=CLASS_WEIGHT, ignore_index=IGNORED)

    def whole(leaf: Tensor) -> Tensor:
        terms = -leaf.log_softmax(1).gather(1, target.unsqueeze(1)).squeeze(1)
        factors = CLASS_WEIGHT[target] * (target != IGNORED)
        factors = factors * weight.reshape(-1, *[1] * len(places))
        return (terms * factors).sum() / factors.sum()

    assert_equal_to_whole(whole, loss, output, target, weight, division)


@given(division=divisions())
@settings(max_examples=20)
def test_sample_weights_with_values_per_sample(division: Division) -> None:
    output, target, weight = mean_problem(division)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).abs().pow(3).sum(1)

    def whole(leaf: Tensor) -> Tensor:
        return (loss(leaf, target) * weight).sum() / weight.sum()

    assert_equal_to_whole(whole, loss, output, target, weight, division)


@given(division=divisions())
@settings(max_examples=20)
def test_a_loss_that_weighs_for_itself(division: Division) -> None:
    output, target, weight = mean_problem(division)

    def loss(
        output: Tensor, target: Tensor, power: int = 2, *, sample_weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        values = (output - target).pow(power).sum(1)
        return (values * sample_weight).sum(), sample_weight.sum()

    def whole(leaf: Tensor) -> Tensor:
        total, weight_sum = loss(leaf, target, sample_weight=weight)
        return total / weight_sum

    assert_equal_to_whole(whole, loss, output, target, weight, division)
