"""Every element of every parameter is updated by exactly one rank, at cuts that change no bit."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.plan.layout import (
    ALIGNMENT_BYTES,
    Extent,
    Piece,
    align,
    block_sizes,
    elementwise_slices,
    flat_offsets,
    whole_parameters,
)

RANKS = st.integers(1, 9)
ELEMENT_BYTES = st.sampled_from([1, 2, 4, 8, 16])


@st.composite
def extents(draw: st.DrawFn, *, most: int = 12) -> list[Extent]:
    """Parameters of all sizes: empty, one element, around the alignment, large."""
    sizes = st.one_of(st.integers(0, 3), st.integers(60, 260), st.integers(0, 5000))
    one = st.builds(
        lambda num_elements, element_bytes: Extent(
            num_elements=num_elements, element_bytes=element_bytes
        ),
        sizes,
        ELEMENT_BYTES,
    )
    return draw(st.lists(one, max_size=most))


def elements_of(slices: Sequence[Sequence[Piece]], parameter: int) -> list[int]:
    """The elements that some rank updates, each as often as one does."""
    pieces = [piece for pieces in slices for piece in pieces if piece.parameter == parameter]
    return sorted(element for piece in pieces for element in range(piece.start, piece.stop))


@given(parameters=extents())
def test_offsets_are_aligned_and_parameters_do_not_overlap(parameters: list[Extent]) -> None:
    offsets, total = flat_offsets(parameters)
    sizes = [extent.num_elements * extent.element_bytes for extent in parameters]
    assert all(offset % ALIGNMENT_BYTES == 0 for offset in [*offsets, total])
    for (offset, following), size in zip(pairwise([*offsets, total]), sizes, strict=True):
        assert offset + size <= following
    assert total == sum(map(align, sizes))  # no more room than alignment needs


@given(parameters=extents(), num_ranks=RANKS)
def test_slices_cover_each_element_once(parameters: list[Extent], num_ranks: int) -> None:
    slices = elementwise_slices(parameters, num_ranks, num_ranks)
    assert len(slices) == num_ranks
    for index, extent in enumerate(parameters):
        assert elements_of(slices, index) == list(range(extent.num_elements))


@given(parameters=extents(), num_ranks=RANKS)
def test_slices_cut_parameters_at_aligned_places_only(
    parameters: list[Extent], num_ranks: int
) -> None:
    slices = elementwise_slices(parameters, num_ranks, num_ranks)
    for piece in itertools.chain.from_iterable(slices):
        assert piece.start < piece.stop
        extent = parameters[piece.parameter]
        assert piece.start * extent.element_bytes % ALIGNMENT_BYTES == 0
        ends_inside = piece.stop < extent.num_elements
        assert not ends_inside or piece.stop * extent.element_bytes % ALIGNMENT_BYTES == 0


@given(parameters=extents(), num_ranks=RANKS)
def test_slices_are_balanced_within_one_unit_of_alignment(
    parameters: list[Extent], num_ranks: int
) -> None:
    loads = [
        sum(
            align((piece.stop - piece.start) * parameters[piece.parameter].element_bytes)
            for piece in pieces
        )
        for pieces in elementwise_slices(parameters, num_ranks, num_ranks)
    ]
    assert max(loads) - min(loads) <= ALIGNMENT_BYTES


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_buckets_of_a_weight_and_a_bias_are_balanced_together(num_ranks: int) -> None:
    """A little more than so many units: to round up would give the first ranks more of each."""
    layers = [
        Extent(num_elements=size, element_bytes=4, bucket=bucket)
        for bucket in range(8)
        for size in (3072 * 3072, 3072)
    ]
    slices = elementwise_slices(layers, num_ranks, num_ranks)
    loads = [sum(piece.stop - piece.start for piece in own) for own in slices]
    assert max(loads) < 1.01 * sum(loads) / num_ranks


@given(parameters=extents(), num_ranks=RANKS)
def test_blocks_do_not_depend_on_the_number_of_ranks(
    parameters: list[Extent], num_ranks: int
) -> None:
    def blocks(ranks: int) -> list[tuple[int, int]]:
        pieces = [piece for own in elementwise_slices(parameters, ranks, ranks) for piece in own]
        sizes = block_sizes(parameters, ranks, pieces)
        assert [sum(each) for each in sizes] == [piece.stop - piece.start for piece in pieces]
        return [
            (piece.parameter, size)
            for piece, each in zip(pieces, sizes, strict=True)
            for size in each
        ]

    assert blocks(num_ranks) == blocks(1)


@given(parameters=extents(), num_ranks=RANKS)
def test_whole_parameters_are_whole_and_each_has_one_rank(
    parameters: list[Extent], num_ranks: int
) -> None:
    owned = whole_parameters(parameters, num_ranks)
    assert len(owned) == num_ranks
    pieces = sorted(itertools.chain.from_iterable(owned), key=lambda piece: piece.parameter)
    assert pieces == [
        Piece(parameter=index, start=0, stop=extent.num_elements)
        for index, extent in enumerate(parameters)
        if extent.num_elements
    ]


@given(parameters=extents(most=6), num_ranks=st.integers(1, 3))
def test_whole_parameters_are_balanced_as_graham_proved(
    parameters: list[Extent], num_ranks: int
) -> None:
    sizes = [extent.num_elements * extent.element_bytes for extent in parameters]

    def longest(rank_of: Sequence[int]) -> int:
        loads = [0] * num_ranks
        for rank, size in zip(rank_of, sizes, strict=True):
            loads[rank] += size
        return max(loads)

    best = min(map(longest, itertools.product(range(num_ranks), repeat=len(sizes))))
    rank_of = [0] * len(sizes)
    for rank, pieces in enumerate(whole_parameters(parameters, num_ranks)):
        for piece in pieces:
            rank_of[piece.parameter] = rank
    assert 3 * num_ranks * longest(rank_of) <= (4 * num_ranks - 1) * best


@pytest.mark.parametrize("divide", [partial(elementwise_slices, num_shares=3), whole_parameters])
def test_pieces_are_in_the_order_of_the_parameters(
    divide: Callable[[Sequence[Extent], int], list[list[Piece]]],
) -> None:
    parameters = [Extent(num_elements=size, element_bytes=4) for size in (700, 30, 0, 700, 1)]
    for pieces in divide(parameters, 3):
        numbers = [piece.parameter for piece in pieces]
        assert numbers == sorted(numbers)
