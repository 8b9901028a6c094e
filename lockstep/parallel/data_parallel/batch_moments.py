"""Mean and variance over the whole batch, for layers of front ends that normalise themselves.

As in ``parallel.data_parallel.batch_norm``, each share contributes count, mean and sum of squared
deviations. Here the layer itself uses the moments, so backward receives the gradients of mean and
variance. Every share's output depends on them, so these gradients are summed over the shares.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from lockstep.parallel.data_parallel.batch_norm import LayerStatistics, exact_type


def global_moments(
    inputs: torch.Tensor,
    dims: list[int],
    statistics: LayerStatistics,
    weights: torch.Tensor | None = None,
    epsilon: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and biased variance of each feature.

    Args:
        inputs: of a share.
        dims: all except that of the features.
        statistics: gathers the shares' rows.
        weights: 1 for values that count and 0 for others, as large as the inputs; None if all
            count.
        epsilon: added to the number of values, the divisor.

    Returns:
        Two tensors of shape (features,).
    """
    mean, variance = _GlobalMoments.apply(  # type: ignore[no-untyped-call]
        inputs, dims, statistics, weights, epsilon
    )
    return mean, variance


class _GlobalMoments(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        dims: list[int],
        statistics: LayerStatistics,
        weights: torch.Tensor | None,
        epsilon: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        row = _row(inputs.to(exact_type(inputs)), dims, weights)
        count, mean, variance = statistics.forward(row)
        # With epsilon the mean is not exact, and the variance is not around the exact mean.
        divisor = count + epsilon
        shifted = mean * (count / divisor)
        variance = (variance * count + count * (mean - shifted) ** 2) / divisor
        ctx.save_for_backward(inputs, weights, shifted, count * (mean - shifted) / divisor)
        ctx.dims, ctx.statistics, ctx.divisor = dims, statistics, divisor
        return shifted.to(inputs.dtype), variance.to(inputs.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_mean: torch.Tensor, of_variance: torch.Tensor) -> Any:
        inputs, weights, mean, rest = ctx.saved_tensors
        both = ctx.statistics.backward(torch.cat([of_mean, of_variance]).double())
        of_mean, of_variance = (both / ctx.divisor).to(mean.dtype).chunk(2)
        shape = [1 if dim in ctx.dims else -1 for dim in range(inputs.dim())]
        deviation = inputs.to(mean.dtype) - (mean + rest).reshape(shape)
        gradient = of_mean.reshape(shape) + 2 * of_variance.reshape(shape) * deviation
        if weights is not None:
            gradient = gradient * weights
        return gradient.to(inputs.dtype), None, None, None, None


def _row(values: torch.Tensor, dims: list[int], weights: torch.Tensor | None) -> torch.Tensor:
    """Count, mean, and sum of squared deviations of a share."""
    if weights is None:
        variance, mean = (one.double() for one in torch.var_mean(values, dims, correction=0))
        count = mean.new_full((1,), values.numel() // len(mean))
        return torch.cat([count, mean, variance * count])
    values, weights = values.double(), weights.double()
    count = weights.sum(dims)[:1]  # equal for all features
    mean = (values * weights).sum(dims) / count.clamp(min=1)
    shape = [1 if dim in dims else -1 for dim in range(values.dim())]
    squares = ((values - mean.reshape(shape)) ** 2 * weights).sum(dims)
    return torch.cat([count, mean, squares])
