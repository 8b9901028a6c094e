"""Orders and seeds are pure functions of what they are named by, and of nothing else."""

import random
import struct

import numpy as np
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from lockstep.data.order import (
    batch_bounds,
    epoch_batches,
    epoch_order,
    restore_streams,
    seed_streams,
    share_seed,
    stream_seed,
    stream_states,
)

INTS = st.integers(-(1 << 63), (1 << 63) - 1)
KEYS = st.lists(st.one_of(INTS, st.text()), max_size=4)
SEEDS = st.integers(0, (1 << 63) - 1)
EPOCHS = st.integers(0, 10_000)


@given(num_samples=st.integers(0, 500), batch_size=st.integers(1, 600))
def test_batches_partition_the_samples_and_only_the_last_is_short(
    num_samples: int, batch_size: int
) -> None:
    bounds = list(batch_bounds(num_samples, batch_size))
    assert [row for start, stop in bounds for row in range(start, stop)] == list(range(num_samples))
    assert all(stop - start == batch_size for start, stop in bounds[:-1])
    assert all(0 < stop - start <= batch_size for start, stop in bounds)


@given(
    seed=SEEDS,
    num_samples=st.integers(1, 60),
    batch_size=st.integers(1, 30),
    steps=st.integers(1, 12),
    shuffle=st.booleans(),
)
def test_epochs_of_some_steps_are_the_passes_cut_otherwise(
    seed: int, num_samples: int, batch_size: int, steps: int, shuffle: bool
) -> None:
    def batches(epochs: int, steps: int | None) -> list[list[int]]:
        return [
            indices.tolist()
            for epoch in range(epochs)
            for indices in epoch_batches(
                seed, epoch, num_samples, batch_size, shuffle=shuffle, steps=steps
            )
        ]

    cut = batches(5, steps)
    assert len(cut) == 5 * steps
    whole = batches(5 * steps, None)  # a pass has a batch at least
    assert cut == whole[: len(cut)]
    first = [index for batch in whole[: -(-num_samples // batch_size)] for index in batch]
    assert first == epoch_order(seed, 0, num_samples, shuffle=shuffle).tolist()


@given(seed=SEEDS, epoch=EPOCHS, num_samples=st.integers(0, 300))
def test_an_epochs_order_is_a_permutation(seed: int, epoch: int, num_samples: int) -> None:
    order = epoch_order(seed, epoch, num_samples, shuffle=True)
    assert order.dtype == torch.int64
    assert sorted(order.tolist()) == list(range(num_samples))


@given(seed=SEEDS, epoch=EPOCHS, other=st.integers(0, 1000))
def test_an_epochs_order_depends_on_seed_and_epoch_alone(seed: int, epoch: int, other: int) -> None:
    order = epoch_order(seed, epoch, 50, shuffle=True)
    states = stream_states()
    try:
        seed_streams(other)
        assert torch.equal(epoch_order(seed, epoch, 50, shuffle=True), order)
        drawn = torch.rand(3)
        seed_streams(other)
        assert torch.equal(torch.rand(3), drawn)  # and the order drew nothing from the global one
    finally:
        restore_streams(states)


@given(seed=SEEDS, epoch=EPOCHS, later=EPOCHS)
def test_epochs_have_different_orders(seed: int, epoch: int, later: int) -> None:
    assume(epoch != later)
    first, second = (epoch_order(seed, number, 50, shuffle=True) for number in (epoch, later))
    assert not torch.equal(first, second)


@given(seed=SEEDS, epoch=EPOCHS, num_samples=st.integers(0, 50))
def test_without_shuffle_the_order_is_the_datas(seed: int, epoch: int, num_samples: int) -> None:
    order = epoch_order(seed, epoch, num_samples, shuffle=False)
    assert order.tolist() == list(range(num_samples))


@given(left=KEYS, right=KEYS)
def test_different_keys_give_different_seeds(left: list[int | str], right: list[int | str]) -> None:
    assume(left != right)
    assert stream_seed(*left) != stream_seed(*right)


@given(number=INTS)
def test_a_number_and_the_text_of_its_bytes_are_different_keys(number: int) -> None:
    text = struct.pack("<q", number).decode("utf-8", errors="replace")
    assert stream_seed(number) != stream_seed(text)


def test_one_is_not_the_text_of_its_bytes() -> None:
    assert stream_seed(1) != stream_seed("\x01" + "\x00" * 7)


@given(keys=KEYS)
def test_a_seed_fits_every_generator(keys: list[int | str]) -> None:
    seed = stream_seed(*keys)
    assert 0 <= seed < 1 << 63
    torch.Generator().manual_seed(seed)


def test_every_share_of_every_step_has_a_stream_of_its_own() -> None:
    seeds = {
        share_seed(seed, step, share) for seed in (0, 1) for step in range(50) for share in range(8)
    }
    assert len(seeds) == 2 * 50 * 8


def draw_from_all_streams() -> tuple[list[float], float, float]:
    return torch.rand(4).tolist(), float(np.random.rand()), random.random()


def test_seeded_streams_repeat() -> None:
    states = stream_states()
    try:
        seed_streams(12)
        drawn = draw_from_all_streams()
        seed_streams(12)
        assert draw_from_all_streams() == drawn
    finally:
        restore_streams(states)


def test_restored_streams_go_on_where_they_were() -> None:
    states = stream_states()
    drawn = draw_from_all_streams()
    seed_streams(12)
    restore_streams(states)
    assert draw_from_all_streams() == drawn


def test_streams_do_not_change_from_release_to_release() -> None:
    """A run can be repeated years later: these numbers are for ever."""
    assert stream_seed(0, "order", 0) == 259480362273938691
    assert share_seed(0, 0, 0) == 4766798581828557036
    assert epoch_order(0, 0, 8, shuffle=True).tolist() == [1, 6, 0, 4, 2, 3, 7, 5]
