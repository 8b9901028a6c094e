"""Data that does not come, and processes that end while it is waited for."""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

import lockstep
from lockstep.channel import background
from lockstep.data.order import same_streams, stream_states
from lockstep.errors import WorkerError
from lockstep.train.input.input_wait import InputBoundWarning
from tests.faults.jobs import make_data, make_trainer, warm_up
from tests.faults.processes import wait_until
from tests.faults.test_interrupt import check_same
from tests.thorough import core_of

Batch = tuple[Tensor, Tensor]
BATCHES: list[Batch] = list(zip(*(part.split(4) for part in make_data()), strict=True))


def readers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "reading" in thread.name]


class Stuck:
    """Gives some batches, presses Ctrl-C, and then gives nothing until it is let go."""

    def __init__(self, num_batches: int, *, draws: bool = False) -> None:
        self.num_batches, self.draws = num_batches, draws
        self.go = threading.Event()

    def __call__(self) -> Iterator[Batch]:
        for batch in BATCHES[: self.num_batches]:
            if self.draws:
                random.random()
            yield batch
        signal.raise_signal(signal.SIGINT)
        self.go.wait(60)

    def let_go(self) -> None:
        """The thread that has hung here leaves the random streams alone."""
        before = stream_states()
        self.go.set()
        wait_until(lambda: not readers(), 30)
        assert same_streams(before, stream_states())


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a thread that is stuck, and will be as long as the test wants."""
    monkeypatch.setattr(background, "_PATIENCE_SECONDS", 0.2)


@pytest.mark.parametrize(
    ("num_batches", "draws", "devices"),
    core_of(
        [(*read, devices) for read in ((1, False), (2, True), (4, False)) for devices in (1, 2)],
        [(4, False, 2)],
    ),
)
def test_ctrl_c_ends_waiting_for_data(num_batches: int, draws: bool, devices: int) -> None:
    data = Stuck(num_batches, draws=draws)
    trainer, expected = make_trainer(devices), make_trainer(devices)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(data, epochs=3, verbose=0)
    data.let_go()
    expected.fit(iter(BATCHES[:num_batches]), verbose=0)
    check_same(trainer, expected)
    trainer.fit(lambda: iter(BATCHES), verbose=0)
    if devices > 1:  # the helpers have left in good order
        assert trainer._runner.session._team is not None
        assert trainer._runner.session._team.answers()


@pytest.mark.parametrize("devices", core_of([1, 2], [2]))
def test_ctrl_c_ends_waiting_for_validation_data(devices: int) -> None:
    data = Stuck(2)
    trainer, expected = make_trainer(devices), make_trainer(devices)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(lambda: iter(BATCHES), epochs=3, validation_data=data, verbose=0)
    data.let_go()
    expected.fit(lambda: iter(BATCHES), verbose=0)
    check_same(trainer, expected)


@pytest.mark.parametrize("devices", core_of([1, 2], [2]))
def test_ctrl_c_ends_an_evaluation(devices: int) -> None:
    data = Stuck(4)
    trainer = make_trainer(devices)
    with pytest.raises(KeyboardInterrupt):
        trainer.evaluate(data)
    data.let_go()
    trainer.evaluate(lambda: iter(BATCHES))


def leave() -> None:
    os._exit(3)


def test_a_helper_that_dies_ends_the_reading() -> None:
    trainer = make_trainer(2, leave, step=3)
    with pytest.raises(WorkerError, match=r"Rank 1 .*ended"):
        trainer.fit(lambda: iter(BATCHES), verbose=0)
    wait_until(lambda: not readers(), 30)


def test_a_helper_that_dies_while_data_is_waited_for_is_noticed() -> None:
    trainer = make_trainer(2)

    def batches() -> Iterator[Any]:
        yield from BATCHES[:4]
        assert trainer._runner.session._team is not None
        os.kill(trainer._runner.session._team.pids()[0], signal.SIGKILL)
        time.sleep(0.5)
        yield BATCHES[4]

    with pytest.raises(WorkerError, match=r"Rank 1 .*ended"):
        trainer.fit(batches, verbose=0)
    wait_until(lambda: not readers(), 30)


@pytest.mark.exhaustive
def test_data_may_take_longer_than_a_helper_is_waited_for_and_it_is_told_where() -> None:
    warm_up(2)
    timeout_seconds = 6.0  # more than a busy machine takes for a step
    trainer = make_trainer(2, timeout_seconds=timeout_seconds)

    def slowly() -> Iterator[Any]:
        yield BATCHES[0]
        wait_until(lambda: len(caught) > 0, 60)
        yield BATCHES[1]

    with pytest.warns(InputBoundWarning) as caught:
        history: lockstep.History = trainer.fit(slowly, verbose=0)
    assert history.epoch == [0]
    assert str(caught[0].message).startswith("Rank 0 has waited 6 s for the next batch")
    assert "in slowly\n" in str(caught[0].message)
    assert caught[0].filename == __file__
