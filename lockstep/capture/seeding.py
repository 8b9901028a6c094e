"""Backward passes that start from given gradients.

``torch.autograd.backward(tensors, gradients)`` imports sympy at its first call, to compare shapes:
half a second in every process. A scalar whose derivatives are these gradients needs none.
"""

from collections.abc import Sequence
from typing import Any

import torch


class _Seeded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: Sequence[torch.Tensor], *tensors: torch.Tensor) -> Any:
        ctx.gradients = gradients
        return torch.zeros((), device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, *ones: torch.Tensor) -> Any:
        return None, *ctx.gradients


def seeded(tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """A scalar from which ``backward`` goes on with each tensor's gradient.

    Args:
        tensors: that have a history or need gradients; at least one.
        gradients: of each, of its shape.
    """
    scalar: torch.Tensor = _Seeded.apply(gradients, *tensors)  # type: ignore[no-untyped-call]
    return scalar
