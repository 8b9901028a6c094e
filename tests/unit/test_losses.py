"""The contract of losses: what is read from each form, and what is refused with a reason."""

import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import LossError
from lockstep.parallel.loss.function_losses import FunctionAdapter
from lockstep.parallel.loss.share_losses import ShareLoss
from tests.batches import batch_of

NUM_SAMPLES = 4
OUTPUT = torch.tensor([[1.0, 2.0, 4.0], [0.0, 0.5, 1.0], [3.0, 3.0, 3.0], [1.0, 0.0, 0.0]])
TARGET = torch.tensor([0, 1, 2, 1])
WEIGHT = torch.tensor([1.0, 0.0, 2.0, 0.5])


def share_of(loss: Any, sample_weight: Tensor | None = None) -> ShareLoss:
    """Of a batch that is one share."""
    adapter = FunctionAdapter(loss)
    adapter.begin(NUM_SAMPLES, 1)
    return adapter(OUTPUT.clone().requires_grad_(), batch_of(TARGET, sample_weight))


# --- the three forms ----------------------------------------------------------------------------


def test_a_scalar_is_the_mean_over_the_samples() -> None:
    share = share_of(lambda output, target: output.sum() / 8)
    assert (share.total, share.weight) == (18.5 / 8 * 4, 4.0)


def test_values_per_sample_are_added_up() -> None:
    share = share_of(lambda output, target: output.sum(1))
    assert (share.total, share.weight) == (18.5, 4.0)


def test_values_per_sample_are_weighted() -> None:
    share = share_of(lambda output, target: output.sum(1), WEIGHT)
    assert (share.total, share.weight) == (7 + 2 * 9 + 0.5, 3.5)


@pytest.mark.parametrize("weight", [6, 6.0, torch.tensor(6), torch.tensor([6.0])], ids=repr)
@pytest.mark.parametrize("kind", [tuple, list])
def test_a_pair_is_a_total_and_its_weight(kind: Any, weight: Any) -> None:
    share = share_of(lambda output, target: kind([output.sum(), weight]))
    assert (share.total, share.weight) == (18.5, 6.0)


def test_backward_divides_by_what_it_is_told() -> None:
    for form in (
        lambda output, target: output.sum() / 4,
        lambda output, target: output.sum(1),
        lambda output, target: (output.sum(), 4),
    ):
        output = OUTPUT.clone().requires_grad_()
        FunctionAdapter(form)(output, batch_of(TARGET)).backward(8.0)
        assert output.grad is not None
        assert torch.equal(output.grad, torch.full_like(output, 1 / 8))


def test_totals_are_summed_in_float64() -> None:
    values = torch.full((NUM_SAMPLES,), 1 / 3) + torch.tensor([1e4, 0, 0, 0])
    share = share_of(lambda output, target: values)
    assert share.total == math.fsum(values.double().tolist())


def test_a_loss_is_called_with_output_and_target() -> None:
    seen = []

    def loss(output: Any, target: Any) -> Tensor:
        seen.append((output, target))
        return torch.zeros(())

    structure = {"logits": OUTPUT}
    FunctionAdapter(loss)(structure, batch_of((TARGET, None)))
    assert seen == [(structure, (TARGET, None))]


def test_one_sample_may_be_a_scalar_or_a_value() -> None:
    for loss in (nn.MSELoss(), lambda output, target: (output - target).square().mean(1)):
        share = FunctionAdapter(loss)(OUTPUT[:1], batch_of(torch.zeros(1, 3)))
        assert (share.total, share.weight) == (7.0, 1.0)


# --- sample weights -----------------------------------------------------------------------------


class WithWeight(nn.Module):
    def forward(self, output: Tensor, target: Tensor, sample_weight: Any = None) -> Any:
        if sample_weight is None:
            return output.sum(1)
        return (output.sum(1) * sample_weight).sum(), sample_weight.sum()


def scaled(output: Tensor, target: Tensor, scale: float = 1.0, *, sample_weight: Any = None) -> Any:
    weight = torch.ones(len(output)) if sample_weight is None else sample_weight
    return (scale * output.sum(1) * weight).sum(), weight.sum()


@pytest.mark.parametrize(
    ("loss", "total"),
    [(WithWeight(), 25.5), (scaled, 25.5), (functools.partial(scaled, scale=2.0), 51.0)],
    ids=["a module", "a keyword", "a partial"],
)
def test_a_loss_that_names_sample_weight_gets_it(loss: Any, total: float) -> None:
    share = share_of(loss, WEIGHT)
    assert (share.total, share.weight) == (total, 3.5)
    assert share_of(loss).weight == 4.0  # and needs none


def test_a_share_of_weight_zero_counts_nothing() -> None:
    for loss in (nn.CrossEntropyLoss(), nn.MSELoss(), lambda output, target: output.sum(1)):
        target = TARGET if isinstance(loss, nn.CrossEntropyLoss) else OUTPUT + 1
        share = FunctionAdapter(loss)(OUTPUT, batch_of(target, torch.zeros(NUM_SAMPLES)))
        assert (share.total, share.weight) == (0.0, 0.0)


def test_functions_without_a_reduction_give_values_per_sample() -> None:
    output = OUTPUT + 1
    share = FunctionAdapter(F.cosine_similarity)(output, batch_of(output * 2, WEIGHT))
    assert share.total == pytest.approx(3.5)
    assert share.weight == 3.5


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_shows_even_with_weight_zero(bad: float) -> None:
    """Its gradient would be NaN whatever its weight, so the total must not hide it."""
    values = torch.tensor([1.0, bad, 1.0, 1.0])
    share = share_of(lambda output, target: values, WEIGHT)
    assert not math.isfinite(share.total)
    output = torch.zeros(NUM_SAMPLES, requires_grad=True)
    FunctionAdapter(lambda output, target: (output * bad).exp().log())(
        output, batch_of(TARGET, WEIGHT)
    ).backward(1.0)
    assert output.grad is not None
    assert not bool(output.grad.isfinite().all())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_pair_of_no_weight_and_no_number_is_nothing(bad: float) -> None:
    output = OUTPUT.clone().requires_grad_()
    adapter = FunctionAdapter(lambda output, target: (output["logits"].sum() * bad, 0))
    share = adapter({"logits": output, "other": None}, batch_of(TARGET))
    assert (share.total, share.weight) == (0.0, 0.0)
    share.backward(4.0)
    assert output.grad is not None
    assert output.grad.tolist() == torch.zeros_like(OUTPUT).tolist()


def test_a_constant_of_no_weight_goes_backward_with_zeros() -> None:
    output = OUTPUT.clone().requires_grad_()
    adapter = FunctionAdapter(lambda output, target: (torch.tensor(0.5), 0))
    share = adapter(output, batch_of(TARGET))
    assert (share.total, share.weight) == (0.5, 0.0)
    share.backward(4.0)
    assert output.grad is not None
    assert output.grad.tolist() == torch.zeros_like(OUTPUT).tolist()


def test_torchs_own_losses_hide_no_nan_behind_a_weight_of_zero() -> None:
    """On one device, beside samples that count, it would be NaN as well."""
    share = FunctionAdapter(nn.CrossEntropyLoss())(
        OUTPUT * math.nan, batch_of(TARGET, torch.zeros(NUM_SAMPLES))
    )
    assert math.isnan(share.total)


def test_a_loss_may_change_after_the_trainer_is_made() -> None:
    loss = nn.CrossEntropyLoss()
    adapter = FunctionAdapter(loss)
    weight = torch.tensor([1.0, 2.0, 3.0])
    for change in ({"label_smoothing": 0.5}, {"weight": weight}, {"ignore_index": 1}):
        vars(loss).update({key: value for key, value in change.items() if key != "weight"})
        if "weight" in change:
            loss.weight = weight
        share = adapter(OUTPUT, batch_of(TARGET))
        assert share.total / share.weight == pytest.approx(loss(OUTPUT, TARGET).item(), rel=1e-6)
    loss.reduction = "sum"
    adapter.begin(12, 3)
    share = adapter(OUTPUT, batch_of(TARGET))
    assert share.total == pytest.approx(12 * loss(OUTPUT, TARGET).item())
    assert share.weight == 4.0


# --- what is refused ----------------------------------------------------------------------------

RETURNED: dict[str, tuple[Any, str]] = {
    "a number": (1.0, "Received: float"),
    "nothing": (None, "NoneType"),
    "a dict": ({"loss": torch.zeros(())}, "dict"),
    "three parts": ((torch.zeros(()),) * 3, "tuple"),
    "a value per element": (torch.zeros(NUM_SAMPLES, 3), r"shape \(4, 3\) for 4 samples"),
    "too few values": (torch.zeros(3), r"shape \(3,\) for 4 samples"),
    "a value in a list": (torch.zeros(1), r"shape \(1,\) for 4 samples"),
    "totals with dims": ((torch.zeros(4), 4), r"total is a tensor of shape \(4,\)"),
    "a total that is a number": ((1.0, 4), "total is float"),
    "weights with dims": ((torch.zeros(()), torch.ones(4)), r"weight is a tensor of shape \(4,\)"),
    "no weight": ((torch.zeros(()), None), "weight is NoneType"),
    "a negative weight": ((torch.zeros(()), -1.0), r"weight is -1\.0"),
    "a weight that is no number": ((torch.zeros(()), math.nan), "weight is nan"),
    "two losses": (
        (torch.zeros(()), torch.ones((), requires_grad=True)),
        "weight depends on trainable parameters",
    ),
}


@pytest.mark.parametrize("name", RETURNED)
def test_a_loss_that_returns_something_else_is_told_what_is_agreed(name: str) -> None:
    returned, message = RETURNED[name]
    with pytest.raises(LossError, match=rf"must return a scalar, values of shape.*{message}"):
        share_of(lambda output, target: returned)


WITHOUT_WEIGHTS: dict[str, tuple[Any, str]] = {
    "a scalar": (lambda output, target: output.sum(), "must return a value for each sample"),
    "a pair": (lambda output, target: (output.sum(), 4), "must weigh the samples itself"),
    "a scalar in spite of the argument": (
        lambda output, target, sample_weight: output.sum(),
        r"must return a pair \(total, weight\).*Received: Tensor",
    ),
}


@pytest.mark.parametrize("name", WITHOUT_WEIGHTS)
def test_a_loss_that_cannot_weigh_samples_is_refused(name: str) -> None:
    loss, message = WITHOUT_WEIGHTS[name]
    with pytest.raises(LossError, match=message):
        share_of(loss, WEIGHT)


@pytest.mark.parametrize(
    ("loss", "target"),
    [
        (nn.MSELoss(reduction="sum"), OUTPUT + 1),
        (nn.CrossEntropyLoss(reduction="sum"), TARGET),
        (functools.partial(F.cross_entropy, reduction="sum"), TARGET),
        (
            functools.partial(functools.partial(F.mse_loss, reduction="mean"), reduction="sum"),
            OUTPUT + 1,
        ),
    ],
    ids=["MSELoss", "CrossEntropyLoss", "cross_entropy", "mse_loss, set twice"],
)
def test_a_sum_of_a_batch_is_the_sum_of_its_shares(loss: Any, target: Tensor) -> None:
    adapter = FunctionAdapter(loss)
    adapter.begin(NUM_SAMPLES, 2)
    assert adapter.is_certain
    shares = [adapter(OUTPUT[rows], batch_of(target[rows])) for rows in (slice(2), slice(2, None))]
    total, weight = (sum(column) for column in zip(*(one.sums[0] for one in shares), strict=True))
    assert total / weight == pytest.approx(loss(OUTPUT, target).item(), rel=1e-6)


def test_nobody_knows_what_a_scalar_of_a_share_is_a_mean_of() -> None:
    adapter = FunctionAdapter(lambda output, target: output.square().mean().sqrt())
    assert not adapter.is_certain
    adapter.begin(8, 2)
    assert adapter(OUTPUT, batch_of(TARGET)).is_guess
    adapter.begin(4, 1)
    assert not adapter(OUTPUT, batch_of(TARGET)).is_guess


def test_a_share_that_depends_on_nothing_trainable_adds_no_gradient() -> None:
    """The Worker, which sees all shares, tells when none of them does."""
    share = FunctionAdapter(nn.CrossEntropyLoss())(OUTPUT, batch_of(TARGET))
    share.backward(1.0)
    assert not OUTPUT.requires_grad
    assert OUTPUT.grad is None


def test_an_error_of_the_loss_itself_is_not_touched() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        share_of(loss)
