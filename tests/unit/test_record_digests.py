"""Digests of tensors: what they tell, and that those of shards add up to those of the whole."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from lockstep.proof.recording import coefficients
from lockstep.proof.recording.digests import (
    WIDTH,
    Pending,
    add,
    are_same,
    digest,
    distance,
    norm,
)
from lockstep.proof.recording.shards import Shard, local_part, pieces_of, whole
from tests.thorough import core_of

SHAPES = ["", "3", "5000", "100000", "784 256", "64 32 3 3", "1 1050000", "7 1"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]
FLOAT32_ROUNDING = 40 * torch.finfo(torch.float32).eps


def tensor_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return (10 * torch.randn(shape, generator=generator)).to(dtype)


def sizes(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split()))


def digest_of(tensor: torch.Tensor) -> np.ndarray:
    return digest(*local_part(tensor))


def test_a_digest_has_64_bytes() -> None:
    assert digest_of(tensor_of((784, 256))).nbytes == 8 * WIDTH == 64


@pytest.mark.parametrize("shape", core_of(SHAPES, ["3", "784 256"]))
@pytest.mark.parametrize("dtype", core_of(DTYPES, [torch.float32]))
def test_it_has_the_norm_and_the_projections(shape: str, dtype: torch.dtype) -> None:
    tensor = tensor_of(sizes(shape), dtype)
    found = digest_of(tensor)
    values = tensor.double().flatten().numpy()
    size = np.linalg.norm(values)
    assert norm(found) == pytest.approx(size, rel=FLOAT32_ROUNDING)
    expected = coefficients.of_elements(whole(tensor.shape)) @ values
    assert np.abs(found[2:] - expected).max() <= FLOAT32_ROUNDING * size


@pytest.mark.parametrize("shape_text", core_of(SHAPES[1:], ["784 256"]))
def test_digests_of_shards_add_up(shape_text: str) -> None:
    """Along the first dim at any place, and along the second."""
    shape = sizes(shape_text)
    tensor, one = tensor_of(shape), whole(shape)
    size = norm(digest_of(tensor))
    cuts = {1, shape[0] // 2, shape[0] - 1} - {0}
    for cut in cuts:
        ends = ((0, cut), (cut, shape[0]))
        parts = [digest(tensor[a:b], Shard(shape, ((a, b), *one.ranges[1:]))) for a, b in ends]
        assert distance(add(parts), digest_of(tensor)) <= FLOAT32_ROUNDING * size
        assert norm(add(parts)) == pytest.approx(size, rel=FLOAT32_ROUNDING)
    if len(shape) == 2 and shape[1] < 1000 and shape[1] > 1:
        cut = shape[1] // 3
        parts = [
            digest(tensor[:, a:b], Shard(shape, (one.ranges[0], (a, b))))
            for a, b in ((0, cut), (cut, shape[1]))
        ]
        assert distance(add(parts), digest_of(tensor)) <= FLOAT32_ROUNDING * size


@pytest.mark.parametrize("shape_text", core_of([*SHAPES, "2 3 70"], ["784 256", "64 32 3 3"]))
def test_digests_of_flat_pieces_add_up(shape_text: str) -> None:
    """Consecutive elements, from within one row to within another."""
    tensor = tensor_of(sizes(shape_text))
    flat, whole_digest = tensor.flatten(), digest_of(tensor)
    cuts = sorted({0, 1, len(flat) // 3, len(flat) - 1, len(flat)} - {-1})
    pieces = [
        piece
        for start, stop in pairwise(cuts)
        for piece in pieces_of(tensor.shape, flat[start:stop], start)
    ]
    assert sum(piece.shard.num_elements for piece in pieces) == len(flat)
    parts = [digest(*piece) for piece in pieces]
    assert distance(add(parts), whole_digest) <= FLOAT32_ROUNDING * norm(whole_digest)
    assert norm(add(parts)) == pytest.approx(norm(whole_digest), rel=FLOAT32_ROUNDING)


def test_the_size_of_a_difference_is_estimated() -> None:
    generator = torch.Generator().manual_seed(9)
    ratios = []
    for _ in range(30):
        tensor = torch.randn(64, 33, generator=generator, dtype=torch.float64)
        change = 1e-9 * torch.randn(64, 33, generator=generator, dtype=torch.float64)
        change[torch.rand(64, 33, generator=generator) < 0.5] = 0
        estimate = distance(digest_of(tensor + change), digest_of(tensor))
        ratios.append(estimate / change.norm().item())
    assert min(ratios) > 1 / 3
    assert max(ratios) < 3
    assert sum(0.5 < ratio < 2 for ratio in ratios) >= 25
    assert sum(ratio**2 for ratio in ratios) / len(ratios) == pytest.approx(1, rel=0.3)


def test_every_bit_counts() -> None:
    for shape in ((33,), (300, 70)):
        tensor = tensor_of(shape)
        for flat in (0, tensor.numel() // 2, tensor.numel() - 1):
            other = tensor.clone().flatten()
            other[flat] = torch.nextafter(other[flat], torch.tensor(math.inf))
            assert not are_same(digest_of(other.view(shape)), digest_of(tensor))
        assert not are_same(digest_of(tensor.flip(0)), digest_of(tensor))
        assert are_same(digest_of(tensor.clone()), digest_of(tensor))


@pytest.mark.parametrize("shape", [(64, 256), (20_000,), (100, 4)])
def test_rows_that_have_changed_places_are_seen(shape: tuple[int, ...]) -> None:
    """Also where the hash, whose multipliers repeat, does not tell them apart."""
    tensor = tensor_of(shape)
    assert not are_same(digest_of(tensor.view(-1, 4).flip(0).view(shape)), digest_of(tensor))
    assert not are_same(digest_of(tensor.roll(512)), digest_of(tensor))


def test_digests_of_many_tensors_are_those_of_each() -> None:
    """As digests are taken before the tensors change, too."""
    tensors = [
        tensor_of(sizes(shape), dtype) for shape in ("3", "300 70", "", "0 4") for dtype in DTYPES
    ]
    pending = Pending([local_part(each) for each in tensors])
    expected = [digest_of(each) for each in tensors]
    for each in tensors:
        each.zero_()
    assert np.array_equal(pending.fetch(), np.stack(expected), equal_nan=True)


def test_values_that_are_not_finite_are_seen() -> None:
    tensor = tensor_of((100, 100))
    tensor[3, 4] = math.nan
    assert math.isnan(distance(digest_of(tensor), digest_of(tensor_of((100, 100)))))


def test_layouts_and_views_do_not_matter() -> None:
    tensor = tensor_of((64, 128))
    for other in (tensor.t().contiguous().t(), torch.cat([tensor, tensor])[64:], tensor[:, :]):
        assert are_same(digest_of(other), digest_of(tensor))
    odd = torch.cat([torch.zeros(1), tensor.flatten()])[1:]  # not at a multiple of 8 bytes
    assert are_same(digest_of(odd.view(64, 128)), digest_of(tensor))


def test_where_the_user_allows_shorter_products_float64_is_used() -> None:
    tensor = tensor_of((300, 300))
    exact = digest_of(tensor.double())
    torch.set_float32_matmul_precision("medium")
    try:
        assert distance(digest_of(tensor), exact) <= 1e-13 * norm(exact)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_empty_and_complex_tensors() -> None:
    assert norm(digest_of(torch.zeros(0, 4))) == 0
    tensor = torch.complex(tensor_of((20,)), tensor_of((20,)))
    assert norm(digest_of(tensor)) == pytest.approx(tensor.norm().item(), rel=1e-6)
