"""Reading: its random numbers are its own, and it knows when it may go on beside a model."""

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lockstep.data.iterable.stream_reader import Reading
from lockstep.data.iterable.streams import as_stream
from lockstep.data.order import same_streams, seed_streams, stream_seed, stream_states
from lockstep.errors import DataError

DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(1).item(),
    "numpy": np.random.random,
    "numpy, normal": np.random.standard_normal,
    "python": random.random,
}


def reading_of(data: Any, **options: Any) -> Reading:
    stream = as_stream(data, name="data", batch_size=2)
    assert stream is not None
    return Reading(stream, **{"seed": 3, **options})


def epoch_of(reading: Reading, epoch: int) -> list[float]:
    """The first target of every batch."""
    reading.begin_epoch(epoch)
    found = []
    while (batch := reading.read()) is not None:
        found.append(batch.targets[0].item())
    return found


def drawing(draw: Callable[[], float], num_batches: int = 5) -> Callable[[], Iterator[Any]]:
    def batches() -> Iterator[Any]:
        for _ in range(num_batches):
            yield torch.ones(2, 1), torch.full((2,), draw(), dtype=torch.float64)

    return batches


def counting(num_batches: int = 5) -> Callable[[], Iterator[Any]]:
    numbers = iter(range(1000))
    return drawing(lambda: float(next(numbers)), num_batches)


@pytest.mark.parametrize("name", DRAWS)
def test_what_is_drawn_is_a_function_of_seed_and_epoch(name: str) -> None:
    draw = DRAWS[name]
    reading = reading_of(drawing(draw), first_epoch=4)
    found = []
    for epoch in range(2):
        found.append(epoch_of(reading, epoch))
        draw()  # whatever else is drawn
    for epoch in range(2):
        seed_streams(stream_seed(3, "reading", 4 + epoch))
        assert found[epoch] == [draw() for _ in range(5)]
    assert found[0] != found[1]


@pytest.mark.parametrize("name", DRAWS)
def test_reading_disturbs_no_other_stream(name: str) -> None:
    before = stream_states()
    reading = reading_of(drawing(DRAWS[name]))
    reading.peek(0)
    epoch_of(reading, 0)
    assert same_streams(before, stream_states())


@pytest.mark.parametrize("name", DRAWS)
def test_streams_differ_once_something_is_drawn(name: str) -> None:
    before = stream_states()
    DRAWS[name]()
    assert not same_streams(before, stream_states())
    assert same_streams(stream_states(), stream_states())


def test_seeds_and_purposes_have_streams_of_their_own() -> None:
    data = drawing(random.random)
    found = [
        tuple(epoch_of(reading_of(data, **options), 0))
        for options in ({}, {"seed": 4}, {"purpose": "validation"}, {"first_epoch": 1})
    ]
    assert len(set(found)) == 4


@pytest.mark.parametrize("name", DRAWS)
def test_what_draws_is_not_read_aside(name: str) -> None:
    reading = reading_of(drawing(DRAWS[name]))
    reading.begin_epoch(0)
    for _ in range(5):
        assert reading.read() is not None
        assert not reading.can_prefetch


def forked_torch() -> float:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(3)
        return float(torch.rand(()))


def reset_numpy() -> float:
    before = np.random.get_state()
    np.random.seed(3)
    number = np.random.rand()
    np.random.set_state(before)
    return number


def reset_python() -> float:
    before = random.getstate()
    random.seed(3)
    number = random.random()
    random.setstate(before)
    return number


class Drawn(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Ten samples that are drawn when they are read."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 10

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        if number >= 10:
            raise IndexError(number)
        return torch.ones(1), torch.tensor(self.draw())


@pytest.mark.parametrize("draw", [forked_torch, reset_numpy, reset_python])
@pytest.mark.parametrize("from_loader", [False, True])
def test_what_sets_a_stream_and_restores_it_is_not_read_aside(
    draw: Callable[[], float], *, from_loader: bool
) -> None:
    before = sys.getprofile(), np.random.seed, np.random.set_state
    reading = reading_of(DataLoader(Drawn(draw), 2) if from_loader else drawing(draw))
    reading.begin_epoch(0)
    for _ in range(5):
        assert reading.read() is not None
        assert not reading.can_prefetch
    assert (sys.getprofile(), np.random.seed, np.random.set_state) == before


def test_a_generator_of_its_own_may_be_set() -> None:
    own, of_python = torch.Generator(), random.Random()

    def draw() -> float:
        of_python.seed(3)
        return float(torch.rand((), generator=own.manual_seed(3))) + of_python.random()

    reading = reading_of(drawing(draw))
    reading.begin_epoch(0)
    for _ in range(3):
        reading.read()
    assert reading.can_prefetch


def test_what_draws_nothing_is_read_aside_after_some_batches() -> None:
    reading = reading_of(counting())
    reading.begin_epoch(0)
    can = []
    for _ in range(5):
        reading.read()
        can.append(reading.can_prefetch)
    assert can == [False, False, True, True, True]
    assert reading.prefetch() is None
    assert reading.read() is None
    reading.begin_epoch(1)
    reading.read()
    assert reading.can_prefetch  # it is known by now


def test_the_order_that_a_sampler_draws_with_the_first_batch_does_not_count() -> None:
    data = TensorDataset(torch.ones(20, 1), torch.arange(20.0))
    reading = reading_of(DataLoader(data, batch_size=2, shuffle=True))
    reading.begin_epoch(0)
    for _ in range(3):
        reading.read()
    assert reading.can_prefetch


def test_a_later_draw_ends_reading_aside() -> None:
    numbers = iter(range(100))

    def draw() -> float:
        number = next(numbers)
        return random.random() if number == 3 else float(number)

    reading = reading_of(drawing(draw, 10))
    reading.begin_epoch(0)
    can = []
    for _ in range(6):
        reading.read()
        can.append(reading.can_prefetch)
    assert can == [False, False, True, False, False, False]


def test_the_first_batch_can_be_seen_before_it_is_read() -> None:
    reading = reading_of(counting())
    assert reading.peek(0) is reading.peek(0)
    assert epoch_of(reading, 0) == [0, 1, 2, 3, 4]
    assert reading.peek(1).targets[0] == 0  # still the first of all
    assert epoch_of(reading, 1) == [5, 6, 7, 8, 9]


def test_epochs_of_some_steps_go_on_in_the_data() -> None:
    reading = reading_of(counting(3), steps=4)
    assert [epoch_of(reading, epoch) for epoch in range(3)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]


def test_every_pass_within_an_epoch_has_random_numbers_of_its_own() -> None:
    found = epoch_of(reading_of(drawing(random.random, 2), steps=6), 0)
    assert len(set(found)) == 6


def test_an_epoch_is_not_read_beyond_its_steps() -> None:
    numbers = iter(range(100))
    data = ((torch.ones(2, 1), torch.full((2,), float(number))) for number in numbers)
    reading = reading_of(data, steps=3)
    epoch_of(reading, 0)
    assert not reading.can_prefetch
    assert next(numbers) == 3


def test_an_error_tells_where_it_was_and_has_the_users_own_as_its_cause() -> None:
    def failing() -> Iterator[Any]:
        yield torch.ones(2, 1), torch.ones(2)
        raise OSError("the disk is gone")

    reading = reading_of(failing)
    reading.begin_epoch(0)
    reading.read()
    message = r"Reading batch 1 of epoch 0 of `data` \(from 0\).*OSError: the disk is gone"
    with pytest.raises(DataError, match=message) as caught:
        reading.read()
    assert isinstance(caught.value.__cause__, OSError)


def test_what_is_no_batch_is_told_with_its_place() -> None:
    reading = reading_of(iter([(torch.ones(2, 1), torch.ones(3))]))
    reading.begin_epoch(0)
    with pytest.raises(DataError, match="inputs 2, targets 3") as caught:
        reading.read()
    assert caught.value.__notes__ == ["It was batch 0 of epoch 0 of `data` (from 0)."]
