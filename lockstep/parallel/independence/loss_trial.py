"""Tests on one share whether a loss function's values for shares add up to its value for a batch.

A function may depend on the number of samples (``if len(output) < 3``), or return values or a pair
that mix samples. So the totals and weights of both halves of a share must add up to those of the
share, and those of several copies of it, as many as the batch has samples for, must be the same
multiple of its own. Otherwise the loss is computed on the whole batch.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lockstep.capture.calls import host_streams, streams_differ
from lockstep.capture.state import left_alone
from lockstep.data.trees import Tree, map_tensors, tensors_of
from lockstep.parallel.independence.reduction_trial import difference, tolerance_of
from lockstep.parallel.independence.split_trial import Draws
from lockstep.parallel.loss.share_losses import ShareLoss

# The most elements of a tensor in the test, unless one sample has more: the share itself needs the
# memory.
_MOST_ELEMENTS = 1 << 22

LossOf = Callable[[Tree], ShareLoss]


def adds_up(
    loss_of: LossOf, given: Tree, num_samples: int, batch_size: int, held: Sequence[Any] = ()
) -> bool:
    """True if the losses of parts give the loss of the whole, or if that cannot be tested.

    Args:
        loss_of: computes it.
        given: its inputs: tensors with rows of the samples, and perhaps others.
        num_samples: of the share.
        batch_size: samples of the batch.
        held: objects that it may change, to be restored.
    """
    ways = {_rows_per_sample(given, num_samples, most=most) for most in (None, 1)}
    if any(None in way for way in ways):  # such as a list with a tensor for each sample
        return True
    largest = max((tensor.numel() // num_samples for tensor in tensors_of(given)), default=0)
    most = _MOST_ELEMENTS // max(largest, 1)
    size = min(num_samples, max(most, 1))
    num_copies = max(2, min(-(-batch_size // size), most // size))
    with left_alone(nn.Module(), *held):
        return any(_adds_up(loss_of, given, way, size, num_copies) for way in ways)


def _adds_up(
    loss_of: LossOf, given: Tree, per_sample: Sequence[int | None], size: int, num_copies: int
) -> bool:
    """Test the first ``size`` samples, with ``per_sample`` rows in each tensor."""
    share = slice(0, size)
    if size == 1:
        given = _with_another(given, per_sample)
        size = 2
    middle, draws, host = size // 2, Draws(size), host_streams()
    found: list[ShareLoss] = []
    gradients: list[list[torch.Tensor | None]] = []
    try:
        for rows in (slice(0, size), slice(0, middle), slice(middle, size)):
            part = _part(given, per_sample, rows)
            with draws.of(rows):
                found.append(loss_of(part))
                gradients.append(_gradients(found[-1], part, per_sample))
        if not draws.fit or streams_differ(host, host_streams()):
            return True
        copies = [] if draws.any else [loss_of(_part(given, per_sample, share, num_copies))]
    except Exception:  # the function requires other batch sizes
        return False
    tolerance = tolerance_of(nn.Module(), found[0])
    copied = found[0] if share.stop == size else found[1]
    sums = [found, *([one, *[copied] * num_copies] for one in copies)]
    return not any(difference(each, size, tolerance) for each in sums) and all(
        _is_joined(*each, tolerance=tolerance) for each in zip(*gradients, strict=True)
    )


def _gradients(
    loss: ShareLoss, part: Tree, per_sample: Sequence[int | None]
) -> list[torch.Tensor | None]:
    """Gradients of tensors with rows: hooks and autograd functions may mix rows in backward."""
    leaves = [
        tensor
        for tensor, count in zip(tensors_of(part), per_sample, strict=True)
        if count and tensor.requires_grad
    ]
    roots = [
        (value * seed).sum()
        for value, seed in zip(loss.values, loss.seeds, strict=True)
        if value.requires_grad
    ]
    if not roots or not leaves:
        return []
    return [*torch.autograd.grad(sum(roots[1:], roots[0]), leaves, allow_unused=True)]


def _is_joined(
    both: torch.Tensor | None,
    one: torch.Tensor | None,
    other: torch.Tensor | None,
    *,
    tolerance: float,
) -> bool:
    if both is None or one is None or other is None:
        return both is one is other
    distance, size = (
        float(each.double().norm()) for each in (both - torch.cat([one, other]), both)
    )
    return not distance > max(tolerance, 2e-2) * size  # True for NaN


def _rows_per_sample(given: Tree, num_samples: int, *, most: int | None) -> tuple[int | None, ...]:
    """Rows per sample of each tensor: 0 if it has none (a temperature), None if unclear."""

    def count(tensor: torch.Tensor) -> int | None:
        if not tensor.dim() or (tensor.is_leaf and tensor.requires_grad):
            return 0
        each, rest = divmod(len(tensor), num_samples)
        if most is not None and each > most:
            return 0  # the number of rows is a multiple of the samples by chance
        return None if rest else each

    return tuple(map(count, tensors_of(given)))


def _part(given: Tree, per_sample: Sequence[int | None], rows: slice, num_copies: int = 1) -> Tree:
    def take(tensor: torch.Tensor, count: int) -> torch.Tensor:
        part = tensor[rows.start * count : rows.stop * count]
        return torch.cat([part] * num_copies)  # a copy: it may be changed in place

    return _mapped(take, given, per_sample)


def _with_another(given: Tree, per_sample: Sequence[int | None]) -> Tree:
    """A sample and another one: the first divided, each tensor by a different number."""
    divisor = itertools.count(2)

    def join(tensor: torch.Tensor, count: int) -> torch.Tensor:
        other = tensor / next(divisor) if tensor.is_floating_point() else tensor
        return torch.cat([tensor, other])

    return _mapped(join, given, per_sample)


def _mapped(
    function: Callable[[torch.Tensor, int], torch.Tensor],
    given: Tree,
    per_sample: Sequence[int | None],
) -> Tree:
    """Apply the function to each tensor with rows, and its number of rows per sample."""
    each = iter(per_sample)
    return map_tensors(lambda one: function(one, count) if (count := next(each)) else one, given)
