"""Sums of gradients of which each rank keeps its own part only.

The gradients go from rank to rank in buckets, as in ``comm.collectives.overlapped_reduce``. A rank
adds up a bucket when it sends the next one, keeps the sums of its pieces, and frees the memory of
all others. So gradients take the memory of its part and of two buckets (Rajbhandari et al., "ZeRO",
SC20, level 2).

All ranks send the buckets in one order, whichever parameters a share has used: so no rank waits for
a bucket that another one sends later. A gradient that a share does not have is sent as zeros.

Where several groups of ranks each divide the parameters, a bucket goes in two stages. First a group
adds up its ranks' gradients, as far as these are subtrees (``plan.program.sum_tree``): each rank
has the sums of all that it keeps of the parameters. Then the ranks that keep the same send each
other these sums, each of what the other updates. So groups send each other one sum, and not one of
each rank.
"""

import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.comm.collectives.gradients import add_up
from lockstep.comm.collectives.overlapped_reduce import Bucket, BucketSlice, OverlappedReduce
from lockstep.comm.collectives.piece_memory import PieceMemory, allocate, piece_memory
from lockstep.errors import ModelError
from lockstep.plan.layout import Piece
from lockstep.plan.program.sum_tree import subtrees

# The heap keeps what has been freed; what takes that much memory goes back to the kernel.
_LARGE_BYTES = 1 << 20


class ShardedReduce(OverlappedReduce):
    """One rank's end.

    Args:
        names: of the parameters.
        divisions: the groups of ranks that divide the parameters; empty for one of all ranks.
        keeps_on_host: sums are kept in host memory, also where gradients are on a device.
        keeps_memory: the memory of gradients is not freed, and no rank waits for a bucket before it
            sends the next one.
        options: see ``OverlappedReduce``.
    """

    takes_all = True
    waits_in_backward = True
    """False if ranks wait for each other in backward, in layers with statistics over the batch: a
    rank that waited for a bucket there would wait for ranks that wait for it."""

    def __init__(
        self,
        *args: Any,
        names: Sequence[str],
        divisions: Sequence[Sequence[int]] = (),
        keeps_on_host: bool = False,
        keeps_memory: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._names = names
        self._keeps_on_host = keeps_on_host
        self._keeps_memory = self._keeps_incoming = keeps_memory
        self._divisions = divisions or [[rank for ranks in self._domains for rank in ranks]]
        self._near = self._group_of(self._rank)
        self._far = [rank for rank in self._keeping_as(self._rank) if rank != self._rank]
        self._kept: dict[int, list[Piece]] = {}  # of the parameters, by the ranks of the group
        self._put: set[tuple[int, int]] = set()  # rows and parameters, in this step
        self._under_way: list[_Transfer] = []
        self._memories: dict[int, PieceMemory] = {}  # of this rank's rows, by bucket
        self._sums: dict[Piece, torch.Tensor] = {}  # where they are placed

    def divide(self, pieces: Mapping[int, Sequence[Piece]]) -> None:
        for rank in self._near:
            kept = (piece for one in self._keeping_as(rank) for piece in pieces[one])
            self._kept[rank] = sorted(kept, key=lambda piece: (piece.parameter, piece.start))
        super().divide(pieces)

    def _bucket(self, number: int, parameters: frozenset[int]) -> Bucket:
        """A bucket, whose memory is there only until all views of it have been made."""
        rows = self._own_rows or [self._sums_row]
        tensors = [self._memory_of(row, one) for row in rows for one in sorted(parameters)]
        allocate(tensors)
        bucket = super()._bucket(number, parameters)
        own = self._own_pieces(bucket)
        memory = self._memories[number] = piece_memory(
            tensors,
            [self._rows.cut(self._sums_row, piece) for piece in own],
            keeps_on_host=self._keeps_on_host,
        )
        self._sums |= zip(own, memory.kept, strict=True)
        memory.drop()
        return bucket

    def _own_pieces(self, bucket: Bucket) -> list[Piece]:
        return self._pieces_in(bucket, self._rank)

    def _pieces_in(self, bucket: Bucket, rank: int) -> list[Piece]:
        return [one for one in self._pieces[rank] if one.parameter in bucket.parameters]

    def _group_of(self, rank: int) -> Sequence[int]:
        return next(ranks for ranks in self._divisions if rank in ranks)

    def _keeping_as(self, rank: int) -> list[int]:
        """The ranks, one of each group, that keep the same pieces of parameters."""
        own = self._group_of(rank)
        return [ranks[own.index(rank)] for ranks in self._divisions]

    @property
    def _peers(self) -> Sequence[int]:
        return [rank for rank in self._near if rank != self._rank]

    def _summed_by(self, rank: int) -> Sequence[Piece]:
        return self._kept[rank]

    # --- while passes run ------------------------------------------------------------------------

    def _begin(self, num_rows: int) -> None:
        super()._begin(num_rows)
        self._put.clear()
        self.free()

    @property
    def is_early(self) -> bool:
        return True

    @property
    def _is_ordered(self) -> bool:
        return True

    def _note(self, row: int, parameter: int) -> None:
        """A gradient is put in a row.

        Raises:
            ModelError: its bucket has been sent.
        """
        self._put.add((row, parameter))
        bucket = self._buckets[self._bucket_of[parameter]]
        if bucket.is_sent:
            raise ModelError(
                "Backward has computed a gradient of a parameter after the gradients of its unit "
                "were summed and their memory was freed.",
                received=f"a late gradient of {self._names[parameter]!r}",
                fix="Use torch.utils.checkpoint with use_reentrant=False, and name modules that "
                'share a parameter as one unit; or use level="slots".',
            )
        self._memories[bucket.number].take()

    def open_places(self, parameters: Iterable[int]) -> None:
        for bucket in {self._bucket_of[number] for number in parameters}:
            self._memories[bucket].take()

    def bound(self) -> float:
        """Unknown: the memory of other ranks' pieces is free already."""
        return float("inf")

    def _exchange(self, bucket: Bucket) -> None:
        """Begin to send and receive a bucket, and go on with those before it."""
        self._memories[bucket.number].take()
        for rows in self._filled_of([self._rank]):
            self._rows.sum_own_rows(self._all_pieces(bucket), rows)
            self._zero_unused(rows, bucket)
        if self.waits_in_backward and not self._keeps_memory:  # before it takes memory for the next
            self._advance()
        pieces = [one for one in self._summed_by(self._rank) if one.parameter in bucket.parameters]
        own = {
            rows: {piece: self._rows.cut(rows.start, piece) for piece in pieces}
            for rows in self._filled_of([self._rank])
        }
        outgoing = self._filled(bucket.outgoing)
        incoming = bucket.incoming or self._incoming(bucket.parameters)
        self._begin_transfer(bucket, own, outgoing, incoming)

    def _begin_transfer(
        self,
        bucket: Bucket,
        own: Mapping[range, Mapping[Piece, torch.Tensor]],
        outgoing: Sequence[BucketSlice],
        incoming: Iterable[BucketSlice],
        *,
        is_far: bool = False,
    ) -> None:
        incoming = self._filled(incoming)
        self._under_way.append(
            _Transfer(
                bucket=bucket,
                sums=[*own.items(), *((part.rows, part.pieces) for part in incoming)],
                is_last=is_far or not self._far,
                outgoing=outgoing,
                finish=self._begin_parts(bucket, outgoing, incoming),
            )
        )

    def _filled_of(self, ranks: Sequence[int]) -> list[range]:
        """The subtrees of consecutive ranks that have gradients in this step."""
        found = subtrees(self._rows_of(ranks), self._num_rows)
        return [rows for rows in found if rows.start < self._num_filled]

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        """Memory that goes back to the kernel when it is not used any more."""
        if num_bytes < _LARGE_BYTES:
            return super()._allocate(num_bytes)
        return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)

    def _zero_unused(self, rows: range, bucket: Bucket) -> None:
        """Put zeros where this rank has put no gradient in any of these rows."""
        for parameter in bucket.parameters:
            if not any((row, parameter) in self._put for row in rows):
                self._memory_of(rows.start, parameter).zero_()

    def _memory_of(self, row: int, parameter: int) -> torch.Tensor:
        places = self._rows.places(row)
        assert places is not None
        return places[parameter]

    def _all_pieces(self, bucket: Bucket) -> list[Piece]:
        return [
            piece
            for pieces in self._pieces.values()
            for piece in pieces
            if piece.parameter in bucket.parameters
        ]

    def _advance(self) -> None:
        """Wait for what is under way, and take it a stage further."""
        under_way, self._under_way = self._under_way, []
        for transfer in under_way:
            transfer.finish()
            (self._end if transfer.is_last else self._send_sums)(transfer)

    @torch.no_grad()
    def _end(self, transfer: "_Transfer") -> None:
        """Put the sums of this rank's pieces in its row, and free the rest."""
        own = self._own_pieces(transfer.bucket)
        self._memories[transfer.bucket.number].take()
        for piece, total in _added_up(transfer.sums, own).items():
            place = self._rows.cut(self._sums_row, piece)
            if place is not total:
                place.copy_(total)
        if not self._keeps_memory:
            self._memories[transfer.bucket.number].free()

    @torch.no_grad()
    def _send_sums(self, transfer: "_Transfer") -> None:
        """Add up what this rank's group has, and exchange that with other groups."""
        bucket, near = transfer.bucket, self._filled_of(self._near)
        pieces = {piece: None for _, found in transfer.sums for piece in found}
        totals = {
            rows: _added_up([one for one in transfer.sums if one[0].start in rows], [*pieces])
            for rows in near
        }
        outgoing = [
            self._copied(peer, rows, total, self._pieces_in(bucket, peer))
            for peer in self._far
            for rows, total in totals.items()
        ]
        incoming = [
            self._apart(peer, rows, self._own_pieces(bucket))
            for peer in self._far
            for rows in self._filled_of(self._group_of(peer))
        ]
        self._begin_transfer(bucket, totals, outgoing, incoming, is_far=True)

    def _copied(
        self, peer: int, rows: range, total: Mapping[Piece, torch.Tensor], pieces: Sequence[Piece]
    ) -> BucketSlice:
        """Sums as a part that can be sent: they lie in other ranks' parts."""
        part = self._apart(peer, rows, pieces)
        for piece, place in part.pieces.items():
            place.copy_(total[piece])
        return part

    def free(self) -> None:
        """Free the sums: the step has used them."""
        for memory in () if self._keeps_memory else self._memories.values():
            memory.drop()

    def _finish(self) -> None:
        """Add up the buckets that are under way."""
        while self._under_way:
            self._advance()

    # --- when all have met -----------------------------------------------------------------------

    def hand_over(self, num_rows: int) -> None:
        self._send_rest()
        self._finish()

    def collect(self, num_rows: int) -> None:
        self._rows.collect(num_rows)

    def all_ranks(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of all ranks, by rank; every rank calls it with as many."""
        own = torch.tensor(numbers, device=self._rows.base(0).device)
        found = {peer: torch.empty_like(own) for peer in self._clients}
        self._transport.transfer(
            {peer: [own] for peer in found}, {peer: [one] for peer, one in found.items()}
        )
        found[self._rank] = own
        return [[int(number) for number in found[rank]] for rank in sorted(found)]

    def weigh(self, factors: object) -> None:
        assert factors is None, "sums are formed before factors are known"

    def reduce_scatter(self, pieces: Iterable[Piece]) -> list[torch.Tensor | None]:
        return [
            self._sums[piece] if self._rows.is_used(piece.parameter) else None for piece in pieces
        ]

    def gather(self, pieces: Sequence[Piece], sums: Sequence[torch.Tensor | None]) -> None:
        for memory in self._memories.values():
            memory.take()
        super().gather(pieces, sums)


@dataclass(frozen=True, kw_only=True)
class _Transfer:
    """A bucket that is sent and received.

    Attributes:
        bucket: the bucket.
        sums: those of subtrees, here and where other ranks' go.
        is_last: afterwards this rank has the sums of all subtrees.
        outgoing: what is sent; its memory is needed until then.
        finish: waits until all have come and gone.
    """

    bucket: Bucket
    sums: Sequence[tuple[range, Mapping[Piece, torch.Tensor]]]
    is_last: bool
    outgoing: Sequence[BucketSlice]
    finish: Callable[[], None]


def _added_up(
    sums: Sequence[tuple[range, Mapping[Piece, torch.Tensor]]], pieces: Sequence[Piece]
) -> dict[Piece, torch.Tensor]:
    """The sums over subtrees of each piece; formed in place."""
    totals = add_up([{rows.start: found[piece] for rows, found in sums} for piece in pieces])
    return dict(zip(pieces, totals, strict=True))
