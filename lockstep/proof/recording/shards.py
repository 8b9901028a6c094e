"""Which elements of a tensor a rank has: all of a plain tensor, its shard of a DTensor.

A shard is a range of indices in each dim. DTensors that are divided otherwise (pending sums,
strided shards) are put together first, one at a time, by a collective in which every rank takes
part.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import torch

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_FEWEST_COLUMNS, _MOST_COLUMNS = 64, 1 << 20


class Shard(msgspec.Struct, frozen=True, array_like=True, cache_hash=True):
    """A rank's part of a tensor.

    Attributes:
        shape: of the whole tensor.
        ranges: first index and the one behind the last, in each dim.
    """

    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the tensor."""
        return all(each == (0, size) for each, size in zip(self.ranges, self.shape, strict=True))

    @property
    def num_elements(self) -> int:
        """Elements of the part."""
        return math.prod(stop - start for start, stop in self.ranges)

    def flat_range(self) -> tuple[int, int]:
        """First index and the one behind the last, in the tensor as one row, of which it is one."""
        start = 0
        for (first, _), size in zip(self.ranges, self.shape, strict=False):
            start = start * size + first
        return start, start + self.num_elements


class Piece(NamedTuple):
    """Elements of a tensor, and which these are."""

    local: torch.Tensor
    shard: Shard


def is_flat(shape: Sequence[int]) -> bool:
    """Whether digests take a tensor as one long row: without a second dim, or an odd one."""
    return len(shape) < 2 or not _FEWEST_COLUMNS <= math.prod(shape[1:]) <= _MOST_COLUMNS


@lru_cache(maxsize=4096)
def whole(shape: tuple[int, ...]) -> Shard:
    """All of a tensor."""
    return Shard(tuple(shape), tuple((0, size) for size in shape))


def pieces_of(shape: tuple[int, ...], flat: torch.Tensor, start: int) -> Iterator[Piece]:
    """Consecutive elements of a tensor, as pieces that have a range of indices in each dim.

    Args:
        shape: of the tensor.
        flat: the elements, in one dim; if there are none, one piece without elements.
        start: the first one's index, in the order of memory.
    """
    if not len(flat):
        yield Piece(flat, Shard(shape, ((0, 0), *((0, size) for size in shape[1:]))))
        return
    first = start
    for ranges in _boxes(shape, start, start + len(flat)):
        shard = Shard(shape, ranges)
        own = flat[first - start :][: shard.num_elements]
        yield Piece(own.view([stop - begin for begin, stop in ranges]), shard)
        first += shard.num_elements


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Part of a row, whole rows, and part of another; parts are divided again."""
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # the whole ones
    before, behind = first - 1, last
    if first > last:
        yield from _boxes_of_row(shape, last, start - last * row, stop - last * row)
        return
    yield from _boxes_of_row(shape, before, start - before * row, row)
    if first < last:
        yield ((first, last), *((0, size) for size in shape[1:]))
    yield from _boxes_of_row(shape, behind, 0, stop - behind * row)


def _boxes_of_row(
    shape: tuple[int, ...], index: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, int], ...]]:
    for ranges in _boxes(shape[1:], start, stop):
        yield ((index, index + 1), *ranges)


def local_part(tensor: torch.Tensor) -> tuple[torch.Tensor, Shard]:
    """The elements that this rank has, and which of the tensor's these are."""
    if type(tensor) in _PLAIN or not is_distributed(tensor):
        shape = (*tensor.shape, 2) if tensor.is_complex() else tensor.shape
        return tensor, whole(shape)
    return _part_of_dtensor(tensor)


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "to_local") and hasattr(tensor, "device_mesh")


def _part_of_dtensor(tensor: Any) -> tuple[torch.Tensor, Shard]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, placements = tuple(tensor.shape), tensor.placements
    if not all(_is_simple(each, shape) for each in placements):
        return tensor.full_tensor(), whole(shape)
    sizes, offsets = compute_local_shape_and_global_offset(shape, tensor.device_mesh, placements)
    ranges = tuple(
        (min(first, limit), min(first, limit) + size)
        for first, size, limit in zip(offsets, sizes, shape, strict=True)
    )
    return tensor.to_local(), Shard(shape, ranges)


def _is_simple(placement: Any, shape: tuple[int, ...]) -> bool:
    """Whether a range in each dim describes it."""
    from torch.distributed.tensor import Shard as ShardPlacement

    if type(placement) is not ShardPlacement:
        return bool(placement.is_replicate())
    return placement.dim == 0 or not is_flat(shape)
