"""Rows of embeddings on their way to other domains: only those that were touched travel.

Only their sender knows how many they are, so their counts go first, in a transfer of their own.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from lockstep.comm.transport import Transport


@dataclass(frozen=True)
class SparseRows:
    """Some rows of a tensor.

    Attributes:
        numbers: of the rows, int64.
        values: the rows, shape (len(numbers), width).
    """

    numbers: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of_gradient(cls, gradient: torch.Tensor) -> "SparseRows":
        """The rows of a sparse tensor."""
        gradient = gradient.coalesce()
        return cls(gradient.indices()[0], gradient.values())

    @classmethod
    def empty(cls, count: int, like: torch.Tensor) -> "SparseRows":
        """Room for so many rows of a tensor."""
        return cls(torch.empty(count, dtype=torch.int64), like.new_empty(count, like.shape[1]))

    @property
    def num_bytes(self) -> int:
        """Size in memory."""
        return self.numbers.nbytes + self.values.nbytes

    def as_gradient(self, height: int) -> torch.Tensor:
        """A sparse tensor of so many rows that has these, which are in ascending order."""
        return torch.sparse_coo_tensor(
            self.numbers[None],
            self.values,
            (height, self.values.shape[1]),
            is_coalesced=True,
            check_invariants=False,
        )


def exchange_rows(
    transport: Transport,
    sends: Mapping[int, Sequence[SparseRows]],
    receives: Mapping[int, Sequence[torch.Tensor]],
) -> dict[int, Iterator[SparseRows]]:
    """Transfer rows of some tensors; by rank, those that have come, in the order of ``receives``.

    Args:
        transport: to these ranks.
        sends: by rank, what it gets.
        receives: by rank, tensors whose rows it sends, for their widths and dtypes.
    """
    counts = {
        peer: torch.empty(len(tensors), dtype=torch.int64) for peer, tensors in receives.items()
    }
    own_counts = {
        peer: torch.tensor([len(one.numbers) for one in rows]) for peer, rows in sends.items()
    }
    transport.transfer(_listed(own_counts), _listed(counts))
    coming = {
        peer: [
            SparseRows.empty(count, tensor)
            for count, tensor in zip(counts[peer].tolist(), tensors, strict=True)
        ]
        for peer, tensors in receives.items()
    }
    transport.transfer(_flat(sends), _flat(coming))
    return {peer: iter(rows) for peer, rows in coming.items()}


def _listed(tensors: Mapping[int, torch.Tensor]) -> dict[int, list[torch.Tensor]]:
    return {peer: [tensor] for peer, tensor in tensors.items()}


def _flat(rows: Mapping[int, Sequence[SparseRows]]) -> dict[int, list[torch.Tensor]]:
    return {
        peer: [part for one in each for part in (one.numbers, one.values)]
        for peer, each in rows.items()
    }
