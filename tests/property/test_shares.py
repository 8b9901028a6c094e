"""Shares divide every batch, and replicas divide the shares, whatever the numbers."""

from hypothesis import given
from hypothesis import strategies as st

from lockstep.plan.shares import (
    num_filled_shares,
    replica_of_share,
    share_bounds,
    shares_of_replica,
)

COUNTS = st.integers(1, 70)


@given(num_samples=st.integers(0, 1000), num_shares=COUNTS)
def test_shares_partition_the_batch_in_order_and_evenly(num_samples: int, num_shares: int) -> None:
    bounds = share_bounds(num_samples, num_shares)
    sizes = [stop - start for start, stop in bounds]
    assert len(bounds) == num_shares
    assert [row for start, stop in bounds for row in range(start, stop)] == list(range(num_samples))
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@given(num_samples=st.integers(0, 1000), num_shares=COUNTS)
def test_filled_shares_are_those_with_samples_and_come_first(
    num_samples: int, num_shares: int
) -> None:
    filled = num_filled_shares(num_samples, num_shares)
    bounds = share_bounds(num_samples, num_shares)
    assert all(start < stop for start, stop in bounds[:filled])
    assert all(start == stop for start, stop in bounds[filled:])


@given(num_replicas=COUNTS, num_rows=COUNTS, per_row=st.integers(1, 4))
def test_replicas_partition_the_shares_in_order_and_evenly(
    num_replicas: int, num_rows: int, per_row: int
) -> None:
    num_shares = num_rows * per_row
    owned = [
        shares_of_replica(rank, num_replicas, num_shares, per_row) for rank in range(num_replicas)
    ]
    assert [share for shares in owned for share in shares] == list(range(num_shares))
    assert max(map(len, owned)) - min(map(len, owned)) <= per_row
    assert all(len(shares) % per_row == 0 for shares in owned)


@given(num_replicas=COUNTS, num_rows=COUNTS, per_row=st.integers(1, 4))
def test_replica_of_share_is_the_inverse_of_shares_of_replica(
    num_replicas: int, num_rows: int, per_row: int
) -> None:
    num_shares = num_rows * per_row
    for replica in range(num_replicas):
        for share in shares_of_replica(replica, num_replicas, num_shares, per_row):
            assert replica_of_share(share, num_replicas, num_shares, per_row) == replica
