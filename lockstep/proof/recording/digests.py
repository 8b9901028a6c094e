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
from collections.abc import Iterator, Sequence
from functools import lru_cache

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


class Pending:
    """Digests of tensors, which no longer depend on them."""

    def __init__(self, parts: Sequence[tuple[torch.Tensor, Shard]]) -> None:
        self._count = len(parts)
        small: dict[tuple[torch.dtype, torch.device], list[tuple[int, torch.Tensor, Shard]]] = {}
        large: dict[torch.device, list[tuple[int, torch.Tensor, Shard]]] = {}
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
    if local.is_sparse:
        local = local.to_dense()
    return torch.view_as_real(local.resolve_conj()) if local.is_complex() else local


# --- small tensors, of one dtype and device -----------------------------------------------------


class _Small:
    """A copy of all elements."""

    def __init__(self, parts: Sequence[tuple[int, torch.Tensor, Shard]]) -> None:
        self._indices = [index for index, _, _ in parts]
        self._shards = [shard for _, _, shard in parts]
        self._lengths = tuple(local.numel() for _, local, _ in parts)
        self._copy = torch.cat([local.reshape(-1) for _, local, _ in parts])

    def finish(self, result: np.ndarray) -> None:
        """Write the digests into their rows."""
        copy = self._copy.cpu()
        values = copy.double().numpy()
        starts = np.cumsum((0, *self._lengths))
        for index, shard, start, stop in zip(
            self._indices, self._shards, starts, starts[1:], strict=False
        ):
            row, own = result[index], values[start:stop]
            row[1] = own.dot(own)
            row[2:] = coefficients.of_elements(shard) @ own
        words = copy.view(_INTEGERS[copy.element_size()]).numpy()
        products = words * coefficients.repeated_multipliers(self._lengths)
        hashes = np.add.reduceat(products, starts[:-1])
        result[self._indices, 0] = hashes.view(np.float64)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# --- large tensors, of one device ---------------------------------------------------------------


class _Large:
    """Sums over rows, of squares, and of words, block by block."""

    def __init__(self, parts: Sequence[tuple[int, torch.Tensor, Shard]]) -> None:
        self._indices = [index for index, _, _ in parts]
        self._shards = [shard for _, _, shard in parts]
        self._starts: list[int] = []  # each tensor's first block
        sums: list[torch.Tensor] = []
        squares: list[torch.Tensor] = []
        words: list[torch.Tensor] = []
        for _, local, shard in parts:
            self._starts.append(len(words))
            total = []
            for rows, values, block in _blocks(local, shard):
                total.append(torch.mv(values.T, rows))
                flat = values.view(-1)
                squares.append(torch.dot(flat, flat).view(1))
                words.append(_words(block))
            sums.append(_sum(total))
        self._sums, self._squares = torch.cat(sums), torch.cat(squares)
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


def _product_dtype(dtype: torch.dtype) -> torch.dtype:
    """Float32 where it is exact enough: not where the user allows shorter products."""
    is_short = dtype.is_floating_point and dtype.itemsize <= 4
    return torch.float32 if is_short and _is_float32_exact() else torch.float64


def _is_float32_exact() -> bool:
    return torch.get_float32_matmul_precision() == "highest"


def _blocks(
    local: torch.Tensor, shard: Shard
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Blocks of whole rows: the rows' coefficients, the values to multiply, and the bits."""
    dtype = _product_dtype(local.dtype)
    rows, first = coefficients.row_tensor(shard, dtype, local.device), 0
    for matrix in _matrices(local.contiguous(), shard):
        size = _rows_of_block(matrix.shape[1], matrix.element_size())
        for start in range(0, len(matrix), size):
            block = matrix[start : start + size]
            values = block if block.dtype == dtype else block.to(dtype)
            yield rows[first + start : first + start + len(block)], values, block
        first += len(matrix)


def _matrices(local: torch.Tensor, shard: Shard) -> Iterator[torch.Tensor]:
    """A part as rows; of one long row, those that it has only some of are filled up with zeros."""
    if not is_flat(shard.shape):
        yield local.view(len(local), -1)
        return
    flat, (start, stop) = local.view(-1), shard.flat_range()
    before = start % COLUMNS
    head = min(-start % COLUMNS, stop - start)
    num_rows = (stop - start - head) // COLUMNS
    tail = stop - start - head - num_rows * COLUMNS
    if head:
        yield pad(flat[:head], (before, COLUMNS - before - head))[None]
    if num_rows:
        yield flat[head : len(flat) - tail].view(num_rows, COLUMNS)
    if tail:
        yield pad(flat[-tail:], (0, COLUMNS - tail))[None]


@lru_cache(maxsize=1024)
def _rows_of_block(columns: int, itemsize: int) -> int:
    """So many that a block has whole periods of the hash's multipliers."""
    period = _PERIOD // math.gcd(_PERIOD, columns * itemsize)
    return period * max(1, _BLOCK // (columns * period))


def _words(block: torch.Tensor) -> torch.Tensor:
    """The sums of words of 8 bytes, modulo 2**64, that have the same multiplier."""
    flat = block.view(-1)
    num_bytes = flat.numel() * flat.element_size()
    if num_bytes % _PERIOD or flat.storage_offset() * flat.element_size() % 8:
        flat = pad(flat.view(torch.uint8), (0, -num_bytes % _PERIOD)).clone()
    return flat.view(torch.int64).view(-1, NUM_WORDS).sum(0)
