"""The exchange of shards: ranks gather parts, and sum partial results.

Sums are formed in the fixed tree over all shards (``plan.program.sum_tree``), so their bits do not
depend on the number of ranks, nor on what moves the tensors.

Ranks that share memory use two slots of it. In each round every rank writes its part to one of
them, all ranks meet, and every rank reads. The next round uses the other slot: a rank that writes
to a slot again has met all others since they read it. So one meeting per round is enough. Other
ranks send their parts to each other.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from lockstep.comm.transports.process_group_transport import ProcessGroupTransport
from lockstep.plan.program.sum_tree import subtrees, tree_sum
from lockstep.plan.shares import share_bounds
from lockstep.plan.splits import Split

SLOT_BYTES = 1 << 23

Tensors = Sequence[torch.Tensor]


class ShardExchange:
    """One rank's end; of a rank that has all shards.

    Args:
        num_shards: of each divided dim.
        own: this rank's.
    """

    def __init__(self, num_shards: int, own: range) -> None:
        self.num_shards = num_shards
        self.own = own

    def gathered(self, parts: Tensors, split: Split, shape: Sequence[int]) -> torch.Tensor:
        """The whole tensor of this shape; every rank calls it with its parts."""
        whole = parts[0].new_empty(tuple(shape))
        place_shards(whole, dict(zip(self.own, parts, strict=True)), split)
        return whole

    def total(self, partials: Tensors) -> torch.Tensor:
        """The sum of all shards' partial results; every rank calls it with its own."""
        total: torch.Tensor = tree_sum(dict(zip(self.own, partials, strict=True)))
        return total

    @property
    def shards_elsewhere(self) -> Sequence[int]:
        """Shards whose gradients only other ranks' memory can hold."""
        return ()

    def bring_to_first(self, shards: Mapping[int, Tensors]) -> None:
        """Send dense tensors of this rank's shards to the first rank, which fills those of others.

        Every rank calls it.
        """
        return


class SlotExchange(ShardExchange):
    """Through shared memory.

    Args:
        num_shards: see ``ShardExchange``.
        own: likewise.
        slots: two rows of bytes that all ranks share.
        meet: waits for all ranks.
    """

    def __init__(
        self, num_shards: int, own: range, slots: torch.Tensor, meet: Callable[[], None]
    ) -> None:
        super().__init__(num_shards, own)
        self._slots = slots
        self._meet = meet
        self._turn = 0

    def gathered(self, parts: Tensors, split: Split, shape: Sequence[int]) -> torch.Tensor:
        whole = parts[0].new_empty(tuple(shape))
        flat = _flat(whole, split.dim)
        flat_parts = [_flat(part, split.dim) for part in parts]
        for rows, columns in self._rounds(flat):
            place = flat[rows, :, columns]
            slot = self._slot(place.dtype, place.shape)
            shards = [part[rows, :, columns] for part in flat_parts]
            place_shards(slot, dict(zip(self.own, shards, strict=True)), split.at(1))
            self._meet()
            place.copy_(slot)
        return whole

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
        self._turn ^= 1
        num_bytes = math.prod(shape) * dtype.itemsize
        return self._slots[self._turn, :num_bytes].view(dtype).view(tuple(shape))


class SentShards(ShardExchange):
    """Through a transport, between ranks that share no memory.

    Args:
        num_shards: see ``ShardExchange``.
        place: of this rank among those that divide layers.
        shards: those of each, in order.
        ranks: their numbers.
        transport: to them.
    """

    def __init__(
        self,
        num_shards: int,
        place: int,
        shards: Sequence[range],
        ranks: Sequence[int],
        transport: ProcessGroupTransport,
    ) -> None:
        super().__init__(num_shards, shards[place])
        self._place = place
        self._transport = transport
        self._shards = shards
        self._ranks = ranks
        self._peers = [peer for peer in range(len(ranks)) if peer != place]

    def gathered(self, parts: Tensors, split: Split, shape: Sequence[int]) -> torch.Tensor:
        whole = parts[0].new_empty(tuple(shape))
        shards = dict(zip(self.own, map(_dense, parts), strict=True))
        come = {
            peer: {shard: self._blank(whole, split, shard) for shard in self._shards[peer]}
            for peer in self._peers
        }
        self._transfer(
            {peer: list(shards.values()) for peer in self._peers},
            {peer: list(theirs.values()) for peer, theirs in come.items()},
        )
        for theirs in come.values():
            shards |= theirs
        place_shards(whole, shards, split)
        return whole

    def _blank(self, whole: torch.Tensor, split: Split, shard: int) -> torch.Tensor:
        shape = list(whole.shape)
        shape[split.dim] = split.size_of(shard)
        return whole.new_empty(shape)

    def total(self, partials: Tensors) -> torch.Tensor:
        """Each rank sums an equal part of the elements, and sends it to all others."""
        own = self._subtree_sums(partials)
        whole = torch.empty_like(partials[0], memory_format=torch.contiguous_format)
        flat, rows = whole.view(-1), {shard: _dense(one).view(-1) for shard, one in own.items()}
        bounds = share_bounds(len(flat), len(self._ranks))
        mine = slice(*bounds[self._place])
        come = {
            peer: {shard: torch.empty_like(flat[mine]) for shard in self._firsts(peer)}
            for peer in self._peers
        }
        self._transfer(
            {peer: [row[slice(*bounds[peer])] for row in rows.values()] for peer in self._peers},
            {peer: list(theirs.values()) for peer, theirs in come.items()},
        )
        sums = {shard: row[mine] for shard, row in rows.items()}
        for theirs in come.values():
            sums |= theirs
        flat[mine].copy_(tree_sum(sums))
        self._transfer(
            {peer: [flat[mine]] for peer in self._peers},
            {peer: [flat[slice(*bounds[peer])]] for peer in self._peers},
        )
        return whole

    def _subtree_sums(self, partials: Tensors) -> dict[int, torch.Tensor]:
        """The sums of this rank's subtrees, by their first shard."""
        by_shard = dict(zip(self.own, partials, strict=True))
        return {
            shards.start: tree_sum({shard: by_shard[shard] for shard in shards})
            for shards in subtrees(self.own, self.num_shards)
        }

    def _firsts(self, peer: int) -> list[int]:
        """The first shard of each subtree of a rank."""
        return [shards.start for shards in subtrees(self._shards[peer], self.num_shards)]

    @property
    def shards_elsewhere(self) -> Sequence[int]:
        return [shard for shard in range(self.num_shards) if shard not in self.own]

    def bring_to_first(self, shards: Mapping[int, Tensors]) -> None:
        of_ranks = {
            place: [one for shard in own for one in shards.get(shard, ())]
            for place, own in enumerate(self._shards)
        }
        first, others = self._ranks[0], {self._ranks[peer]: of_ranks[peer] for peer in self._peers}
        if self._place:
            self._transport.begin({first: of_ranks[self._place]}, {}, tag=0)()
        else:
            self._transport.begin({}, others, tag=0)()

    def _transfer(self, sends: Mapping[int, Tensors], receives: Mapping[int, Tensors]) -> None:
        self._transport.transfer(
            {self._ranks[peer]: tensors for peer, tensors in sends.items()},
            {self._ranks[peer]: tensors for peer, tensors in receives.items()},
        )


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous()


def place_shards(whole: torch.Tensor, shards: Mapping[int, torch.Tensor], split: Split) -> None:
    """Copy shards to their places in a tensor."""
    for shard, part in shards.items():
        for place, block in blocks_of(whole, part, split, shard):
            place.copy_(block)


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
