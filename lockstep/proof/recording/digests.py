"""Digests of tensors: 64 bytes that tell equality, a constant factor, and the size of a difference.

A digest is eight numbers of 8 bytes: a hash of the bits, the sum of the squares, and six
projections, the products with fixed pseudo-random tensors. All are sums over the elements, so:

- digests of the shards of a tensor add up to the digest of the tensor, which no rank has to hold;
- digests of several ranks' gradients add up to the digest of their sum, their mean or any other
  combination of them;
- the projections of a - b are those of a minus those of b, and their root mean square estimates
  ‖a - b‖, mostly within a factor of two; of a difference in a single column, more roughly.

Memory is read once: a block of a tensor is multiplied by its rows' coefficients, squared and hashed
while it is in the cache. What is left are a row of the tensor's width, which the columns'
coefficients make six numbers of, and a few words. Small tensors are concatenated, and digested
together on the host. Nothing waits for an accelerator until ``Pending.fetch``.

Float32 and shorter are multiplied in float32, whose sums err by a few units in the last place of
the norm, and blocks are summed in float64.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from lockstep.proof.recording import coefficients
from lockstep.proof.recording.coefficients import COLUMNS, NUM_PROJECTIONS, NUM_WORDS
from lockstep.proof.recording.shards import Shard, is_flat

WIDTH = 2 + NUM_PROJECTIONS  # numbers of a digest: the hash, the sum of squares, the projections
_SMALL = 4096  # elements; below, calls cost more than arithmetic
_BLOCK = 1 << 18  # elements that are read once from memory for all parts of a digest
_PERIOD = 8 * NUM_WORDS  # bytes
_SAME = 1e-4  # of the norm: projections of the same bits, on other processors
_Local = tuple[int, torch.Tensor, Shard]  # its number, the elements, and which these are


class Pending:
    """Digests of tensors, which no longer depend on them."""

    def __init__(self, parts: Sequence[tuple[torch.Tensor, Shard]]) -> None:
        self._count = len(parts)
        small: dict[tuple[torch.dtype, torch.device], list[_Local]] = {}
        large: dict[torch.device, list[_Local]] = {}
        for index, (tensor, shard) in enumerate(parts):
            local = _plain(tensor)
            count = local.numel()
            if count > _SMALL:
                large.setdefault(local.device, []).append((index, local, shard))
            elif count:
                small.setdefault((local.dtype, local.device), []).append((index, local, shard))
        self._groups: list[_Small | _Large] = [_Small(each) for each in small.values()]
        self._groups += [_Large(each) for each in large.values()]

    def fetch(self) -> np.ndarray:
        """The digests, as (tensors, ``WIDTH``) float64."""
        result = np.zeros((self._count, WIDTH))
        for group in self._groups:
            group.finish(result)
        return result


def digest(local: torch.Tensor, shard: Shard) -> np.ndarray:
    """The digest of a rank's part of a tensor, as ``WIDTH`` float64.

    Args:
        local: the elements that the rank has.
        shard: which elements of the tensor these are.
    """
    first: np.ndarray = Pending([(local, shard)]).fetch()[0]
    return first


def are_same(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two digests are of the same bits, in the same places."""
    if one.tobytes() == other.tobytes():
        return True
    hashes = one[:1].view(np.int64), other[:1].view(np.int64)
    return bool(hashes[0] == hashes[1]) and not distance(one, other) > _SAME * norm(one)


def add(digests: Sequence[np.ndarray]) -> np.ndarray:
    """The digest of a tensor, from those of its shards; its hash means nothing."""
    return np.sum(digests, axis=0) if len(digests) > 1 else digests[0]


def norm(one: np.ndarray) -> float:
    """The norm of a digest's tensor."""
    return math.sqrt(one[1]) if one[1] >= 0 else math.nan


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """An estimate of the norm of the difference of two tensors, from their digests."""
    with np.errstate(invalid="ignore", over="ignore"):
        return float(np.sqrt(np.mean((one[2:] - other[2:]) ** 2)))


def _plain(local: torch.Tensor) -> torch.Tensor:
    """Without gradients, and with complex numbers as pairs in a last dim."""
    local = local.detach()
    if local.layout is not torch.strided:
        local = local.to_dense()
    return torch.view_as_real(local.resolve_conj()) if local.dtype.is_complex else local


# --- small tensors, of one dtype and device -----------------------------------------------------


class _Small:
    """A copy of all elements, in which those of equal shards are neighbours: a matrix."""

    def __init__(self, parts: Sequence[_Local]) -> None:
        self._layout = _layout_of(tuple(shard for _, _, shard in parts))
        ordered = [parts[place] for place in self._layout.order]
        self._indices = [index for index, _, _ in ordered]
        self._copy = torch.cat([local.reshape(-1) for _, local, _ in ordered])

    def finish(self, result: np.ndarray) -> None:
        """Write the digests into their rows."""
        copy, layout = self._copy.cpu(), self._layout
        values = copy.double().numpy()
        rows = np.empty((len(self._indices), WIDTH))
        words = copy.view(_INTEGERS[copy.element_size()]).numpy()
        hashes = np.add.reduceat(words * layout.multipliers, layout.starts)
        rows[:, 0] = hashes.view(np.float64)
        rows[:, 1] = np.add.reduceat(values * values, layout.starts)
        for first, last, start, stop, columns in layout.matrices:
            rows[first:last, 2:] = values[start:stop].reshape(last - first, -1) @ columns
        result[self._indices] = rows


class _Layout(NamedTuple):
    """Where parts are in a copy.

    Attributes:
        order: of the parts.
        starts: first element of each.
        multipliers: of the elements, for their hashes.
        matrices: of equal shards the first part and the one behind the last, their first element
            and the one behind the last, and the coefficients.
    """

    order: list[int]
    starts: np.ndarray
    multipliers: np.ndarray
    matrices: list[tuple[int, int, int, int, np.ndarray]]


@lru_cache(maxsize=256)
def _layout_of(shards: tuple[Shard, ...]) -> _Layout:
    places: dict[Shard, list[int]] = {}
    for place, shard in enumerate(shards):
        places.setdefault(shard, []).append(place)
    matrices, first, start = [], 0, 0
    for shard, own in places.items():
        last, stop = first + len(own), start + len(own) * shard.num_elements
        matrices.append((first, last, start, stop, coefficients.of_elements(shard).T))
        first, start = last, stop
    order = [place for own in places.values() for place in own]
    lengths = [shards[place].num_elements for place in order]
    return _Layout(
        order, np.cumsum([0, *lengths[:-1]]), coefficients.repeated_multipliers(lengths), matrices
    )


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# --- large tensors, of one device ---------------------------------------------------------------


class _Large:
    """Sums over rows, of squares, and of words, block by block."""

    def __init__(self, parts: Sequence[_Local]) -> None:
        self._indices = [index for index, _, _ in parts]
        self._shards = [shard for _, _, shard in parts]
        self._starts: list[int] = []  # each tensor's first block
        sums: list[torch.Tensor] = []
        squares: list[torch.Tensor] = []
        words: list[torch.Tensor] = []
        is_exact = torch.get_float32_matmul_precision() == "highest"
        for _, local, shard in parts:
            self._starts.append(len(words))
            dtype = _product_dtype(local.dtype, is_exact=is_exact)
            blocks = _blocks(local.contiguous(), shard)
            rows = coefficients.row_tensor(shard, dtype, local.device)
            total = []
            for own, block in zip(_split(rows, blocks), blocks, strict=True):
                values = block if block.dtype == dtype else block.to(dtype)
                total.append(torch.mv(values.T, own))
                flat = values.view(-1)
                squares.append(torch.dot(flat, flat))
                words.append(_words(block))
            sums.append(_sum(total))
        self._sums, self._squares = torch.cat(sums), torch.stack(squares)
        self._words = torch.stack(words)

    def finish(self, result: np.ndarray) -> None:
        """Write the digests into their rows."""
        sums, start = self._sums.cpu().double().numpy(), 0
        for index, shard in zip(self._indices, self._shards, strict=True):
            columns = coefficients.of_columns(shard)
            stop = start + columns.shape[1]
            result[index, 2:] = columns @ sums[start:stop]
            start = stop
        squares = self._squares.cpu().double().numpy()
        result[self._indices, 1] = np.add.reduceat(squares, self._starts)
        hashes = self._words.cpu().numpy() @ coefficients.multipliers()
        result[self._indices, 0] = np.add.reduceat(hashes, self._starts).view(np.float64)


def _sum(found: list[torch.Tensor]) -> torch.Tensor:
    return found[0] if len(found) == 1 else torch.stack(found).sum(0, dtype=torch.float64)


def _product_dtype(dtype: torch.dtype, *, is_exact: bool) -> torch.dtype:
    """Float32 where it is exact enough: not where the user allows shorter products."""
    is_short = dtype.is_floating_point and dtype.itemsize <= 4
    return torch.float32 if is_short and is_exact else torch.float64


def _split(rows: torch.Tensor, blocks: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The rows' coefficients, block by block."""
    return (rows,) if len(blocks) == 1 else rows.split([len(each) for each in blocks])


def _blocks(local: torch.Tensor, shard: Shard) -> list[torch.Tensor]:
    """Blocks of whole rows, in the order of memory."""
    found: list[torch.Tensor] = []
    for matrix in _matrices(local, shard):
        count, columns = matrix.shape
        size = _rows_of_block(columns, matrix.dtype.itemsize)
        found += [matrix] if count <= size else matrix.split(size)
    return found


def _matrices(local: torch.Tensor, shard: Shard) -> list[torch.Tensor]:
    """A part as rows; of one long row, those that it has only some of are filled up with zeros."""
    if not is_flat(shard.shape):
        return [local if local.dim() == 2 else local.view(len(local), -1)]
    flat, (start, stop) = local.view(-1), shard.flat_range()
    before = start % COLUMNS
    head = min(-start % COLUMNS, stop - start)
    num_rows = (stop - start - head) // COLUMNS
    tail = stop - start - head - num_rows * COLUMNS
    found = []
    if head:
        found.append(pad(flat[:head], (before, COLUMNS - before - head))[None])
    if num_rows:
        found.append(flat[head : len(flat) - tail].view(num_rows, COLUMNS))
    if tail:
        found.append(pad(flat[-tail:], (0, COLUMNS - tail))[None])
    return found


@lru_cache(maxsize=1024)
def _rows_of_block(columns: int, itemsize: int) -> int:
    """So many that a block has whole periods of the hash's multipliers."""
    period = _PERIOD // math.gcd(_PERIOD, columns * itemsize)
    return period * max(1, _BLOCK // (columns * period))


def _words(block: torch.Tensor) -> torch.Tensor:
    """The sums of words of 8 bytes, modulo 2**64, that have the same multiplier."""
    num_bytes = block.nbytes
    if num_bytes % _PERIOD or block.storage_offset() * block.dtype.itemsize % 8:
        raw = block.view(-1).view(torch.uint8)
        block = pad(raw, (0, -num_bytes % _PERIOD)).clone()
    return block.view(-1).view(torch.int64).view(-1, NUM_WORDS).sum(0)
