"""The loss that a model has computed itself: found in its output, weighed by its inputs."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from lockstep.data.own_loss import OwnLoss
from lockstep.data.trees import Tree, tensors_of
from lockstep.errors import LossError, problem
from lockstep.parallel.function_losses import mean_over, read_returned, read_weight
from lockstep.parallel.losses import LossAdapter, ShareLoss, nothing


class OwnLossAdapter(LossAdapter):
    """Reads the loss in a model's output."""

    needs_targets = False

    def __init__(self, loss: OwnLoss) -> None:
        self.loss = loss

    def __call__(
        self,
        output: Tree,
        target: Tree,
        sample_weight: torch.Tensor | None,
        num_samples: int,
        inputs: Tree = None,
    ) -> ShareLoss:
        if sample_weight is not None:
            raise LossError(
                problem(
                    "A model that computes its own loss must weigh the samples itself.",
                    received="data with sample_weight",
                    fix="Leave sample_weight out and give the weights to the model as an input, "
                    "or pass a loss function.",
                )
            )
        found = _find(output)
        if self.loss.weight is None:
            return read_returned(found, output, None, num_samples)
        if not isinstance(found, torch.Tensor) or found.dim() != 0:
            raise LossError(
                problem(
                    "With OwnLoss(weight=...) the model's loss must be a scalar: the mean over "
                    "what `weight` counts.",
                    received=_describe(found),
                    fix="Return the mean, or leave `weight` out.",
                )
            )
        weight = read_weight(self.loss.weight(inputs), "`weight` of OwnLoss that")
        share = mean_over(found, weight)
        if weight or (math.isfinite(share.total) and found.requires_grad):
            return share
        return _mean_of_nothing(output, found)


def _find(output: Tree) -> Any:
    """The loss in an output, in whichever of the agreed places."""
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
            problem(
                "With OwnLoss the model must return its loss: as output.loss, as output['loss'], "
                "as the first part of a tuple, or as its whole output.",
                received=_describe(output),
                fix="Give the model what it computes the loss from, such as labels, or pass a "
                "loss function.",
            )
        )
    return found


def _is_pair(output: Any) -> bool:
    """(total, weight), and not (loss, logits)."""
    if len(output) != 2:
        return False
    weight = output[1]
    return isinstance(weight, int | float) or (
        isinstance(weight, torch.Tensor) and weight.numel() == 1 and weight.dim() == 0
    )


def _mean_of_nothing(output: Tree, loss: torch.Tensor) -> ShareLoss:
    """A share whose mean is 0 / 0 or a constant: its backward goes from the other outputs."""
    others = [tensor for tensor in tensors_of(output) if tensor is not loss]
    if loss.requires_grad and not any(tensor.requires_grad for tensor in others):
        raise LossError(
            problem(
                "A model whose loss is NaN where nothing counts must return more than its loss.",
                received="a share of weight 0",
                fix="Return the logits as well, or 0 for a mean over nothing.",
            )
        )
    return nothing(others)


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with {list(value)}"
    return f"a {type(value).__name__}"
