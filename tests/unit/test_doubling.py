"""Which batch sizes are tried and which is taken, on trainings whose times are formulas."""

from collections.abc import Callable

import pytest

from lockstep.train.batch_size_search.search_algorithm import (
    Doubling,
    Failed,
    Measured,
    Objective,
    TooLarge,
    Trial,
)

MIB = 1 << 20


def overhead(step: float, sample: float = 1.0) -> Callable[[int], float]:
    """Seconds of a step that costs something by itself, and something for each sample."""
    return lambda size: step + sample * size


STEPS_COST = overhead(100)


def search(
    seconds: Callable[[int], float] = STEPS_COST,
    *,
    num_bytes: Callable[[int], int] = lambda size: size * MIB,
    dies_above: int | None = None,
    fails_above: int | None = None,
    objective: Objective = "speed",
    smallest: int = 8,
    floor: int = 1,
    largest: int = 1 << 20,
    limit_bytes: int | None = None,
) -> tuple[Trial, list[int], Doubling, list[Trial]]:
    """What a search finds, the sizes that were tried, the search, and what it has told."""
    tried: list[int] = []
    told: list[Trial] = []

    def try_size(size: int) -> Trial:
        tried.append(size)
        if dies_above is not None and size > dies_above:
            return TooLarge(batch_size=size, reason="killed")
        if fails_above is not None and size > fails_above:
            return Failed(batch_size=size, reason="no", error=ValueError("no"))
        return Measured(batch_size=size, seconds_per_step=seconds(size), peak_bytes=num_bytes(size))

    doubling = Doubling(
        objective=objective,
        smallest=smallest,
        floor=floor,
        largest=largest,
        limit_bytes=limit_bytes,
        try_size=try_size,
        report=told.append,
    )
    return doubling.run(), tried, doubling, told


def size_of(found: Trial) -> int:
    assert isinstance(found, Measured), found
    return found.batch_size


def test_it_doubles_until_two_gains_are_below_five_percent() -> None:
    found, tried, doubling, told = search(overhead(100))
    # Per sample 1 + 100 / n: the gain of doubling n is 50 / (n + 100), below 5 % from 900 on.
    assert tried == [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
    assert [trial.batch_size for trial in told] == tried
    # The smallest within 5 % of the fastest: 1.098 and 1.049 against 1.024.
    assert size_of(found) == 2048
    assert not doubling.has_reached_largest


def test_one_weak_gain_does_not_end_it() -> None:
    def seconds(size: int) -> float:
        return {8: 8.0, 16: 16.0, 32: 16.0, 64: 64.0, 128: 128.0}[size]

    found, tried, _, _ = search(seconds)
    assert tried == [8, 16, 32, 64, 128]
    assert size_of(found) == 32


def test_ties_go_to_the_smaller_batch() -> None:
    found, tried, _, _ = search(lambda size: float(size))
    assert tried == [8, 16, 32]
    assert size_of(found) == 8


def test_never_larger_than_the_largest() -> None:
    found, tried, doubling, _ = search(overhead(1e6), largest=100)
    assert tried == [8, 16, 32, 64, 100]
    assert size_of(found) == 100
    assert doubling.has_reached_largest


def test_data_smaller_than_the_first_size() -> None:
    found, tried, _, _ = search(largest=5)
    assert (tried, size_of(found)) == ([5], 5)


def test_a_size_that_dies_ends_the_doubling_and_one_between_is_tried() -> None:
    found, tried, _, _ = search(overhead(1e6), dies_above=400)
    assert tried == [8, 16, 32, 64, 128, 256, 512, 384]
    assert size_of(found) == 384


def test_nothing_between_is_tried_where_nothing_would_be_gained() -> None:
    found, tried, _, _ = search(lambda size: float(max(size, 64)), dies_above=128)
    assert tried == [8, 16, 32, 64, 128, 256]
    assert size_of(found) == 64


def test_a_failure_of_a_larger_batch_ends_the_doubling_too() -> None:
    found, tried, _, _ = search(overhead(1e6), fails_above=16)
    assert tried == [8, 16, 32, 24]
    assert size_of(found) == 16


def test_a_failure_of_the_first_batch_is_what_is_found() -> None:
    found, tried, _, _ = search(fails_above=4)
    assert isinstance(found, Failed)
    assert tried == [8]


def test_it_goes_down_where_the_first_size_dies() -> None:
    found, tried, _, _ = search(overhead(1e6), dies_above=3, floor=2)
    assert tried == [8, 4, 2, 3]
    assert size_of(found) == 3


def test_it_goes_no_further_down_than_the_floor() -> None:
    found, tried, _, _ = search(dies_above=1, floor=2)
    assert tried == [8, 4, 2]
    assert isinstance(found, TooLarge)


@pytest.mark.parametrize("dies_above", [8, 100, 129, 1000, 5555])
def test_the_largest_that_fits_is_found_to_an_eighth(dies_above: int) -> None:
    found, _, _, _ = search(objective="memory", dies_above=dies_above)
    assert dies_above * 7 / 8 - 1 <= size_of(found) <= dies_above


def test_sizes_in_between_are_multiples_of_the_replicas() -> None:
    found, tried, _, _ = search(objective="memory", dies_above=1000, smallest=24, floor=3)
    assert all(size % 3 == 0 for size in tried)
    assert 875 <= size_of(found) <= 1000


def test_memory_above_nine_tenths_of_what_is_free_is_too_much() -> None:
    found, _, _, told = search(
        overhead(1e6), limit_bytes=100 * MIB, largest=95, num_bytes=lambda size: size * MIB
    )
    assert size_of(found) <= 90
    (over,) = [trial for trial in told if isinstance(trial, TooLarge)]
    assert over.reason == "it needs 95.0 MiB, more than 90% of 100.0 MiB free"


def test_what_cannot_fit_is_seen_coming_and_not_tried() -> None:
    found, tried, _, told = search(overhead(1e6), limit_bytes=100 * MIB)
    assert tried == [8, 16, 32, 64, 96]  # 128 is foreseen not to fit; 96 fits, but not in 90 %
    assert size_of(found) == 64
    reasons = [trial.reason for trial in told if isinstance(trial, TooLarge)]
    assert reasons[0] == "not tried: it would need 128.0 MiB of 100.0 MiB free"
