"""How a global batch divides into shares, and shares among replicas.

A share is the unit of work: gradients are summed over shares in a fixed tree
(``plan.program.sum_tree``) and random streams are keyed by share. So what a run computes depends on
the number of shares and never on the number of replicas that work on them.
"""

from functools import lru_cache


@lru_cache
def share_bounds(num_samples: int, num_shares: int) -> tuple[tuple[int, int], ...]:
    """Rows ``[start, stop)`` of each share; sizes differ by at most one, the longer ones first.

    With fewer samples than shares the last shares are empty.
    """
    base, longer = divmod(num_samples, num_shares)
    bounds = []
    start = 0
    for share in range(num_shares):
        stop = start + base + (share < longer)
        bounds.append((start, stop))
        start = stop
    return tuple(bounds)


def shares_of_replica(
    replica: int, num_replicas: int, num_shares: int, shares_per_row: int = 1
) -> range:
    """The consecutive shares that a replica computes; counts differ by at most one row's."""
    start, stop = share_bounds(num_shares // shares_per_row, num_replicas)[replica]
    return range(start * shares_per_row, stop * shares_per_row)


def replica_of_share(
    share: int, num_replicas: int, num_shares: int, shares_per_row: int = 1
) -> int:
    """The replica that computes a share: the inverse of ``shares_of_replica``."""
    row = share // shares_per_row
    base, longer = divmod(num_shares // shares_per_row, num_replicas)
    if row < longer * (base + 1):
        return row // (base + 1)
    return longer + (row - longer * (base + 1)) // base


def num_filled_shares(num_samples: int, num_shares: int) -> int:
    """Shares that hold at least one sample; they come first."""
    return min(num_samples, num_shares)
