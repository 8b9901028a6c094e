"""Whether losses of shares say what the loss of them all is, tried with a share and its halves.

A loss that a model or a training step computes inside cannot be taken on the whole batch. It is
divided among shares as a weighted mean, which it must be: of a share's samples together it must
come to the mean of what it comes to for each half of them. A mean over what one half has more of
(padding, a mask), a root or a ratio of means, and what compares samples with each other do not.

Tried in evaluation mode, where dropout and BatchNorm's statistics make no difference between a
share and its halves. What is drawn there nevertheless (noise of a diffusion, of a VAE) is drawn
once, and each half gets its rows. A model that has no loss in that mode stays in training mode,
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
from lockstep.parallel.independence.split_test import on_halves, repeated
from lockstep.parallel.loss.share_losses import JointLoss, LossAdapter, ShareLoss

# Relative, by what the loss or the model computes in; models often compute their losses in float32.
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
        model: what computes the loss.
        loss_of: runs it on samples.
        batch: the samples; see ``on_halves`` for a single one.
        refused: makes the error of what was received, where it is not that of a whole loss.
        is_low: it computes in less than float32, whatever its loss is.

    Returns:
        Whether its gradient is multiplied by what the loss is; see ``check_gradients``.

    Raises:
        LossError: it is not the weighted mean of them.
        ModelError: its gradient is not the sum of theirs.
    """
    with left_alone(model) as state, torch.no_grad():
        try:
            found = on_halves(model, loss_of, batch, state, training=False)
        except LossError:  # it computes none in evaluation mode
            found = on_halves(model, loss_of, batch, state, training=True)
        except Exception:  # of a model that takes certain numbers of samples: nobody can say
            return True
    if found is not None:
        received = difference(found, batch.num_samples, tolerance_of(model, found[0]))
        if received is not None:
            raise (refused or _no_mean)(received)
    if not model.training:
        return True
    # Gradients of two samples may be alike by chance: a loss gives them no numbers of their own.
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
    """Compare so what a model adds to the loss of some samples, where it adds anything.

    Args:
        model: the model.
        loss: knows what it adds.
        call: runs the model on inputs.
        batch: the samples.

    Raises:
        LossError: it is not what the loss takes it for.
    """

    def added(part: Batch) -> ShareLoss:
        output = call(part.inputs)
        loss.newly_adds(output)  # and is tried here
        return loss.added(output, part.num_samples)

    if loss.adds:
        check_mean(model, added, batch, _no_addition)


def difference(
    losses: Sequence[ShareLoss | JointLoss], num_samples: int, tolerance: float
) -> str | None:
    """What shows that some losses are no weighted means; None if nothing does."""
    whole, *parts = (loss.sums for loss in losses)
    for (total, weight), *shares in zip(whole, *parts, strict=True):
        sums = math.fsum(part[0] for part in shares), math.fsum(part[1] for part in shares)
        if not all(map(math.isfinite, (total, *sums))):
            continue  # an error of its own
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
    """How much a loss of samples may differ from those of halves, by what it is computed in."""
    values = list(loss.values) if isinstance(loss, ShareLoss) else []
    dtypes = {one.dtype for one in (*values, *model.parameters()) if one.is_floating_point()}
    return max((_TOLERANCES.get(dtype, _LOW_TOLERANCE) for dtype in dtypes), default=1e-3)
