"""Digests of tensors: 64 bytes that tell equality, a constant factor, and the size of a difference.

A digest is eight numbers of 8 bytes: a hash of the bits, the sum of the squares, and six
projections, the products with fixed pseudo-random tensors. All are sums over the elements, so:

- digests of the shards of a tensor add up to the digest of the tensor, which no rank has to hold;
- digests of several ranks' gradients add up to the digest of their sum, their mean or any other
  combination of them;
- the projections of a - b are those of a minus those of b, and their root mean square estimates
  ‖a - b‖, mostly within a factor of two.

An element's coefficient is the product of one that belongs to its index in the first dim and one
that belongs to its index in the others: a matrix product with few columns then does all of it, in
one pass over the memory. A tensor without a second dim, or with a very long one, is taken as rows
of ``COLUMNS``. float32 and shorter are multiplied in float32 on the CPU, whose sums err by a few
units in the last place of the norm, and are summed over rows in float64.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from lockstep.proof.recording.shards import Shard

NUM_PROJECTIONS = 6
WIDTH = 2 + NUM_PROJECTIONS  # numbers of a digest: the hash, the sum of squares, the projections
COLUMNS = 4096  # of tensors that are taken as one long row
_MOST_COLUMNS = 1 << 20
_SMALL = 4096  # elements; below, calls cost more than arithmetic
_BLOCK = 1 << 18  # elements that are read once from memory for all parts of a digest
_WORDS = 64  # the period of the hash's multipliers


def digest(local: torch.Tensor, shard: Shard) -> np.ndarray:
    """The digest of a rank's part of a tensor, as ``WIDTH`` float64.

    Args:
        local: the elements that the rank has.
        shard: which elements of the tensor these are.
    """
    local = _plain(local)
    if local.numel() == 0:
        return np.zeros(WIDTH)
    if not local.is_cpu:
        return accelerator_digest(local, shard).cpu().numpy()
    if not shard.shape and local.is_floating_point():
        return _number_digest(local.item())
    if local.numel() <= _SMALL:
        return _small_digest(local, shard)
    return _large_digest(local, shard)


def accelerator_digest(local: torch.Tensor, shard: Shard) -> torch.Tensor:
    """The same, as a tensor on the tensor's own device: nothing waits for it."""
    local = _plain(local)
    if not shard.shape and local.is_floating_point():
        coefficients = torch.from_numpy(_small_coefficients(shard)[:, 0]).to(local.device)
        value = local.double()[None]
        return torch.cat([value, value * value, coefficients * value])
    result = torch.zeros(WIDTH, dtype=torch.float64, device=local.device)
    rows, columns = (each.to(local.device) for each in _coefficients(shard, torch.float64))
    hashed = torch.zeros((), dtype=torch.int64, device=local.device)
    start = 0
    for block in _blocks(local, shard, 64 * _BLOCK):
        values = _real(block).double()
        products = columns @ values.T
        result[2:] += (products * rows[:, start : start + len(block)]).sum(1)
        result[1] += values.pow(2).sum()
        hashed = hashed + _hash(block)
        start += len(block)
    result[:1] = hashed.view(1).view(torch.float64)
    return result


def bits(digests: np.ndarray) -> np.ndarray:
    """The hashes of digests, along their last dim."""
    return digests[..., 0].view(np.int64)


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


# --- parts of a tensor --------------------------------------------------------------------------


def _plain(local: torch.Tensor) -> torch.Tensor:
    """Without gradients, and with complex numbers as pairs in a last dim."""
    local = local.detach()
    if local.is_sparse:
        local = local.to_dense()
    return torch.view_as_real(local.resolve_conj()) if local.is_complex() else local


def _real(block: torch.Tensor) -> torch.Tensor:
    return block if block.is_floating_point() else block.double()


def _matrix(local: torch.Tensor, shard: Shard) -> torch.Tensor:
    """The part as rows, to which coefficients of rows and columns belong."""
    if not _is_flat(shard.shape):
        return local.reshape(local.shape[0], -1)
    start, stop = shard.flat_range()
    padded = torch.nn.functional.pad(local.reshape(-1), (start % COLUMNS, -stop % COLUMNS))
    return padded.view(-1, COLUMNS)


def _is_flat(shape: Sequence[int]) -> bool:
    return len(shape) < 2 or math.prod(shape[1:]) > _MOST_COLUMNS


def _blocks(local: torch.Tensor, shard: Shard, num_elements: int) -> Sequence[torch.Tensor]:
    """Rows in blocks, each but the last of whole periods of the hash."""
    matrix = _matrix(local, shard)
    row_bytes = matrix.shape[1] * matrix.element_size()
    period = 8 * _WORDS // math.gcd(8 * _WORDS, row_bytes)
    rows = period * max(1, num_elements // (matrix.shape[1] * period))
    return list(matrix.split(rows))


def _number_digest(value: float) -> np.ndarray:
    """Of a tensor with a single number; counts of steps are such."""
    result = np.empty(WIDTH)
    result[0] = value
    result[1] = value * value
    result[2:] = _small_coefficients(Shard((), ()))[:, 0] * value
    return result


def _small_digest(local: torch.Tensor, shard: Shard) -> np.ndarray:
    result = np.empty(WIDTH)
    flat = local.contiguous().reshape(-1)
    result[:1] = _hash_of_words(_padded_words(flat)).reshape(1).view(np.float64)
    values = flat.double().numpy()
    result[1] = values.dot(values)
    result[2:] = _small_coefficients(shard) @ values
    return result


def _large_digest(local: torch.Tensor, shard: Shard) -> np.ndarray:
    dtype = torch.float32 if _is_short(local.dtype) else torch.float64
    rows, columns = _coefficients(shard, dtype)
    squares, hashed, products = 0.0, 0, []
    for block in _blocks(local, shard, _BLOCK):
        values = block if block.dtype == dtype else block.to(dtype)
        products.append(torch.nn.functional.linear(columns, values))
        flat = values.reshape(-1)
        squares += torch.dot(flat, flat).item()
        hashed += int(_hash(block))
    result = np.empty(WIDTH)
    result[:1] = np.array([hashed & (1 << 64) - 1], np.uint64).view(np.float64)
    result[1] = squares
    result[2:] = (torch.cat(products, 1).double() * rows).sum(1).numpy()
    return result


def _is_short(dtype: torch.dtype) -> bool:
    """Whether products in float32 are exact enough: not where the user allows shorter ones."""
    return dtype.is_floating_point and dtype.itemsize <= 4 and is_float32_exact()


def is_float32_exact() -> bool:
    """Whether products of float32 are computed in float32."""
    return torch.get_float32_matmul_precision() == "highest"


# --- the hash: words of 8 bytes, times odd numbers, modulo 2**64 --------------------------------


def _hash(block: torch.Tensor) -> torch.Tensor:
    flat = block.contiguous().reshape(-1)
    num_bytes = flat.numel() * flat.element_size()
    period = 8 * _WORDS
    if num_bytes % period or flat.storage_offset() * flat.element_size() % 8:
        flat = torch.nn.functional.pad(flat.view(torch.uint8), (0, -num_bytes % period)).clone()
    words = flat.view(torch.int64).view(-1, _WORDS).sum(0)
    return (words * _multipliers_on(words.device)).sum()


def _padded_words(flat: torch.Tensor) -> np.ndarray:
    raw: np.ndarray = flat.view(torch.uint8).numpy()
    if len(raw) % 8:
        raw = np.concatenate([raw, np.zeros(-len(raw) % 8, np.uint8)])
    return np.ascontiguousarray(raw).view(np.int64)


def _hash_of_words(words: np.ndarray) -> np.ndarray:
    return np.asarray(np.dot(words, _repeated_multipliers()[: len(words)]), np.int64)


@lru_cache(maxsize=1)
def _multipliers() -> np.ndarray:
    return (_random_words(7, _WORDS) | np.uint64(1)).view(np.int64)


@lru_cache(maxsize=16)
def _multipliers_on(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(_multipliers()).to(device)


@lru_cache(maxsize=1)
def _repeated_multipliers() -> np.ndarray:
    return np.tile(_multipliers(), 2 * _SMALL // _WORDS)


# --- coefficients: the same on every machine and in every version -------------------------------


@lru_cache(maxsize=256)
def _coefficients(shard: Shard, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the rows in float64, and of the columns, both with a row for each projection."""
    if _is_flat(shard.shape):
        start, stop = shard.flat_range()
        rows = _random(1, -(-stop // COLUMNS))[:, start // COLUMNS :]
        columns = _random(2, COLUMNS)
    else:
        (start, stop), *others = shard.ranges
        rows = _random(1, stop)[:, start:]
        whole = _random(2, math.prod(shard.shape[1:])).reshape(-1, *shard.shape[1:])
        columns = whole[(slice(None), *(slice(*each) for each in others))]
    flat = np.ascontiguousarray(columns.reshape(NUM_PROJECTIONS, -1))
    return torch.from_numpy(np.ascontiguousarray(rows)), torch.from_numpy(flat).to(dtype)


@lru_cache(maxsize=4096)
def _small_coefficients(shard: Shard) -> np.ndarray:
    rows, columns = _coefficients(shard, torch.float64)
    whole = (rows[:, :, None] * columns[:, None, :]).reshape(NUM_PROJECTIONS, -1).numpy()
    if not _is_flat(shard.shape):
        return whole
    start, stop = shard.flat_range()
    return np.ascontiguousarray(whole[:, start % COLUMNS :][:, : stop - start])


def _random(stream: int, number: int) -> np.ndarray:
    """Numbers of variance one with few digits, which every dtype that is used here has exactly."""
    words = _random_words(stream, number * NUM_PROJECTIONS)
    uniform = (words >> np.uint64(44)).astype(np.float64) * 2.0**-19 - 1.0 + 2.0**-20
    scaled = np.round(uniform * math.sqrt(3) * 2.0**20) * 2.0**-20
    return np.ascontiguousarray(scaled.reshape(number, NUM_PROJECTIONS).T)


def _random_words(stream: int, number: int) -> np.ndarray:
    """Pseudo-random words: the generator splitmix64, of Steele, Lea and Flood (2014)."""
    step = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        word = (np.arange(1, number + 1, dtype=np.uint64) + np.uint64(stream << 40)) * step
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return word ^ (word >> np.uint64(31))
