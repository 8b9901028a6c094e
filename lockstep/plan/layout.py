"""Where parameters lie in one flat region, and which slice of it each rank updates.

Offsets and cuts are multiples of ``ALIGNMENT_BYTES``, so that every rank's slice of a parameter
starts where vector instructions like it and where the same parameter, updated whole, would have
the same element in the same lane: cutting changes no bit of an elementwise update.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

ALIGNMENT_BYTES = 512


@dataclass(frozen=True, kw_only=True)
class Extent:
    """A parameter's size: ``num_elements`` of ``element_bytes`` each."""

    num_elements: int
    element_bytes: int


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


def elementwise_slices(extents: Sequence[Extent], num_ranks: int) -> list[list[Piece]]:
    """Cut the flat region into one run of equal size per rank: the pieces each rank updates.

    Only for optimizers that treat every element by itself.
    """
    offsets, total = flat_offsets(extents)
    cuts = [align(total * rank // num_ranks) for rank in range(num_ranks)] + [total]
    slices: list[list[Piece]] = []
    for low, high in pairwise(cuts):
        pieces = []
        for index, (offset, extent) in enumerate(zip(offsets, extents, strict=True)):
            # Whole elements: alignment is a multiple of every element size.
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
