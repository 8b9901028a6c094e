"""The coefficients of digests: pseudo-random, the same on every machine and in every version.

A tensor is taken as a matrix. An element's six coefficients are the product of one that belongs to
its row, and of six that belong to its column.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from lockstep.proof.recording.shards import Shard, is_flat

NUM_PROJECTIONS = 6
COLUMNS = 4096  # of tensors that are taken as one long row
NUM_WORDS = 64  # the period of the hash's multipliers


@lru_cache(maxsize=4096)
def of_elements(shard: Shard) -> np.ndarray:
    """Of all elements of a part, as (projections, elements)."""
    rows, columns = of_rows(shard), of_columns(shard)
    products = rows[:, None] * columns[:, None, :]
    whole: np.ndarray = products.reshape(NUM_PROJECTIONS, -1)
    if not is_flat(shard.shape):
        return whole
    start, stop = shard.flat_range()
    return np.ascontiguousarray(whole[:, start % COLUMNS :][:, : stop - start])


@lru_cache(maxsize=1024)
def of_rows(shard: Shard) -> np.ndarray:
    """Of each row that a part has some of."""
    if is_flat(shard.shape):
        start, stop = shard.flat_range()
        return _near_one(-(-stop // COLUMNS))[start // COLUMNS :]
    start, stop = shard.ranges[0]
    return _near_one(stop)[start:]


def _near_one(number: int) -> np.ndarray:
    """Numbers of either sign and of a size near one: no row counts for little, no two alike."""
    uniform = _random(1, 1, number)[0]
    sizes = 1 + np.round(2.0**18 * (np.abs(uniform) - 0.866)) * 2.0**-20
    return np.asarray(np.sign(uniform) * sizes)


@lru_cache(maxsize=256)
def row_tensor(shard: Shard, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The same, where they are multiplied."""
    return torch.from_numpy(of_rows(shard).copy()).to(device, dtype)


@lru_cache(maxsize=256)
def of_columns(shard: Shard) -> np.ndarray:
    """Of each column that a part has, as (projections, columns)."""
    if is_flat(shard.shape):
        return _random(2, NUM_PROJECTIONS, COLUMNS)
    whole = _random(2, NUM_PROJECTIONS, math.prod(shard.shape[1:]))
    places = tuple(slice(*each) for each in shard.ranges[1:])
    part = whole.reshape(-1, *shard.shape[1:])[(slice(None), *places)]
    return np.ascontiguousarray(part.reshape(NUM_PROJECTIONS, -1))


@lru_cache(maxsize=1)
def multipliers() -> np.ndarray:
    """Odd numbers for the words of a hash."""
    return (_random_words(7, NUM_WORDS) | np.uint64(1)).view(np.int64)


def repeated_multipliers(lengths: Sequence[int]) -> np.ndarray:
    """Those of several tensors' words, one after the other."""
    many = np.tile(multipliers(), -(-max(lengths) // NUM_WORDS))
    return np.concatenate([many[:length] for length in lengths])


def _random(stream: int, rows: int, number: int) -> np.ndarray:
    """Numbers of variance one with few digits, which every dtype that is used here has exactly."""
    words = _random_words(stream, number * rows)
    uniform = (words >> np.uint64(44)).astype(np.float64) * 2.0**-19 - 1.0 + 2.0**-20
    scaled = np.round(uniform * math.sqrt(3) * 2.0**20) * 2.0**-20
    return np.ascontiguousarray(scaled.reshape(number, rows).T)


def _random_words(stream: int, number: int) -> np.ndarray:
    """Pseudo-random words: the generator splitmix64, of Steele, Lea and Flood (2014)."""
    step = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        word = (np.arange(1, number + 1, dtype=np.uint64) + np.uint64(stream << 40)) * step
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return word ^ (word >> np.uint64(31))
