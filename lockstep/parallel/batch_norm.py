"""BatchNorm whose statistics are those of the global batch.

torch's SyncBatchNorm does this for GPUs only. Here each share contributes (count, mean, sum of
squared deviations) per channel; the shares' figures are merged in their order by the parallel
algorithm of Chan, Golub and LeVeque (1979), which keeps the variance accurate where a plain sum of
squares would cancel. Backward gathers the two sums that the gradient of the normalisation needs
(Ioffe and Szegedy 2015, section 3).

A layer is replaced on the instance for the time of one forward pass, so the user's module keeps its
class, its state and its methods whenever the user can see it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.errors import LockstepError, ModelError, problem


@dataclass(frozen=True)
class ShareLink:
    """A share's line to the other shares of its batch.

    Attributes:
        gather: row -> rows of all filled shares, shape (shares, len(row)), in their order.
        is_first: it is its rank's first share of the batch: the one that updates the buffers.
    """

    gather: Callable[[torch.Tensor], torch.Tensor]
    is_first: bool


def batch_norm_layers(model: nn.Module) -> list[tuple[str, _BatchNorm]]:
    """The model's BatchNorm layers by name."""
    return [
        (name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm)
    ]


def row_length(layers: list[tuple[str, _BatchNorm]]) -> int:
    """Longest row that these layers gather."""
    return max((2 + 2 * layer.num_features for _, layer in layers), default=0)


def takes_batch_statistics(layer: _BatchNorm) -> bool:
    """Whether the layer, in its present mode, normalises by the batch at hand."""
    return layer.training or layer.running_mean is None


@contextmanager
def global_statistics(
    layers: list[tuple[str, _BatchNorm]], current_link: Callable[[], ShareLink]
) -> Iterator[None]:
    """Within the block, these layers see the global batch.

    Args:
        layers: as ``batch_norm_layers`` gives them.
        current_link: the link of the share that is running.
    """
    patched = [
        (number, name, layer)
        for number, (name, layer) in enumerate(layers)
        if takes_batch_statistics(layer)
    ]
    for number, name, layer in patched:
        layer.__dict__["forward"] = _forward_of(layer, number, name, current_link)
    try:
        yield
    finally:
        for _, _, layer in patched:
            layer.__dict__.pop("forward", None)


class _Statistics:
    """Gathers one layer's rows, and sees that all shares are at the same layer."""

    def __init__(
        self, number: int, name: str, gather: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self._number = number
        self._name = name
        self._gather = gather

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        return self._checked(row, 2 * self._number)

    def backward(self, row: torch.Tensor) -> torch.Tensor:
        return self._checked(row, 2 * self._number + 1)

    def _checked(self, row: torch.Tensor, code: int) -> torch.Tensor:
        rows = self._gather(torch.cat([row.new_tensor([code]), row]))
        if not bool((rows[:, 0] == code).all()):
            raise LockstepError(
                problem(
                    "BatchNorm layers must run in the same order for every share of a batch.",
                    received=f"{self._name!r} in one share, another layer in another",
                    fix="Do not choose layers by the samples at hand before a BatchNorm.",
                )
            )
        return rows[:, 1:]


def _forward_of(
    layer: _BatchNorm, number: int, name: str, current_link: Callable[[], ShareLink]
) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(inputs: torch.Tensor) -> torch.Tensor:
        link = current_link()
        statistics = _Statistics(number, name, link.gather)
        if not isinstance(layer, nn.SyncBatchNorm):
            layer._check_input_dim(inputs)
        output: torch.Tensor
        output, mean, variance, count = _GlobalBatchNorm.apply(  # type: ignore[no-untyped-call]
            inputs, layer.weight, layer.bias, layer.eps, statistics
        )
        if link.is_first and layer.training and layer.track_running_stats:
            _update_running_statistics(layer, mean, variance, int(count))
        return output

    return forward


@torch.no_grad()
def _update_running_statistics(
    layer: _BatchNorm, mean: torch.Tensor, variance: torch.Tensor, count: int
) -> None:
    """As nn.BatchNorm: momentum None is the plain average, the running variance is unbiased."""
    if layer.running_mean is None or layer.running_var is None:
        return
    factor = layer.momentum
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if factor is None:
            factor = 1.0 / float(layer.num_batches_tracked)
    factor = 0.0 if factor is None else factor
    unbiased = variance * (count / (count - 1))
    layer.running_mean.mul_(1 - factor).add_(mean.to(layer.running_mean), alpha=factor)
    layer.running_var.mul_(1 - factor).add_(unbiased.to(layer.running_var), alpha=factor)


class _GlobalBatchNorm(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) * weight + bias, with statistics of all shares."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        statistics: _Statistics,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        count = inputs.numel() // inputs.shape[1]
        dims = [dim for dim in range(inputs.dim()) if dim != 1]
        variance, mean = torch.var_mean(inputs, dims, correction=0)
        mean, variance = mean.double(), variance.double()
        rows = statistics.forward(torch.cat([mean.new_tensor([count]), mean, variance * count]))
        total, mean, variance = _merge(rows)
        if total <= 1:
            raise ModelError(
                problem(
                    "BatchNorm needs more than one value per channel in training.",
                    received=f"a global batch of shape {tuple(inputs.shape)}",
                    fix="Use larger batches, or drop the last short one.",
                )
            )
        mean, variance = mean.to(inputs.dtype), variance.to(inputs.dtype)
        output = F.batch_norm(inputs, mean, variance, weight, bias, False, 0.0, eps)
        ctx.save_for_backward(inputs, weight, mean, variance)
        ctx.eps, ctx.total, ctx.statistics, ctx.dims = eps, total, statistics, dims
        ctx.has_bias = bias is not None
        count_tensor = torch.tensor(total)
        ctx.mark_non_differentiable(mean, variance, count_tensor)
        return output, mean, variance, count_tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient = gradients[0]
        inputs, weight, mean, variance = ctx.saved_tensors
        shape = [1, -1] + [1] * (inputs.dim() - 2)
        inverse = torch.rsqrt(variance + ctx.eps)
        normal = (inputs - mean.reshape(shape)) * inverse.reshape(shape)
        own_sum = gradient.sum(ctx.dims)
        own_dot = (gradient * normal).sum(ctx.dims)
        rows = ctx.statistics.backward(torch.cat([own_sum, own_dot]).double())
        both = _sum_in_order(rows) / ctx.total
        mean_gradient, mean_dot = both.to(gradient.dtype).chunk(2)
        scale = inverse if weight is None else inverse * weight
        input_gradient = (
            gradient - mean_gradient.reshape(shape) - normal * mean_dot.reshape(shape)
        ) * scale.reshape(shape)
        return (
            input_gradient,
            None if weight is None else own_dot,
            own_sum if ctx.has_bias else None,
            None,
            None,
        )


def _merge(rows: torch.Tensor) -> tuple[int, torch.Tensor, torch.Tensor]:
    """(count, mean, biased variance) of the union of the shares, merged in their order."""
    features = (rows.shape[1] - 1) // 2
    count, mean, squares = 0.0, rows.new_zeros(features), rows.new_zeros(features)
    for row in rows:
        share_count = row[0].item()
        delta = row[1 : 1 + features] - mean
        total = count + share_count
        mean = mean + delta * (share_count / total)
        squares = squares + row[1 + features :] + delta * delta * (count * share_count / total)
        count = total
    return int(count), mean, squares / count


def _sum_in_order(rows: torch.Tensor) -> torch.Tensor:
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total
