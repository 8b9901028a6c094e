"""Sums in a tree: the same additions whoever makes them."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm.collectives.gradients import add_up
from lockstep.plan.program.sum_tree import additions, subtrees
from tests.sums import tree_sum

# Of very different sizes, so that the order of a sum shows.
VALUES = st.lists(
    st.none() | st.floats(-1, 1, width=32).map(lambda value: value * 10.0 ** (value * 37 % 6)),
    min_size=1,
    max_size=40,
)


def rows_of(values: list[float | None]) -> dict[int, torch.Tensor]:
    return {
        row: torch.tensor([value], dtype=torch.float32)
        for row, value in enumerate(values)
        if value is not None
    }


def cut_into_hosts(num_rows: int, cuts: set[int]) -> list[range]:
    edges = [0, *sorted(cut for cut in cuts if 0 < cut < num_rows), num_rows]
    return [range(start, stop) for start, stop in pairwise(edges)]


@given(values=VALUES, cuts=st.sets(st.integers(1, 39)))
def test_hosts_come_to_the_sum_of_one_host(values: list[float | None], cuts: set[int]) -> None:
    expected = tree_sum([rows_of(values).get(row) for row in range(len(values))])
    rows = rows_of(values)
    sums = {}
    for host in cut_into_hosts(len(values), cuts):
        for subtree in subtrees(host, len(values)):
            own = {row: rows[row] for row in subtree if row in rows}
            if own:
                (sums[min(own)],) = add_up([own])
    assert (expected is None) == (not sums)
    if expected is not None:
        assert torch.equal(add_up([sums])[0], expected)


@given(num_rows=st.integers(1, 70), cuts=st.sets(st.integers(1, 69)))
def test_subtrees_are_the_rows_in_order(num_rows: int, cuts: set[int]) -> None:
    for host in cut_into_hosts(num_rows, cuts):
        found = subtrees(host, num_rows)
        assert [row for subtree in found for row in subtree] == list(host)


@given(exponent=st.integers(0, 6), hosts=st.integers(0, 6))
def test_powers_of_two_on_powers_of_two_are_one_subtree_each(exponent: int, hosts: int) -> None:
    num_rows, size = 1 << (exponent + hosts), 1 << exponent
    for start in range(0, num_rows, size):
        assert subtrees(range(start, start + size), num_rows) == (range(start, start + size),)


def test_eight_rows_are_added_up_in_three_levels() -> None:
    assert additions(tuple(range(8))) == (
        ((0, 1), (2, 3), (4, 5), (6, 7)),
        ((0, 2), (4, 6)),
        ((0, 4),),
    )


def test_rows_without_a_gradient_keep_their_places() -> None:
    """Row 6 is added to row 4, although rows 2 and 3 have nothing for row 0 to wait for."""
    assert additions((0, 4, 6)) == (((1, 2),), ((0, 1),))
