"""The gradients of a group of parameters, and their layout in shared memory."""

import math
from dataclasses import dataclass, replace

import torch

from lockstep.comm.collectives.gradients import TensorSpec
from lockstep.plan.layout import Extent, align, flat_offsets, in_buckets


@dataclass(frozen=True, kw_only=True)
class GradientSpec:
    """The gradients and their layout in memory.

    Attributes:
        num_shares: rows of gradients.
        tensors: the trainable parameters.
        row_limits: for each of them, the rows of a batch up to which factors are exchanged; 0 for
            never.
        sparse: whose gradients are rows, by the parameters' names.
        num_buckets: about the most buckets in which ranks without shared memory exchange them;
            0 for no buckets.
        buckets: of the parameters, by number, if each rank keeps its part of the sums only; empty
            if each keeps them all.
    """

    num_shares: int
    tensors: tuple[TensorSpec, ...]
    row_limits: tuple[int, ...]
    sparse: frozenset[str] = frozenset()
    num_buckets: int = 0
    buckets: tuple[int, ...] = ()

    def is_sparse(self, parameter: int) -> bool:
        """Whether a parameter's gradient is of some rows only."""
        return self.tensors[parameter].name in self.sparse

    @property
    def extents(self) -> list[Extent]:
        """Sizes of the trainable parameters, and where they may be cut."""
        extents = [
            replace(
                tensor.extent,
                row_elements=tensor.shape[1] if limit or tensor.name in self.sparse else 0,
            )
            for tensor, limit in zip(self.tensors, self.row_limits, strict=True)
        ]
        if self.buckets:
            pairs = zip(extents, self.buckets, strict=True)
            return [replace(extent, bucket=bucket) for extent, bucket in pairs]
        return in_buckets(extents, self.num_buckets) if self.num_buckets else extents

    def numbers_by_bucket(self) -> list[list[int]]:
        """The parameters' numbers, by their bucket where each rank keeps its part of the sums."""
        buckets = self.buckets or (0,) * len(self.tensors)
        return [
            [number for number, own in enumerate(buckets) if own == bucket]
            for bucket in sorted({*buckets})
        ]

    @property
    def table_shape(self) -> tuple[int, int, int]:
        """Shape of the table of rows' contents: by parameter its kind, and how many factors."""
        return self.num_shares, max(len(self.tensors), 1), 2

    def capacity(self, parameter: int) -> int:
        """Rows of factors that a share has room for."""
        return -(-self.row_limits[parameter] // self.num_shares)

    def offsets(self) -> tuple[list[list[int]], list[list[int]], int]:
        """Byte offsets, by share and parameter, of gradients and of factors; and the total size.

        Before them is the table of what each share has published.
        """
        starts, row_bytes = flat_offsets(self.extents)
        end = align(math.prod(self.table_shape) * 8)
        rows = [[end + share * row_bytes + at for at in starts] for share in range(self.num_shares)]
        end += self.num_shares * row_bytes
        factors: list[list[int]] = []
        for _ in range(self.num_shares):
            factors.append([])
            for parameter in range(len(self.tensors)):
                factors[-1].append(end)
                end += align(self._factor_bytes(parameter))
        return rows, factors, end

    @property
    def num_bytes(self) -> int:
        """Size in memory, with holes."""
        return self.offsets()[-1]

    def holes(self, here: range) -> list[tuple[int, int]]:
        """Bytes ``[start, stop)`` that need no memory until a share uses them.

        If a weight's factors are exchanged, only its first row holds a gradient: the sum.

        Args:
            here: the rows whose gradients are kept here.
        """
        rows, factors, _ = self.offsets()
        return sorted(
            (start, start + num_bytes)
            for share in range(self.num_shares)
            for parameter, limit in enumerate(self.row_limits)
            for start, num_bytes in (
                (rows[share][parameter], self.tensors[parameter].extent.num_bytes),
                (factors[share][parameter], self._factor_bytes(parameter)),
            )
            if num_bytes
            and (
                share not in here
                or self.is_sparse(parameter)
                or (limit and start != rows[here.start][parameter])
            )
        )

    def _factor_bytes(self, parameter: int) -> int:
        """For factors, or for the numbers of rows."""
        tensor = self.tensors[parameter]
        if self.is_sparse(parameter):
            return tensor.shape[0] * torch.int64.itemsize
        if not self.row_limits[parameter]:
            return 0
        return self.capacity(parameter) * sum(tensor.shape) * tensor.extent.element_bytes
