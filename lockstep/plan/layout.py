"""Where parameters lie in one flat region, and which slice of it each rank updates.

Offsets and cuts are multiples of ``ALIGNMENT_BYTES``, so that every rank's slice of a parameter
starts where vector instructions like it and where the same parameter, updated whole, would have
the same element in the same lane: cutting changes no bit of an elementwise update.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lockstep.plan.shares import shares_of_replica

ALIGNMENT_BYTES = 512

# Into how many runs of equal size the parameters can be cut, at least, where they are large.
_FINENESS = 256


@dataclass(frozen=True, kw_only=True)
class Extent:
    """A parameter's size.

    Attributes:
        num_elements: how many elements.
        element_bytes: the size of each.
        row_elements: elements of a row, where the parameter may be cut between rows only, into one
            block per share; 0 where it may be cut anywhere.
    """

    num_elements: int
    element_bytes: int
    row_elements: int = 0


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
        end = align(end + extent.num_elements * extent.element_bytes)
    return offsets, end


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
        end = offset + extent.num_elements * extent.element_bytes
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
    """Cut all that may be cut anywhere, seen as one flat region, into runs of about equal size."""
    free = [index for index, extent in enumerate(extents) if not extent.row_elements]
    offsets, total = flat_offsets([extents[index] for index in free])
    unit = _unit(total)
    cuts = [-(-total * rank // num_ranks // unit) * unit for rank in range(num_ranks)] + [total]
    slices: list[list[Piece]] = []
    for low, high in pairwise(cuts):
        pieces = []
        for index, offset in zip(free, offsets, strict=True):
            # Whole elements: alignment is a multiple of every element size.
            extent = extents[index]
            start = max(low - offset, 0) // extent.element_bytes
            stop = min(max(high - offset, 0) // extent.element_bytes, extent.num_elements)
            if start < stop:
                pieces.append(Piece(parameter=index, start=start, stop=stop))
        slices.append(pieces)
    return slices


def whole_parameters(extents: Sequence[Extent], num_ranks: int) -> list[list[Piece]]:
    """Give each rank whole parameters: the largest first, each to the least loaded rank.

    For optimizers that look at each parameter as a whole (Muon, Adafactor).
    Within 4/3 of the optimal balance (Graham 1969, longest processing time first).
    """
    sizes = [extent.num_elements * extent.element_bytes for extent in extents]
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
