"""The order in which gradients are added up: a binary tree over the rows, aligned at powers of two.

    rows 0 to 7:   ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))

Rows without a gradient are left out; the others keep their places. A run of rows that begins at a
multiple of its length, a power of two, is a subtree: a host that has such a run adds it up alone,
and sends one sum. Any other run consists of a few subtrees, of which it sends the sums. So the
additions, and with them the bits, are the same on any number of ranks and hosts.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

# Additions that do not wait for each other: positions of the sum and of what is added to it.
Level = tuple[tuple[int, int], ...]


@lru_cache(maxsize=1024)
def additions(rows: tuple[int, ...]) -> tuple[Level, ...]:
    """The additions that make the first of some rows the sum of all of them, level by level.

    Args:
        rows: their numbers, ascending. A subtree that is added up already counts as its first row.

    Returns:
        Levels of pairs (into, source), which are positions in ``rows``.
    """
    nodes = list(enumerate(rows))
    levels: list[Level] = []
    while len(nodes) > 1:
        level: list[tuple[int, int]] = []
        parents: list[tuple[int, int]] = []
        for position, number in nodes:
            if parents and parents[-1][1] == number >> 1:
                level.append((parents[-1][0], position))
            else:
                parents.append((position, number >> 1))
        nodes = parents
        if level:
            levels.append(tuple(level))
    return tuple(levels)


def tree_sum(values: Mapping[int, Any]) -> Any:
    """The sum of values by row; there must be one."""
    rows = tuple(sorted(values))
    sums = [values[row] for row in rows]
    for level in additions(rows):
        for into, source in level:
            sums[into] = sums[into] + sums[source]
    return sums[0]


@lru_cache(maxsize=1024)
def subtrees(rows: range, num_rows: int) -> tuple[range, ...]:
    """The fewest subtrees that consecutive rows, of ``num_rows`` in all, consist of."""
    found = []
    start = rows.start
    while start < rows.stop:
        # Beyond the last row there is nothing to wait for.
        size = next(
            size
            for size in _sizes_at(start, num_rows)
            if start + size <= rows.stop or rows.stop == num_rows
        )
        found.append(range(start, min(start + size, rows.stop)))
        start += size
    return tuple(found)


def _sizes_at(start: int, num_rows: int) -> Iterable[int]:
    """Sizes of the subtrees that begin at a row, the largest first."""
    largest = start & -start if start else 1 << (num_rows - 1).bit_length()
    return (1 << exponent for exponent in range(largest.bit_length() - 1, -1, -1))
