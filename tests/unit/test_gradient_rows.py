"""Gradients and factors in shared memory: any mixture of them sums to the same."""

import os
from itertools import product

import pytest
import torch
from torch import Tensor

from lockstep.comm.collectives.gradient_spec import GradientSpec
from lockstep.comm.collectives.gradients import TensorSpec
from lockstep.comm.collectives.shm_gradient_buffer import SharedGradientBuffer
from lockstep.comm.shared_memory.shared_region import SharedRegion
from lockstep.plan.layout import elementwise_slices

OUTS, INS, NUM_SHARES = 96, 40, 3


def make_rows(dtype: torch.dtype = torch.float64, limit: int = 12) -> SharedGradientBuffer:
    """A weight whose factors are exchanged, and a bias."""
    tensors = (
        TensorSpec("weight", (OUTS, INS), (INS, 1), dtype),
        TensorSpec("bias", (OUTS,), (1,), dtype),
    )
    spec = GradientSpec(num_shares=NUM_SHARES, tensors=tensors, row_limits=(limit, 0))
    return SharedGradientBuffer(
        spec, SharedRegion.create(spec.num_bytes, spec.holes(range(spec.num_shares))), 0
    )


def factors(seed: int, num_rows: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(num_rows, INS, generator=generator, dtype=torch.float64).to(dtype),
        torch.randn(num_rows, OUTS, generator=generator, dtype=torch.float64).to(dtype),
    )


def reduce_all(rows: SharedGradientBuffer, num_ranks: int) -> Tensor | None:
    """Each rank's pieces in turn, then the whole."""
    rows.collect(NUM_SHARES)
    for pieces in elementwise_slices(rows._spec.extents, num_ranks, NUM_SHARES):
        rows.reduce_scatter(pieces)
    return rows.summed(0)


SIZES = {"factors": [3], "twice": [2, 2], "too many": [2, 3]}
KINDS = ("nothing", "factors", "twice", "too many", "gradient", "factors, then gradient")


@pytest.mark.parametrize("kinds", list(product(KINDS, repeat=NUM_SHARES)))
def test_any_mixture_sums_to_the_gradient(kinds: tuple[str, ...]) -> None:
    rows = make_rows()
    for _ in range(2):  # what the first pass has left behind must not matter
        rows.begin_pass()
        expected = torch.zeros(OUTS, INS, dtype=torch.float64)
        for share, kind in enumerate(kinds):
            whole: list[Tensor | None] = [None, None]
            sizes = {"factors": [3], "twice": [2, 2], "too many": [2, 3]}.get(
                kind.split(",")[0], []
            )
            for number, size in enumerate(sizes):
                inputs, gradients = factors(10 * share + number, size)
                rows.write_product(share, 0, inputs, gradients)
                expected += gradients.T @ inputs
            if "gradient" in kind:
                inputs, gradients = factors(share + 100, 2)
                gradient = gradients.T @ inputs
                whole[0] = gradient
                expected += gradient
            rows.write(share, whole)
        summed = reduce_all(rows, num_ranks=2)
    if set(kinds) == {"nothing"}:
        assert summed is None
        assert not rows.is_used(0)
    else:
        torch.testing.assert_close(summed, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_ranks_changes_no_bit(dtype: torch.dtype, num_ranks: int) -> None:
    def run(ranks: int) -> Tensor | None:
        rows = make_rows(torch.float32)
        for share in range(NUM_SHARES):
            rows.write_product(share, 0, *factors(share, 4, dtype))
            rows.write(share, [None, None])
        return reduce_all(rows, ranks)

    alone, together = run(1), run(num_ranks)
    assert alone is not None
    assert together is not None
    assert torch.equal(alone, together)


def test_factors_take_no_memory_for_gradients() -> None:
    """Only the row of the sum, and the rows of the factors."""
    rows = make_rows(torch.float32, limit=3 * 40)
    for share in range(NUM_SHARES):
        rows.write_product(share, 0, *factors(share, 4, torch.float32))
        rows.write(share, [None, None])
    reduce_all(rows, 1)
    touched = set(rows._memory._reserved)
    assert not touched & {offsets[0] for offsets in rows._memory._row_offsets}
    assert sum(rows._memory._reserved.values()) == NUM_SHARES * 4 * (INS + OUTS) * 4


def test_bfloat16_factors_give_a_float32_gradient() -> None:
    rows = make_rows(torch.float32)
    for share in range(NUM_SHARES):
        rows.write_product(share, 0, *factors(share, 4, torch.bfloat16))
        rows.write(share, [None, None])
    summed = reduce_all(rows, 2)
    assert summed is not None
    assert summed.dtype == torch.float32
    expected = sum(
        gradients.double().T @ inputs.double()
        for inputs, gradients in (factors(share, 4, torch.bfloat16) for share in range(NUM_SHARES))
    )
    torch.testing.assert_close(summed.double(), expected, rtol=1e-2, atol=5e-2)


# --- rows of embeddings ---------------------------------------------------------------------------


def make_embedding(num_rows: int, num_shares: int) -> tuple[SharedGradientBuffer, SharedRegion]:
    spec = GradientSpec(
        num_shares=num_shares,
        tensors=(TensorSpec("rows", (num_rows, 64), (64, 1), torch.float32),),
        row_limits=(0,),
        sparse=frozenset({"rows"}),
    )
    region = SharedRegion.create(spec.num_bytes, spec.holes(range(num_shares)))
    return SharedGradientBuffer(spec, region, 0), region


def touched(num_rows: int, count: int, seed: int) -> Tensor:
    """A gradient of so many lookups, some of them of the same row."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(num_rows, (1, count), generator=generator)
    values = torch.randn(count, 64, generator=generator)
    return torch.sparse_coo_tensor(numbers, values, (num_rows, 64), check_invariants=True)


def test_touched_rows_take_the_memory_of_themselves_and_their_numbers() -> None:
    """What is handed in of an embedding is all that is written, and all that others read."""
    rows, region = make_embedding(1_000_000, 1)
    before = os.fstat(region.descriptor).st_blocks * 512
    gradient = touched(1_000_000, 256, 0)
    rows.begin_pass()
    rows.write(0, [gradient])
    taken = os.fstat(region.descriptor).st_blocks * 512 - before
    num_bytes = gradient.coalesce()._nnz() * 64 * 4
    assert num_bytes < taken <= 1.2 * num_bytes


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_touched_rows_sum_to_the_dense_gradient(num_ranks: int) -> None:
    rows, _ = make_embedding(50, 3)
    for seed in (0, 10):  # what the first pass has left behind must not matter
        rows.begin_pass()
        gradients = [touched(50, 30, seed + share) for share in range(2)]
        rows.write(0, [gradients[0]])
        rows.write(0, [gradients[1]])  # accumulated
        rows.write(2, [gradients[1]])  # and the share between has touched nothing
        rows.collect(3)
        slices = elementwise_slices(rows._spec.extents, num_ranks, 3)
        sums = [rows.reduce_scatter(pieces) for pieces in slices]
        for pieces, parts in zip(slices, sums, strict=True):
            rows.gather(pieces, parts)
        expected = (gradients[0] + gradients[1] + gradients[1]).to_dense()
        torch.testing.assert_close(rows.summed(0), expected)
        assert all(part is not None and part.is_coalesced() for parts in sums for part in parts)
