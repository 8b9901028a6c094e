"""Sums of gradients of which each rank keeps its own part only.

The gradients go from rank to rank in buckets, as in ``comm.collectives.overlapped_reduce``. A rank
adds up a bucket when it sends the next one, keeps the sums of its pieces, and frees the memory of
all others. So gradients take the memory of its part and of two buckets (Rajbhandari et al., "ZeRO",
SC20, level 2).

All ranks send the buckets in one order, whichever parameters a share has used: so no rank waits for
a bucket that another one sends later. A gradient that a share does not have is sent as zeros.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from lockstep.comm.collectives.gradients import Gradients, add_up
from lockstep.comm.collectives.overlapped_reduce import Bucket, OverlappedReduce
from lockstep.comm.shared_memory.shared_region import discard
from lockstep.errors import ModelError
from lockstep.plan.layout import Piece


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
        self._waiting: dict[int, Bucket] = {}  # in the order of sending, if no other is asked for
        self._under_way: list[Bucket] = []

    # --- while passes run ------------------------------------------------------------------------

    def _begin(self, num_rows: int) -> None:
        self._finish()  # of a step left out
        self._num_filled = num_rows
        self._put.clear()
        self.free()
        for bucket in self._buckets.values():
            bucket.missing = {*bucket.parameters}
            bucket.is_sent = False
        self._waiting = dict(self._buckets)

    @property
    def is_early(self) -> bool:
        return True

    def arrive(
        self, row: int, parameter: int, gradient: torch.Tensor | None, *, is_last: bool
    ) -> None:
        if gradient is not None:
            self._note(row, parameter)
            self._rows.take({(row, parameter): gradient})
        if is_last:
            self._buckets[self._bucket_of[parameter]].missing.discard(parameter)
            for number, bucket in list(self._waiting.items()):
                if bucket.missing:
                    break
                self.complete(number)

    def complete(self, number: int) -> None:
        """This rank has put all gradients of a bucket; all ranks complete them in one order."""
        bucket = self._waiting.pop(number, None)
        if bucket is not None:
            self._exchange(bucket)

    def write(self, row: int, gradients: Gradients) -> None:
        for parameter, gradient in enumerate(gradients):
            if gradient is not None:
                self._note(row, parameter)
        self._rows.write(row, gradients)

    def write_product(
        self, row: int, parameter: int, inputs: torch.Tensor, output_gradients: torch.Tensor
    ) -> None:
        self._note(row, parameter)
        self._rows.write_product(row, parameter, inputs, output_gradients)

    def _note(self, row: int, parameter: int) -> None:
        """A gradient is put in a row.

        Raises:
            ModelError: too late.
        """
        self._put.add((row, parameter))
        if self._buckets[self._bucket_of[parameter]].is_sent:
            raise ModelError(
                "Backward has computed a gradient of a parameter after the gradients of its unit "
                "were summed and their memory was freed.",
                received=f"a late gradient of {self._names[parameter]!r}",
                fix="Use torch.utils.checkpoint with use_reentrant=False, and name modules that "
                'share a parameter as one unit; or use level="slots".',
            )

    def bound(self) -> float:
        """Unknown: the memory of other ranks' pieces is free already."""
        return float("inf")

    def _exchange(self, bucket: Bucket) -> None:
        """Send a bucket, begin to receive it, and add up those before it."""
        bucket.is_sent = True
        outgoing = self._filled(bucket.outgoing)
        for rows in {part.rows for part in outgoing}:
            self._rows.sum_own_rows(self._all_pieces(bucket), rows)
            self._zero_unused(rows, bucket)
        bucket.incoming = self._all_incoming(bucket.number, bucket.parameters)
        bucket.receives = self._receive(bucket.incoming)
        for part in outgoing:
            bucket.sends += self._transport.send(part.peer, part.runs, part.tag)
        if self.waits_in_backward:
            self._finish()
        self._under_way.append(bucket)

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
    def _add_up(self, bucket: Bucket) -> None:
        """Wait for a bucket; put the sums of this rank's pieces in its row, and free the rest."""
        self._transport.finish([*bucket.receives, *bucket.sends])
        own = [piece for piece in self._pieces[self._rank] if piece.parameter in bucket.parameters]
        filled = [rows for rows in self._subtrees_of(self._rank) if rows.start < self._num_filled]
        summands = []
        for piece in own:
            found = {rows.start: self._rows.cut(rows.start, piece) for rows in filled}
            found |= {part.rows.start: part.pieces[piece] for part in self._filled(bucket.incoming)}
            summands.append(found)
        for piece, total in zip(own, add_up(summands), strict=True):
            place = self._place(piece)
            if place.data_ptr() != total.data_ptr():
                place.copy_(total)
        bucket.incoming, bucket.receives, bucket.sends = [], [], []
        self._free(bucket, {piece: self._place(piece) for piece in own})

    def free(self) -> None:
        """Free the sums: the step has used them."""
        for bucket in self._buckets.values():
            self._free(bucket, {})

    def _place(self, piece: Piece) -> torch.Tensor:
        """Where the sum of a piece is placed."""
        return self._rows.cut(self._own_rows.start, piece)

    def _free(self, bucket: Bucket, kept: dict[Piece, torch.Tensor]) -> None:
        """Free a bucket's gradients, but for the sums of this rank's pieces."""
        for row in self._own_rows:
            keeps = kept.values() if row == self._own_rows.start else ()
            for parameter in bucket.parameters:
                discard(self._memory_of(row, parameter), keeps)

    def _finish(self) -> None:
        """Add up the buckets that are under way."""
        while self._under_way:
            self._add_up(self._under_way.pop(0))

    # --- when all have met -----------------------------------------------------------------------

    def hand_over(self, num_rows: int) -> None:
        for number in list(self._waiting):
            self.complete(number)
        self._finish()

    def collect(self, num_rows: int) -> None:
        self._rows.collect(num_rows)

    def begin_gather(self, tensors: Mapping[int, torch.Tensor]) -> Callable[[], None]:
        """Begin to bring all ranks' pieces of parameters to all ranks; the result waits for them.

        Args:
            tensors: parameters, by number. They must not change until then.
        """
        messages = self._begin_move(*self._pieces_to_move(tensors, all_pieces=True))
        return partial(self._transport.finish, messages)

    def all_ranks(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of all ranks, by rank; every rank calls it with as many."""
        own = torch.tensor(numbers)
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
            self._place(piece) if self._rows.is_used(piece.parameter) else None for piece in pieces
        ]
