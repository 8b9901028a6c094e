"""Batches to take losses of."""

from typing import Any

from torch import Tensor

from lockstep.data.map_style.sources import Batch
from lockstep.data.trees import tensors_of


def batch_of(targets: Any, sample_weight: Tensor | None = None) -> Batch:
    """As many samples as there are targets."""
    num_samples = len(next(tensors_of(targets)))
    return Batch(inputs=None, targets=targets, sample_weight=sample_weight, num_samples=num_samples)
