"""What limits a read of rank 0: interrupted where that can be, told of where it cannot."""

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from functools import partial
from typing import ClassVar, NoReturn

import pytest
import torch
from torch import nn

import lockstep
from lockstep.train.input import read_limit
from lockstep.train.input.read_limit import ReadLimit

SECONDS = 0.3
LONG = 60.0


class TooLong(Exception):  # noqa: N818
    pass


def give_up(waited_seconds: float, thread: int) -> NoReturn:
    assert waited_seconds > SECONDS
    assert thread == threading.get_ident()
    raise TooLong


def sleep() -> None:
    time.sleep(LONG)


def wait() -> None:
    threading.Event().wait(LONG)


def read_a_pipe() -> None:
    end, other = os.pipe()
    try:
        os.read(end, 1)
    finally:
        os.close(end)
        os.close(other)


def compute() -> None:
    until = time.monotonic() + LONG
    while time.monotonic() < until:
        pass


@pytest.mark.parametrize("hang", [sleep, wait, read_a_pipe, compute])
def test_a_read_that_hangs_is_given_up(hang: Callable[[], None]) -> None:
    limit = ReadLimit(SECONDS, give_up)
    began = time.monotonic()
    with pytest.raises(TooLong), limit.watched(), limit:
        hang()
    assert time.monotonic() - began < LONG
    assert signal.getsignal(signal.SIGURG) == signal.SIG_DFL


def test_reads_are_not_added_up_and_what_is_between_them_does_not_count(
    capsys: pytest.CaptureFixture[str],
) -> None:
    limit = ReadLimit(10.0, give_up)
    for _ in range(3):
        with limit:
            for _ in range(10):  # the first look finds the read, and counts nothing
                limit._count(1.0, interrupts=False)
        for _ in range(20):
            limit._count(1.0, interrupts=False)
    assert capsys.readouterr().err == ""
    with limit:
        for _ in range(12):
            limit._count(1.0, interrupts=False)
    assert capsys.readouterr().err.startswith("This process has been reading samples for 11 s")


STRATEGIES: dict[str, Callable[[], lockstep.Strategy]] = {
    "mirrored": partial(lockstep.MirroredStrategy, 2),
    "pipeline": partial(lockstep.PipelineStrategy, 2, ["1"], 2),
}


class Counted(ReadLimit):
    reads: ClassVar[list[int]] = []

    def __enter__(self) -> None:
        super().__enter__()
        self.reads.append(self._num_reads)


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_read_of_rank_0_is_limited(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.train.runtime.session.ReadLimit", Counted)
    trainer = lockstep.Trainer(
        nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)),
        loss=nn.MSELoss(),
        optimizer=torch.optim.SGD,
        strategy=STRATEGIES[name](),
    )
    shares_here = 2 if name == "pipeline" else 1  # of each batch
    for act, batches in ((trainer.fit, 3), (trainer.evaluate, 3)):
        Counted.reads.clear()
        act((torch.ones(12, 4), torch.ones(12, 2)), batch_size=4)
        assert Counted.reads == list(range(1, batches * shares_here + 1))


class Told:
    """Standard error, for a thread to write to."""

    def __init__(self) -> None:
        self.text, self.is_there = "", threading.Event()

    def write(self, text: str) -> None:
        self.text = text
        self.is_there.set()


def read_until(told: Told) -> None:
    limit = ReadLimit(SECONDS, give_up)
    with redirect_stderr(told), limit.watched(), limit:  # type: ignore[type-var]
        assert told.is_there.wait(LONG)


def test_in_another_thread_it_is_told_of() -> None:
    told = Told()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(read_until, told).result(LONG)
    assert "cannot be interrupted" in told.text
    assert "in read_until\n" in told.text


def test_a_handler_of_the_users_own_is_left_alone() -> None:
    told = Told()
    calls: list[int] = []
    before = signal.signal(signal.SIGURG, lambda number, frame: calls.append(number))
    try:
        own = signal.getsignal(signal.SIGURG)
        read_until(told)
        assert signal.getsignal(signal.SIGURG) is own
    finally:
        signal.signal(signal.SIGURG, before)
    assert calls == []
    assert "in read_until\n" in told.text


def test_what_swallows_the_interruption_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """As does a dataset that tries again whatever happens; or C code, which hears of nothing."""
    told = Told()
    monkeypatch.setattr(read_limit, "_GRACE_SECONDS", SECONDS)
    limit = ReadLimit(SECONDS, give_up)
    with redirect_stderr(told), limit.watched(), limit:  # type: ignore[type-var]
        with pytest.raises(TooLong):
            sleep()
        assert told.is_there.wait(LONG)
    assert "in test_what_swallows_the_interruption_is_told_of\n" in told.text
