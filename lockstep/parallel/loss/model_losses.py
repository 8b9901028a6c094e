"""The loss that a model computes itself: its place in the output, and its reduction.

A user's training step (``parallel.data_parallel.step_functions``) returns such a loss, too.
"""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from lockstep.data.map_style.sources import Batch
from lockstep.data.own_loss import OwnLoss
from lockstep.data.trees import Tree, tensors_of
from lockstep.errors import LossError
from lockstep.parallel.loss.function_losses import mean_over, read_returned, read_weight, sum_over
from lockstep.parallel.loss.model_loss_reduction import InnerMeans, seen_mean
from lockstep.parallel.loss.share_losses import LossAdapter, ShareLoss, nothing


class OwnLossAdapter(LossAdapter):
    """Reads the loss in a model's output."""

    needs_targets = False
    is_inside = True

    def __init__(self, loss: OwnLoss) -> None:
        self.loss = loss
        self._reader = InnerLoss()

    def watching(self) -> AbstractContextManager[Any]:
        return InnerMeans() if self.loss.weight is None else nullcontext()

    def __call__(self, output: Tree, batch: Batch) -> ShareLoss:
        if batch.sample_weight is not None:
            raise LossError(
                "A model that computes its own loss must weigh the samples itself.",
                received="data with sample_weight",
                fix="Leave sample_weight out and give the weights to the model as an input, "
                "or pass a loss function.",
            )
        found = _find(output) if self.loss.output is None else _part(output, self.loss.output)
        if self.loss.weight is None:
            size = batch.num_samples
            return self._reader.read(found, output, size, self.batch_size or size)
        if not isinstance(found, torch.Tensor) or found.dim() != 0:
            raise LossError(
                "With OwnLoss(weight=...) the model's loss must be a scalar: the mean over "
                "what `weight` counts.",
                received=_describe(found),
                fix="Return the mean, or leave `weight` out.",
            )
        weight = read_weight(self.loss.weight(batch.inputs), "`weight` of OwnLoss that")
        return _mean_over(found, weight, output)


class InnerLoss:
    """Reads losses that were computed under ``InnerMeans``.

    The reduction must be known for all scalars or for none: else shares' weights do not compare.
    """

    def __init__(self) -> None:
        self._is_seen: dict[bool, bool] = {}  # with gradients, and without

    def read(self, found: Any, output: Tree, num_samples: int, batch_size: int) -> ShareLoss:
        """A share's loss.

        Args:
            found: the loss: a scalar, values of shape (n,), or a pair (total, weight).
            output: the output that has the loss.
            num_samples: of the share.
            batch_size: of the global batch.
        """
        if not (isinstance(found, torch.Tensor) and found.dim() == 0):
            return read_returned(found, output, None, num_samples)
        known = seen_mean(found)
        if self._is_seen.setdefault(torch.is_grad_enabled(), known is not None) is (known is None):
            raise LossError(
                "The model's loss must have the same reduction in every step: its denominator was "
                "recognised in one step and not in another.",
                received="a scalar that the model computes by other operations than before",
                fix="Give its denominator: OwnLoss(weight=...), or return (total, weight).",
            )
        if known is None:
            return mean_over(found, float(num_samples))
        if known.weight is None:
            return sum_over(found, num_samples, batch_size)
        return _mean_over(found, known.weight, output)


def _part(output: Tree, place: int | str) -> Any:
    """The loss at the user's place in an output."""
    try:
        if isinstance(place, str) and not isinstance(output, Mapping):
            return getattr(output, place)
        return output[place]
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise LossError(
            "`output` of OwnLoss must say where the model returns its loss.",
            received=f"output={place!r} of {_describe(output)}",
            fix="Pass its position in a tuple, its key, or its attribute.",
        ) from error


def _find(output: Tree) -> Any:
    """The loss at one of the documented places in an output."""
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif hasattr(output, "loss"):
        found = output.loss
    elif isinstance(output, tuple | list) and output:
        found = output if _is_pair(output) else output[0]
    else:
        found = output
    if found is None or isinstance(found, Mapping):
        raise LossError(
            "With OwnLoss the model must return its loss: as output.loss, as output['loss'], "
            "as the first part of a tuple, or as its whole output.",
            received=_describe(output),
            fix="Pass the model the inputs of its loss, such as labels; give the place of the "
            "loss, OwnLoss(output=...); or pass a loss function.",
        )
    return found


def _is_pair(output: Any) -> bool:
    """True for (total, weight), False for (loss, logits)."""
    if len(output) != 2:
        return False
    weight = output[1]
    return isinstance(weight, int | float) or (
        isinstance(weight, torch.Tensor) and weight.numel() == 1 and weight.dim() == 0
    )


def _mean_over(loss: torch.Tensor, weight: float, output: Tree) -> ShareLoss:
    """A share's mean; if it is 0 / 0 or a constant, backward starts from the other outputs."""
    share = mean_over(loss, weight)
    if weight or (math.isfinite(share.total) and loss.requires_grad):
        return share
    others = [tensor for tensor in tensors_of(output) if tensor is not loss]
    if loss.requires_grad and not any(tensor.requires_grad for tensor in others):
        raise LossError(
            "A model whose loss is NaN for a batch of weight 0 must return more than its loss.",
            received="a share of weight 0",
            fix="Return the logits as well, or 0 for a mean over nothing.",
        )
    return nothing(others)


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with {list(value)}"
    return f"a {type(value).__name__}"
