"""Sums over ranks that share no memory, whose exchange begins while backward still runs.

Each rank is a domain of its own (``comm.collectives.reduce_scatter``). Its gradients go to the
others in buckets (``plan.layout.in_buckets``): a bucket is sent when backward has completed the
last gradient in it, from the sender's row to where the receiver adds it up, and is not copied on
its way.

Each rank sends whole buckets, even if a parameter was not used. Receivers learn of that at the
barrier. There a sender also announces a gradient that changed after its bucket was sent (a layer
that runs backward twice); then the bucket is sent again.

Ranks in host memory send a bucket when it is complete. Between devices a bucket is one collective,
which all ranks begin in the same order: there a complete bucket waits for those before it.
"""

import ctypes
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.comm.collectives.gradients import Gradients
from lockstep.comm.collectives.reduce_scatter import ReduceScatter
from lockstep.comm.transport import Buffers, nothing_to_wait_for
from lockstep.comm.transports.process_group_transport import ProcessGroupTransport
from lockstep.plan.layout import ALIGNMENT_BYTES, Piece
from lockstep.plan.program.sum_tree import subtrees


@dataclass(frozen=True, kw_only=True)
class BucketSlice:
    """The part of a bucket that one rank sends another: pieces of a subtree's sum.

    Attributes:
        peer: the rank at the other end.
        rows: of the subtree.
        runs: the memory, as bytes.
        pieces: what lies there.
    """

    peer: int
    rows: range
    runs: Sequence[torch.Tensor]
    pieces: Mapping[Piece, torch.Tensor]


@dataclass(kw_only=True)
class Bucket:
    """Parameters whose gradients are sent together, and the state of their transfer.

    Attributes:
        number: the last bucket is completed first.
        parameters: their numbers.
        outgoing: what this rank sends.
        incoming: what it receives.
        missing: parameters whose gradients are not complete.
        is_sent: this rank has begun to send.
        is_late: gradients have changed since.
        finish: waits until what is under way has come and gone.
    """

    number: int
    parameters: frozenset[int]
    outgoing: list[BucketSlice]
    incoming: list[BucketSlice]
    missing: set[int] = field(default_factory=set)
    is_sent: bool = False
    is_late: bool = False
    finish: Callable[[], None] = nothing_to_wait_for


class OverlappedReduce(ReduceScatter):
    """One rank's end.

    Args:
        buckets: by parameter, the number of its bucket.
        num_rows: of gradients, of all ranks.
        options: see ``ReduceScatter``.
    """

    _transport: ProcessGroupTransport
    _keeps_incoming = True  # from one step to the next

    def __init__(self, *args: Any, buckets: Sequence[int], num_rows: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self._bucket_of = buckets
        self._num_rows = num_rows
        self._own_rows = self._rows_of([self._rank])
        self._sums_row = self._own_rows.start if self._own_rows else self._rows.base_row
        self._buckets: dict[int, Bucket] = {}
        self._waiting: dict[int, Bucket] = {}  # not sent, in the order of sending
        self._num_filled = 0  # rows of the step under way

    def divide(self, pieces: Mapping[int, Sequence[Piece]]) -> None:
        super().divide(pieces)
        self._buckets = {}
        for bucket in sorted({*self._bucket_of}, reverse=True):  # as backward completes them
            parameters = frozenset(
                number
                for number, own in enumerate(self._bucket_of)
                if own == bucket and not self._is_everywhere[number]
            )
            self._buckets[bucket] = self._bucket(bucket, parameters)

    def _bucket(self, number: int, parameters: frozenset[int]) -> Bucket:
        return Bucket(
            number=number,
            parameters=parameters,
            outgoing=list(self._outgoing(parameters)),
            incoming=self._incoming(parameters) if self._keeps_incoming else [],
        )

    @property
    def _peers(self) -> Sequence[int]:
        """The ranks with which buckets are exchanged first."""
        return self._clients

    def _summed_by(self, rank: int) -> Sequence[Piece]:
        """The pieces of which one of these gets the sums."""
        return self._pieces[rank]

    def _outgoing(self, parameters: frozenset[int]) -> Iterator[BucketSlice]:
        for peer in self._peers:
            pieces = [piece for piece in self._summed_by(peer) if piece.parameter in parameters]
            for rows in self._subtrees_of(self._rank):
                cuts = {piece: self._rows.cut(rows.start, piece) for piece in pieces}
                runs = side_by_side(list(cuts.values()))
                yield BucketSlice(peer=peer, rows=rows, runs=runs, pieces=cuts)

    def _incoming(self, parameters: frozenset[int]) -> list[BucketSlice]:
        """Memory that lies as the senders' rows do."""
        pieces = [piece for piece in self._summed_by(self._rank) if piece.parameter in parameters]
        return [
            self._apart(peer, rows, pieces)
            for peer in self._peers
            for rows in self._subtrees_of(peer)
        ]

    def _apart(self, peer: int, rows: range, pieces: Sequence[Piece]) -> BucketSlice:
        """A part in new memory."""
        own = [self._rows.cut(self._sums_row, piece) for piece in pieces]
        runs, places = _alike(own, self._allocate)
        found = dict(zip(pieces, places, strict=True))
        return BucketSlice(peer=peer, rows=rows, runs=runs, pieces=found)

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        """Host memory to receive in."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def _subtrees_of(self, rank: int) -> Sequence[range]:
        return subtrees(self._rows_of([rank]), self._num_rows)

    # --- while passes run ------------------------------------------------------------------------

    def expect(self, num_rows: int) -> None:
        self._begin(num_rows)

    def _begin(self, num_rows: int) -> None:
        self._finish()  # of a step left out
        self._num_filled = num_rows
        for bucket in self._buckets.values():
            bucket.missing = {*bucket.parameters}
            bucket.is_sent = bucket.is_late = False
        self._waiting = dict(self._buckets)

    def _finish(self) -> None:
        """Wait for all that is under way."""
        for bucket in self._buckets.values():
            bucket.finish()
            bucket.finish = nothing_to_wait_for

    @property
    def is_early(self) -> bool:
        return len(self._buckets) > 1 and len(self._own_rows) == 1

    @property
    def _is_ordered(self) -> bool:
        """Whether all ranks send the buckets in one order."""
        return self._transport.is_ordered

    def arrive(
        self, row: int, parameter: int, gradient: torch.Tensor | None, *, is_last: bool
    ) -> None:
        if gradient is not None:
            self._note(row, parameter)
            self._rows.take({(row, parameter): gradient})
        if is_last:
            self._buckets[self._bucket_of[parameter]].missing.discard(parameter)
            self._send_complete()

    def _send_complete(self) -> None:
        """Send the buckets that are complete, as far as their order allows."""
        for number, bucket in list(self._waiting.items()):
            if not bucket.missing:
                self.complete(number)
            elif self._is_ordered:
                return

    def complete(self, number: int) -> None:
        """This rank has put all gradients of a bucket: send it, unless that was done."""
        bucket = self._waiting.pop(number, None)
        if bucket is not None:
            bucket.is_sent = True
            self._exchange(bucket)

    def write(self, row: int, gradients: Gradients) -> None:
        for parameter, gradient in enumerate(gradients):
            if gradient is not None:
                self._note(row, parameter)
        super().write(row, gradients)

    def write_product(
        self, row: int, parameter: int, inputs: torch.Tensor, output_gradients: torch.Tensor
    ) -> None:
        self._note(row, parameter)
        super().write_product(row, parameter, inputs, output_gradients)

    def _note(self, row: int, parameter: int) -> None:
        """A gradient is put in a row."""
        bucket = self._buckets[self._bucket_of[parameter]]
        bucket.is_late |= bucket.is_sent and parameter in bucket.parameters

    def hand_over(self, num_rows: int) -> None:
        if self.is_early:
            for bucket in self._buckets.values():
                if bucket.is_late:
                    self._rows.mark(self._own_rows, bucket.parameters)
            self._send_rest()

    def _send_rest(self) -> None:
        for number in list(self._waiting):
            self.complete(number)

    def _exchange(self, bucket: Bucket) -> None:
        """Begin to send and receive a bucket."""
        outgoing = self._filled(bucket.outgoing)
        for part in outgoing:
            self._rows.sum_own_rows(list(part.pieces), part.rows)
        bucket.finish = self._begin_parts(bucket, outgoing, self._filled(bucket.incoming))

    def _begin_parts(
        self, bucket: Bucket, outgoing: Sequence[BucketSlice], incoming: Sequence[BucketSlice]
    ) -> Callable[[], None]:
        return self._transport.begin(_by_peer(outgoing), _by_peer(incoming), tag=1 + bucket.number)

    def _filled(self, parts: Iterable[BucketSlice]) -> list[BucketSlice]:
        return [part for part in parts if part.rows.start < self._num_filled]

    # --- when all have met -----------------------------------------------------------------------

    def collect(self, num_rows: int) -> None:
        super().collect(num_rows)
        if not self.is_early:
            self._begin(num_rows)
            self._send_rest()
        for bucket in self._buckets.values():
            if self._rows.is_marked(range(num_rows), bucket.parameters):
                bucket.finish()
                outgoing, incoming = self._marked(bucket.outgoing), self._marked(bucket.incoming)
                bucket.finish = self._begin_parts(bucket, outgoing, incoming)

    def _marked(self, parts: Iterable[BucketSlice]) -> list[BucketSlice]:
        return [
            part
            for part in parts
            if self._rows.is_marked(part.rows, [piece.parameter for piece in part.pieces])
        ]

    @torch.no_grad()
    def reduce_scatter(self, pieces: Sequence[Piece]) -> list[torch.Tensor | None]:
        rest = [piece for piece in pieces if self._is_everywhere[piece.parameter]]
        results = dict(zip(rest, super().reduce_scatter(rest), strict=True))
        for bucket in self._buckets.values():
            results |= self._sums_of(bucket, pieces)
        return [results[piece] for piece in pieces]

    def _sums_of(self, bucket: Bucket, pieces: Sequence[Piece]) -> dict[Piece, torch.Tensor | None]:
        own = [piece for piece in pieces if piece.parameter in bucket.parameters]
        self._rows.sum_rows(own)
        partials = {piece: self._rows.subtree_sums(piece) for piece in own}
        bucket.finish()
        bucket.finish = nothing_to_wait_for
        for part in self._filled(bucket.incoming):
            for piece in own:
                for first, *_ in self._rows.subtree_rows(piece.parameter, part.rows):
                    partials[piece][first] = self._rows.weighed(part.pieces[piece], first)
        return dict(zip(own, self._totals(own, list(partials.values())), strict=True))

    def _exchanged(self, rank: int) -> Sequence[Piece]:
        """The rest has been exchanged before."""
        return [piece for piece in self._pieces[rank] if self._is_everywhere[piece.parameter]]

    # --- after the update ------------------------------------------------------------------------

    def _move(self, sends: Buffers, receives: Buffers) -> None:
        self.begin_move(sends, receives)()

    def begin_move(self, sends: Buffers, receives: Buffers) -> Callable[[], None]:
        """Begin to move pieces, in host memory without a copy: all stores have the same layout.

        For arguments and result see ``ProcessGroupTransport.begin``.
        """
        return self._transport.begin(_runs_of(sends), _runs_of(receives), tag=0)


def _by_peer(parts: Iterable[BucketSlice]) -> Buffers:
    """The memory of parts, by the rank at the other end."""
    found: dict[int, list[torch.Tensor]] = defaultdict(list)
    for part in parts:
        found[part.peer] += part.runs
    return found


def _runs_of(buffers: Buffers) -> Buffers:
    return {peer: side_by_side(tensors) for peer, tensors in buffers.items()}


def side_by_side(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Tensors of one store as bytes: those between which there is only alignment, as one.

    On a device they stay what they are.
    """
    if _are_on_device(tensors):
        return tensors
    return [_bytes_at(start, stop) for start, stop in _spans(tensors)]


def _are_on_device(tensors: Sequence[torch.Tensor]) -> bool:
    return any(tensor.device.type != "cpu" for tensor in tensors)


def _spans(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """First address and the one after the last of each run of such tensors."""
    found: list[tuple[int, int]] = []
    for tensor in tensors:
        start = tensor.data_ptr()
        if not tensor.nbytes:
            continue
        if found and 0 <= start - found[-1][1] < ALIGNMENT_BYTES:
            found[-1] = found[-1][0], start + tensor.nbytes
        else:
            found.append((start, start + tensor.nbytes))
    return found


def _bytes_at(start: int, stop: int) -> torch.Tensor:
    """A view of memory that another object keeps alive."""
    memory = (ctypes.c_char * (stop - start)).from_address(start)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _alike(
    tensors: Sequence[torch.Tensor], allocate: Callable[[int], torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """New memory for tensors that lie alike: as ``side_by_side`` gives it; and the tensors."""
    runs: list[torch.Tensor] = []
    places: list[torch.Tensor] = []
    if _are_on_device(tensors):
        runs = places = [torch.empty_like(one) for one in tensors]
        return runs, places
    for start, stop in _spans(tensors):
        run = allocate(stop - start)
        runs.append(run)
        for one in tensors:
            at = one.data_ptr() - start
            if 0 <= at < len(run):
                own = run[at : at + one.nbytes].view(one.dtype)
                places.append(own.as_strided(one.shape, one.stride()))
    return runs, places
