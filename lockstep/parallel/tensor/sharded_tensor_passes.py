"""Passes of a rank that has its shards of divided layers, and keeps its part of the parameters.

Layers are divided as in ``tensor_passes``, and a unit's parameters are there while it is used, as
in ``parallel.sharding``: parts of them are views of its memory.
"""

from typing import Any

import torch

from lockstep.parallel.batch_run import Run
from lockstep.parallel.sharding.residency import Residency
from lockstep.parallel.sharding.sharded_passes import ShardedPasses
from lockstep.parallel.tensor.tensor_passes import TensorPasses
from lockstep.parallel.workload import Workload


class ShardedTensorPasses(TensorPasses, ShardedPasses):
    """Passes over a model whose layers are divided, and whose parameters are.

    Args:
        work: common to all ranks.
        residency: of this rank's parameters.
        options: see ``TensorPasses``.
    """

    def __init__(self, work: Workload, *, residency: Residency, **options: Any) -> None:
        super().__init__(work, residency=residency, **options)
        self._hands_over = False  # parts of gradients are brought together first
        self._row: int | None = None  # of the backward pass under way
        self._send = residency.complete
        residency.complete = self._complete

    def _backward(self, run: Run, shares: list[int]) -> None:
        self._row = self._row_of(shares[-1])
        super()._backward(run, shares)
        self._row = None

    def _complete(self, bucket: int) -> None:
        """Backward has left a unit for the last time: its gradients go to those who update it."""
        if self._row is not None:
            self._put_bucket(self._row, bucket)
        self._send(bucket)

    def _put_bucket(self, row: int, bucket: int) -> None:
        buckets = self._group.gradients.buckets
        numbers = [number for number, own in enumerate(buckets) if own == bucket]
        gradients: list[torch.Tensor | None] = [None] * len(self._trainable)
        for number in numbers:
            parameter = self._trainable[number]
            gradients[number], parameter.grad = parameter.grad, None
        self._shards.write(row, gradients)
        self._shards.put(row, [number for number in numbers if number in self._shards.names])
