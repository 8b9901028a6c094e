"""Where parameters lie in one flat region, and which slice of it each rank updates.

Offsets and cuts are multiples of ``ALIGNMENT_BYTES``, so that every rank's slice of a parameter
starts where vector instructions like it and where the same parameter, updated whole, would have
the same element in the same lane: cutting changes no bit of an elementwise update.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from lockstep.plan.shares import shares_of_replica

ALIGNMENT_BYTES = 512

# The least number of runs of equal size into which large parameters can be cut.
_FINENESS = 256

# A bucket of gradients: large enough that to send it costs more than to begin, and few of them.
_LEAST_BUCKET_BYTES = 1 << 20
_MOST_BUCKETS = 8

# Parameters from which on buckets pay. gloo's work for each message disturbs the processes that
# compute on the same cores for longer than it takes to pack a smaller model into one.
_LEAST_IN_BUCKETS_BYTES = 1 << 23


@dataclass(frozen=True, kw_only=True)
class Extent:
    """A parameter's size.

    Attributes:
        num_elements: how many elements.
        element_bytes: the size of each.
        row_elements: elements of a row, where the parameter may be cut between rows only, into one
            block per share; 0 where it may be cut anywhere.
        bucket: consecutive parameters of one bucket are exchanged at a time, so every rank has a
            slice of each.
    """

    num_elements: int
    element_bytes: int
    row_elements: int = 0
    bucket: int = 0

    @property
    def num_bytes(self) -> int:
        """Its size in memory."""
        return self.num_elements * self.element_bytes


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Elements ``[start, stop)`` of parameter number ``parameter``."""

    parameter: int
    start: int
    stop: int


def align(offset_bytes: int) -> int:
    """The next multiple of ``ALIGNMENT_BYTES``."""
    return -(-offset_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def flat_offsets(extents: Sequence[Extent]) -> tuple[list[int], int]:
    """Byte offset of each parameter in one aligned region, and the region's size in bytes."""
    offsets = []
    end = 0
    for extent in extents:
        offsets.append(end)
        end = align(end + extent.num_bytes)
    return offsets, end


def num_buckets(extents: Sequence[Extent], *, are_early: bool) -> int:
    """About how many buckets to exchange parameters in; 0 for no buckets.

    Args:
        extents: of the parameters.
        are_early: buckets may leave one by one.
    """
    if sum(extent.num_bytes for extent in extents) < _LEAST_IN_BUCKETS_BYTES:
        return 0
    return _MOST_BUCKETS if are_early else 1


def in_buckets(extents: Sequence[Extent], most: int) -> list[Extent]:
    """The same parameters, with neighbours in buckets of about equal size.

    Backward completes the gradients of the last parameters first, and those of the first when it
    ends: so buckets are filled from the end, and the rest for the first one is small.
    """
    least = max(_LEAST_BUCKET_BYTES, sum(extent.num_bytes for extent in extents) // most)
    bucket, filled, numbers = 0, 0, []
    for extent in reversed(extents):
        if filled >= least:
            bucket, filled = bucket + 1, 0
        filled += extent.num_bytes
        numbers.append(bucket)
    return [
        replace(extent, bucket=bucket - number)
        for extent, number in zip(extents, reversed(numbers), strict=True)
    ]


def elementwise_slices(
    extents: Sequence[Extent], num_ranks: int, num_shares: int
) -> list[list[Piece]]:
    """Cut parameters into one slice per rank, of equal size where they may be cut anywhere.

    A parameter that is cut by rows has a block per share, and a rank gets its shares' blocks. Only
    for optimizers that treat every element by itself.
    """
    slices = _flat_slices(extents, num_ranks)
    for index, extent in enumerate(extents):
        if extent.row_elements:
            blocks = row_blocks(extent, num_shares)
            for rank, pieces in enumerate(slices):
                shares = shares_of_replica(rank, num_ranks, num_shares)
                start, stop = blocks[shares[0]][0], blocks[shares[-1]][1]
                if start < stop:
                    pieces.append(Piece(parameter=index, start=start, stop=stop))
    return [sorted(pieces, key=lambda piece: piece.parameter) for pieces in slices]


def row_blocks(extent: Extent, num_blocks: int) -> list[tuple[int, int]]:
    """Elements ``[start, stop)`` of each block of rows: aligned, of equal size but for that."""
    num_rows = extent.num_elements // extent.row_elements
    row_bytes = extent.row_elements * extent.element_bytes
    unit = ALIGNMENT_BYTES // math.gcd(ALIGNMENT_BYTES, row_bytes)  # rows that end aligned
    cuts = [
        min(-(-num_rows * block // (num_blocks * unit)) * unit, num_rows)
        for block in range(num_blocks)
    ]
    return [
        (start * extent.row_elements, stop * extent.row_elements)
        for start, stop in pairwise([*cuts, num_rows])
    ]


def block_sizes(
    extents: Sequence[Extent], num_shares: int, pieces: Sequence[Piece]
) -> list[list[int]]:
    """Cut pieces wherever some number of ranks would cut them: the elements of each block.

    A block is never cut further, so what is computed of each (a norm) does not depend on the number
    of ranks.
    """
    free = [index for index, extent in enumerate(extents) if not extent.row_elements]
    offsets, total = flat_offsets([extents[index] for index in free])
    offset_of, unit = dict(zip(free, offsets, strict=True)), _unit(total)

    def cuts_of(index: int) -> list[int]:
        extent = extents[index]
        if extent.row_elements:
            return [start for start, _ in row_blocks(extent, num_shares)]
        offset = offset_of[index]
        end = offset + extent.num_bytes
        return [
            (at - offset) // extent.element_bytes
            for at in range(-(-offset // unit) * unit, end, unit)
        ]

    sizes = []
    for piece in pieces:
        inner = [cut for cut in cuts_of(piece.parameter) if piece.start < cut < piece.stop]
        edges = [piece.start, *inner, piece.stop]
        sizes.append([stop - start for start, stop in pairwise(edges)])
    return sizes


def _unit(total_bytes: int) -> int:
    """Bytes that stay together: a power of two, and a small part of the whole."""
    unit = ALIGNMENT_BYTES
    while unit * 2 * _FINENESS <= total_bytes:
        unit *= 2
    return unit


def _flat_slices(extents: Sequence[Extent], num_ranks: int) -> list[list[Piece]]:
    """Cut all that may be cut anywhere, seen as one flat region, into runs of about equal size.

    Each bucket by itself, at places where the whole region might be cut.
    """
    free = [index for index, extent in enumerate(extents) if not extent.row_elements]
    offsets, total = flat_offsets([extents[index] for index in free])
    unit = _unit(total)
    slices: list[list[Piece]] = [[] for _ in range(num_ranks)]
    for low, high in pairwise([*_bucket_starts([extents[index] for index in free]), total]):
        first = [low + (high - low) * rank // num_ranks for rank in range(1, num_ranks)]
        nearest = [(at + unit // 2) // unit * unit for at in first]
        cuts = [low, *(min(max(at, low), high) for at in nearest), high]
        for pieces, (start, stop) in zip(slices, pairwise(cuts), strict=True):
            pieces += _pieces_between(start, stop, free, offsets, extents)
    return slices


def _bucket_starts(extents: Sequence[Extent]) -> list[int]:
    """Byte offsets where buckets begin."""
    offsets, _ = flat_offsets(extents)
    buckets = [None, *(extent.bucket for extent in extents)]
    return [at for at, (one, next_) in zip(offsets, pairwise(buckets), strict=True) if one != next_]


def _pieces_between(
    low: int, high: int, numbers: Sequence[int], offsets: Sequence[int], extents: Sequence[Extent]
) -> Iterator[Piece]:
    """The pieces between two byte offsets, of parameters with these numbers at these offsets."""
    for number, offset in zip(numbers, offsets, strict=True):
        # Whole elements: alignment is a multiple of every element size.
        extent = extents[number]
        start = max(low - offset, 0) // extent.element_bytes
        stop = min(max(high - offset, 0) // extent.element_bytes, extent.num_elements)
        if start < stop:
            yield Piece(parameter=number, start=start, stop=stop)


def whole_parameters(extents: Sequence[Extent], num_ranks: int) -> list[list[Piece]]:
    """Give each rank whole parameters: the largest first, each to the least loaded rank.

    For optimizers that look at each parameter as a whole (Muon, Adafactor).
    Within 4/3 of the optimal balance (Graham 1969, longest processing time first).
    """
    sizes = [extent.num_bytes for extent in extents]
    load = [0] * num_ranks
    owned: list[list[int]] = [[] for _ in range(num_ranks)]
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        rank = load.index(min(load))
        load[rank] += sizes[index]
        owned[rank].append(index)
    return [
        [
            Piece(parameter=index, start=0, stop=extents[index].num_elements)
            for index in sorted(mine)
            if extents[index].num_elements
        ]
        for mine in owned
    ]
