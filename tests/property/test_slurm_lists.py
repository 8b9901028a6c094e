"""Slurm's short forms expand to what was shortened, and nothing else makes them fail oddly."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.cluster.slurm_lists import MAX_NODES, expand_counts, expand_nodes

NAMES = st.from_regex(r"[a-z][a-z0-9.-]{0,6}[a-z]", fullmatch=True)
NUMBERS = st.lists(st.integers(0, 1200), min_size=1, max_size=12, unique=True).map(sorted)


def shorten(numbers: list[int], width: int) -> str:
    """As Slurm does: runs of numbers that have the same number of digits, written with a dash."""
    runs: list[list[int]] = []
    for number in numbers:
        follows = runs and runs[-1][-1] == number - 1
        if follows and len(f"{number:0{width}}") == len(f"{runs[-1][0]:0{width}}"):
            runs[-1].append(number)
        else:
            runs.append([number])
    written = [
        f"{run[0]:0{width}}" + (f"-{run[-1]:0{width}}" if len(run) > 1 else "") for run in runs
    ]
    return ",".join(written)


@given(st.lists(st.tuples(NAMES, NUMBERS, st.integers(1, 5), st.sampled_from(["", "-ib"]))))
def test_a_node_list_has_all_nodes_in_order(
    groups: list[tuple[str, list[int], int, str]],
) -> None:
    names, parts = ["alone"], ["alone"]
    for name, numbers, width, end in groups:
        names += [f"{name}{number:0{width}}{end}" for number in numbers]
        parts.append(f"{name}[{shorten(numbers, width)}]{end}")
    assert expand_nodes(",".join(parts)) == tuple(names)


@given(NUMBERS, NUMBERS)
def test_several_brackets_are_all_combinations(racks: list[int], nodes: list[int]) -> None:
    text = f"rack[{shorten(racks, 1)}]node[{shorten(nodes, 2)}]"
    assert expand_nodes(text) == tuple(
        f"rack{rack}node{node:02}" for rack in racks for node in nodes
    )


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 20)), min_size=1))
def test_counts_are_repeated(groups: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{times})" if times > 1 else f"{count}" for count, times in groups)
    assert expand_counts(text) == tuple(count for count, times in groups for _ in range(times))


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "a,", "a[", "a]", "a[]", "a[1", "a[1-]", "a[-1]", "a[3-1]", "a[1,]", "a[[1]]"),
        *("a b", "a[x]", "a[1-2-3]", "a[1]]", "a[0-9999999999]", "a[0-99999999]"),
        "a[0-99999][0-99999][0-99999]",
    ],
)
def test_what_is_no_node_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^'"):
        expand_nodes(text)


@pytest.mark.parametrize("text", ["", "a", "2(x", "2(3)", "(x3)", "2,", "-1", "1(x999999999)"])
def test_what_are_no_counts_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^'"):
        expand_counts(text)


@given(st.text(alphabet="ab01-9,[]() x", max_size=30))
def test_whatever_is_read_gives_nodes_or_a_value_error(text: str) -> None:
    with suppress(ValueError):
        assert 0 < len(expand_nodes(text)) <= MAX_NODES
    with suppress(ValueError):
        assert 0 < len(expand_counts(text)) <= MAX_NODES
