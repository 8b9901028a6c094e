"""Sums of gradients of which each rank keeps its own part only.

The gradients go from rank to rank in buckets, as in ``comm.collectives.overlapped_reduce``. A rank
adds up a bucket when it sends the next one, keeps the sums of its pieces, and frees the memory of
all others. So gradients take the memory of its part and of two buckets (Rajbhandari et al., "ZeRO",
SC20, level 2).

All ranks send the buckets in one order, whichever parameters a share has used: so no rank waits for
a bucket that another one sends later. A gradient that a share does not have is sent as zeros.
"""

import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.comm.collectives.gradients import add_up
from lockstep.comm.collectives.overlapped_reduce import Bucket, BucketSlice, OverlappedReduce
from lockstep.comm.collectives.piece_memory import PieceMemory, piece_memory
from lockstep.errors import ModelError
from lockstep.plan.layout import Piece

# The heap keeps what has been freed; what takes that much memory goes back to the kernel.
_LARGE_BYTES = 1 << 20


class ShardedReduce(OverlappedReduce):
    """One rank's end.

    Args:
        names: of the parameters.
        options: see ``OverlappedReduce``.
    """

    _keeps_incoming = False
    takes_all = True
    waits_in_backward = True
    """False if ranks wait for each other in backward, in layers with statistics over the batch: a
    rank that waited for a bucket there would wait for ranks that wait for it."""

    def __init__(self, *args: Any, names: Sequence[str], **options: Any) -> None:
        super().__init__(*args, **options)
        self._names = names
        self._put: set[tuple[int, int]] = set()  # rows and parameters, in this step
        self._under_way: list[_Transfer] = []
        self._memories: dict[int, PieceMemory] = {}  # of this rank's rows, by bucket
        self._sums: dict[Piece, torch.Tensor] = {}  # where they are placed

    def divide(self, pieces: Mapping[int, Sequence[Piece]]) -> None:
        super().divide(pieces)
        first = self._own_rows.start
        for number, bucket in self._buckets.items():
            own = self._own_pieces(bucket)
            memory = piece_memory(
                [self._memory_of(row, one) for row in self._own_rows for one in bucket.parameters],
                [self._rows.cut(first, piece) for piece in own],
            )
            self._memories[number] = memory
            self._sums |= zip(own, memory.kept, strict=True)
        self.free()

    def _own_pieces(self, bucket: Bucket) -> list[Piece]:
        return [one for one in self._pieces[self._rank] if one.parameter in bucket.parameters]

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

    def bound(self) -> float:
        """Unknown: the memory of other ranks' pieces is free already."""
        return float("inf")

    def _exchange(self, bucket: Bucket) -> None:
        """Begin to send and receive a bucket, and add up those before it."""
        self._memories[bucket.number].take()
        outgoing = self._filled(bucket.outgoing)
        for rows in {part.rows for part in outgoing}:
            self._rows.sum_own_rows(self._all_pieces(bucket), rows)
            self._zero_unused(rows, bucket)
        if self.waits_in_backward:  # before it takes memory for the next
            self._finish()
        incoming = self._filled(self._all_incoming(bucket.parameters))
        finish = self._begin_parts(bucket, outgoing, incoming)
        self._under_way.append(_Transfer(bucket=bucket, incoming=incoming, finish=finish))

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

    @torch.no_grad()
    def _add_up(self, transfer: "_Transfer") -> None:
        """Wait for a bucket; put the sums of this rank's pieces in its row, and free the rest."""
        transfer.finish()
        first, own = self._own_rows.start, self._own_pieces(transfer.bucket)
        filled = [rows for rows in self._subtrees_of(self._rank) if rows.start < self._num_filled]
        summands = []
        for piece in own:
            found = {rows.start: self._rows.cut(rows.start, piece) for rows in filled}
            found |= {part.rows.start: part.pieces[piece] for part in transfer.incoming}
            summands.append(found)
        for piece, total in zip(own, add_up(summands), strict=True):
            place = self._rows.cut(first, piece)
            if place is not total:
                place.copy_(total)
        self._memories[transfer.bucket.number].free()

    def free(self) -> None:
        """Free the sums: the step has used them."""
        for memory in self._memories.values():
            memory.drop()

    def _finish(self) -> None:
        """Add up the buckets that are under way."""
        while self._under_way:
            self._add_up(self._under_way.pop(0))

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
        incoming: where other ranks' sums go.
        finish: waits until all have come and gone.
    """

    bucket: Bucket
    incoming: Sequence[BucketSlice]
    finish: Callable[[], None]
