"""The exchange of shards: ranks of one host gather parts, and sum partial results, in slots.

There are two slots of shared memory. In each round every rank writes its part to one of them, all
ranks meet, and every rank reads. The next round uses the other slot: a rank that writes to a slot
again has met all others since they read it. So one meeting per round is enough.

Sums are formed in the fixed tree over all shards (``plan.program.sum_tree``), so their bits do not
depend on the number of ranks.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from lockstep.plan.program.sum_tree import tree_sum
from lockstep.plan.splits import Split

SLOT_BYTES = 1 << 23

Tensors = Sequence[torch.Tensor]


class ShardExchange:
    """One rank's end.

    Args:
        num_shards: of each divided dim.
        own: this rank's.
        slots: two rows of bytes that all ranks share; None for one rank.
        meet: waits for all ranks.
    """

    def __init__(
        self,
        num_shards: int,
        own: range,
        slots: torch.Tensor | None = None,
        meet: Callable[[], None] = lambda: None,
    ) -> None:
        self.num_shards = num_shards
        self.own = own
        self._slots = slots
        self._meet = meet
        self._turn = 0

    def gathered(self, parts: Tensors, split: Split, shape: Sequence[int]) -> torch.Tensor:
        """The whole tensor of this shape; every rank calls it with its parts."""
        whole = parts[0].new_empty(tuple(shape))
        flat = _flat(whole, split.dim)
        flat_parts = [_flat(part, split.dim) for part in parts]
        if self._slots is None:
            self._place(flat, flat_parts, split)
            return whole
        for rows, columns in self._rounds(flat):
            place = flat[rows, :, columns]
            slot = self._slot(place.dtype, place.shape)
            self._place(slot, [part[rows, :, columns] for part in flat_parts], split)
            self._meet()
            place.copy_(slot)
        return whole

    def _place(self, whole: torch.Tensor, parts: Tensors, split: Split) -> None:
        for shard, part in zip(self.own, parts, strict=True):
            for place, block in blocks_of(whole, part, split.at(1), shard):
                place.copy_(block)

    def _rounds(self, flat: torch.Tensor) -> Iterator[tuple[slice, slice]]:
        """The rows and columns of each round, of a tensor with three dims."""
        num_rows, size, num_columns = flat.shape
        most = SLOT_BYTES // (size * flat.element_size())
        columns = min(num_columns, most)
        rows = most // max(columns, 1)
        for row in range(0, num_rows, max(rows, 1)):
            for column in range(0, num_columns, max(columns, 1)):
                yield slice(row, row + rows), slice(column, column + columns)

    def total(self, partials: Tensors) -> torch.Tensor:
        """The sum of all shards' partial results; every rank calls it with its own."""
        if self._slots is None:
            total: torch.Tensor = tree_sum(dict(zip(self.own, partials, strict=True)))
            return total
        whole = torch.empty_like(partials[0], memory_format=torch.contiguous_format)
        flat, flat_partials = whole.view(-1), [one.reshape(-1) for one in partials]
        length = SLOT_BYTES // (self.num_shards * flat.element_size())
        for start in range(0, len(flat), length):
            place = flat[start : start + length]
            slot = self._slot(flat.dtype, (self.num_shards, len(place)))
            for shard, one in zip(self.own, flat_partials, strict=True):
                slot[shard].copy_(one[start : start + length])
            self._meet()
            place.copy_(tree_sum(dict(enumerate(slot))))
        return whole

    def _slot(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """The slot of the next round, for a tensor."""
        assert self._slots is not None
        self._turn ^= 1
        num_bytes = math.prod(shape) * dtype.itemsize
        return self._slots[self._turn, :num_bytes].view(dtype).view(tuple(shape))


def _flat(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """A tensor with three dims, of which the second is ``dim``."""
    shape = tensor.shape
    return tensor.reshape(math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :]))


def blocks_of(
    whole: torch.Tensor, part: torch.Tensor, split: Split, shard: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Views of a shard's blocks in the whole tensor, each with the view of it in the part."""
    offset = 0
    for start, stop in split.cuts[shard]:
        length = stop - start
        yield whole.narrow(split.dim, start, length), part.narrow(split.dim, offset, length)
        offset += length


def cut(whole: torch.Tensor, split: Split, shard: int) -> torch.Tensor:
    """A shard of a whole tensor: a view, if it consists of one block."""
    cuts = split.cuts[shard]
    blocks = [whole.narrow(split.dim, start, stop - start) for start, stop in cuts]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, split.dim)
