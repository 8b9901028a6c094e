"""Tests with a share and its halves whether the loss of a batch follows from the shares' losses.

A loss computed inside a model or a training step cannot be computed on the whole batch. It is
divided among shares as a weighted mean, so it must be one: the loss of a share must be the mean of
the losses of its halves. A mean over elements that the halves have in different numbers (padding, a
mask), a root or a ratio of means, and a comparison of samples fail this test.

The test runs in evaluation mode, where dropout and BatchNorm's statistics make no difference
between a share and its halves. Random numbers drawn there (noise of a diffusion, of a VAE) are
drawn once, and each half gets its rows. A model without a loss in that mode stays in training mode,
with dropout drawn likewise.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from lockstep.capture.state import left_alone
from lockstep.data.map_style.sources import Batch
from lockstep.data.trees import Tree
from lockstep.errors import LossError
from lockstep.parallel.independence.gradient_trial import check_gradients
from lockstep.parallel.independence.split_trial import on_halves, repeated
from lockstep.parallel.loss.share_losses import JointLoss, LossAdapter, ShareLoss

# Relative, by dtype of the loss or the model; models often compute their losses in float32.
_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3}
_LOW_TOLERANCE = 0.05

LossOf = Callable[[Batch], ShareLoss | JointLoss]


def check_mean(
    model: nn.Module,
    loss_of: LossOf,
    batch: Batch,
    refused: Callable[[str], LossError] | None = None,
    *,
    is_low: bool = False,
) -> bool:
    """Compare the loss of some samples with those of their halves; leaves the model as it is.

    Args:
        model: computes the loss.
        loss_of: runs it on samples.
        batch: the samples; see ``on_halves`` for a single one.
        refused: makes the error from what was received; None for the error of a whole loss.
        is_low: it computes in less than float32, also if its loss does not.

    Returns:
        True if its gradient is linear in the loss; see ``check_gradients``.

    Raises:
        LossError: the loss is not the weighted mean of the halves' losses.
        ModelError: its gradient is not the sum of the halves' gradients.
    """
    with left_alone(model) as state, torch.no_grad():
        try:
            found = on_halves(model, loss_of, batch, state, training=False)
        except LossError:  # it has no loss in evaluation mode
            found = on_halves(model, loss_of, batch, state, training=True)
        except Exception:  # the model requires other batch sizes: no result
            return True
    if found is not None:
        received = difference(found, batch.num_samples, tolerance_of(model, found[0]))
        if received is not None:
            raise (refused or _no_mean)(received)
    if not model.training:
        return True
    # Gradients of two samples may be equal by chance: a loss does not weight them differently.
    last = repeated(batch, [batch.num_samples - 1, max(batch.num_samples - 2, 0)])
    root_of = partial(_root, loss_of)
    is_linear = check_gradients(model, root_of, batch, is_low=is_low)
    return check_gradients(model, root_of, last, is_low=is_low) and is_linear


def _root(loss_of: LossOf, batch: Batch, start: int) -> torch.Tensor | None:
    """The total of a loss."""
    loss = loss_of(batch)
    losses = loss.losses if isinstance(loss, JointLoss) else (loss,)
    pairs = [pair for one in losses for pair in zip(one.values, one.seeds, strict=True)]
    terms = [(value * seed).sum() for value, seed in pairs if value.requires_grad]
    return sum(terms[1:], terms[0]) if terms else None


def check_added(
    model: nn.Module, loss: LossAdapter, call: Callable[[Tree], Tree], batch: Batch
) -> None:
    """Compare the losses that a model adds for some samples likewise, if it adds any.

    Args:
        model: the model.
        loss: finds the added losses.
        call: runs the model on inputs.
        batch: the samples.

    Raises:
        LossError: they do not have the expected reduction.
    """

    def added(part: Batch) -> ShareLoss:
        output = call(part.inputs)
        loss.newly_adds(output)  # notes it: it is tested here
        return loss.added(output, part.num_samples)

    if loss.adds:
        check_mean(model, added, batch, _no_addition)


def difference(
    losses: Sequence[ShareLoss | JointLoss], num_samples: int, tolerance: float
) -> str | None:
    """The evidence that losses are not weighted means; None without any."""
    whole, *parts = (loss.sums for loss in losses)
    for (total, weight), *shares in zip(whole, *parts, strict=True):
        sums = math.fsum(part[0] for part in shares), math.fsum(part[1] for part in shares)
        if not all(map(math.isfinite, (total, *sums))):
            continue  # another error
        if not math.isclose(weight, sums[1], rel_tol=1e-6):
            return f"weights {sums[1]:g} of halves, {weight:g} of all {num_samples}"
        if not weight:
            continue
        means = [total / weight, sums[0] / sums[1]]
        size = max(map(abs, (*means, *(one / of for one, of in shares if of))))
        if abs(means[0] - means[1]) > tolerance * size:
            return f"{means[0]:.7g} for {num_samples} samples, {means[1]:.7g} for their halves"
    return None


def _no_mean(received: str) -> LossError:
    return LossError(
        "A loss that the model or train_step computes must be a weighted mean: each share of "
        "the batch computes its own.",
        received=received,
        fix="Give its denominator: OwnLoss(weight=...), or return (total, weight) or values of "
        "shape (n,). If it compares samples with each other, pass it as a loss function, "
        "loss=..., which is computed on the whole batch.",
    )


def _no_addition(received: str) -> LossError:
    return LossError(
        "Losses that layers add must be means or sums over samples, the same as when training "
        "began.",
        received=received,
        fix="Add ops.mean(...) or ops.sum(...) of values that each depend on one sample and are "
        "not 0 for all of the first samples; or give the model its own compute_loss, which is "
        "computed on the whole batch.",
    )


def tolerance_of(model: nn.Module, loss: ShareLoss | JointLoss | None = None) -> float:
    """The tolerated difference between a loss and the mean of its halves', by dtype."""
    values = list(loss.values) if isinstance(loss, ShareLoss) else []
    dtypes = {one.dtype for one in (*values, *model.parameters()) if one.is_floating_point()}
    return max((_TOLERANCES.get(dtype, _LOW_TOLERANCE) for dtype in dtypes), default=1e-3)
