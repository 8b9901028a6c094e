"""The clock of the input: what it counts, when it warns, and what the progress line shows."""

import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.data import prefetch
from lockstep.train.input import input_wait
from lockstep.train.input.input_wait import InputClock
from tests.faults.processes import wait_until
from tests.map_datasets import Rows, lines_of

SECONDS = 30.0  # for what should take none

# What the clock of the input shows. Only the thread that trains moves it on, by what reading and
# computing are said to take: how busy the machine is does not show.
_now = [0.0]


def spend(seconds: float) -> None:
    if threading.current_thread() is threading.main_thread():
        _now[0] += seconds


class Slow(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.seconds = seconds

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        spend(self.seconds)
        output: torch.Tensor = self.layer(rows)
        return output


class SlowRows(Rows):
    """Rows that take a second each."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        spend(1.0)
        return super().__getitem__(index)


def make_trainer(
    devices: int, *callbacks: lockstep.Callback, seconds: float = 0.0
) -> lockstep.Trainer:
    return lockstep.Trainer(
        Slow(seconds),
        loss=nn.MSELoss(),
        optimizer=torch.optim.SGD,
        strategy=lockstep.MirroredStrategy(devices),
        callbacks=callbacks,
    )


def rows(log: Path | None = None) -> Rows:
    return SlowRows(torch.rand(16, 3), torch.rand(16, 1), log=log)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_wait, "time", SimpleNamespace(perf_counter=lambda: _now[0]))


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("devices", [1, 2])
def test_an_epoch_that_waits_is_told_once_and_at_the_users_line(
    devices: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.warns(lockstep.InputBoundWarning) as caught:
        make_trainer(devices, seconds=0.5).fit(rows(), batch_size=4, epochs=3)
    (warning,) = caught
    message = str(warning.message)
    assert warning.filename == __file__
    assert "Training waited for its data" in message
    for cure in ("lockstep.data.prefetch", "lockstep.data.cache", "DataLoader"):
        assert cure in message
    lines = [one for one in capsys.readouterr().out.splitlines() if one.startswith("Epoch")]
    assert len(lines) == 3
    assert all("input wait " in line for line in lines)
    shown = int(lines[-1].partition("input wait ")[2].partition("%")[0])
    assert 50 <= shown <= 100


class NextIsRead(lockstep.Callback):
    """Waits at the end of each step until the next batch has been read."""

    def __init__(self, log: Path, batch_size: int) -> None:
        self.log, self.batch_size = log, batch_size
        self.epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        next_end = min((batch + 2) * self.batch_size, 16)
        wait_until(lambda: len(lines_of(self.log)) >= 16 * self.epoch + next_end, SECONDS)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_read_ahead_is_not_waited_for(
    workers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    ahead = prefetch(rows(log), workers=workers)
    trainer = make_trainer(1, NextIsRead(log, 2), seconds=4.0)
    with warnings.catch_warnings(action="error"):
        trainer.fit(ahead, batch_size=2, epochs=2)
    last = capsys.readouterr().out.splitlines()[-1]
    assert "Epoch 2/2" in last
    assert "input wait" not in last


@pytest.mark.usefixtures("clock")
def test_a_short_epoch_and_one_that_waits_little_say_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with warnings.catch_warnings(action="error"):
        make_trainer(1, seconds=60.0).fit(rows(), batch_size=8, verbose=0)
        monkeypatch.setattr(input_wait, "_SHORTEST_SECONDS", 100.0)
        make_trainer(1).fit(rows(), batch_size=8, verbose=0)


@contextmanager
def waiting(clock: InputClock) -> Iterator[None]:
    began = vars(input_wait)["time"].perf_counter()
    yield
    clock.note_wait(began)


def test_a_wait_counts_for_as_long_as_it_takes() -> None:
    clock = InputClock()
    clock.begin()
    clock._began -= 10_000
    with waiting(clock):
        time.sleep(0.01)
    clock.end_step()
    clock.end_epoch()
    assert 0 < clock.share < 0.01


@pytest.mark.usefixtures("clock")
def test_what_comes_after_the_last_step_does_not_count() -> None:
    clock = InputClock()
    for waited, worked in ((1.0, 2.0), (2.0, 1.0)) * 4:
        with waiting(clock):
            spend(waited)
        spend(worked)
        clock.end_step()
    spend(500)  # validation
    assert clock.share == 0.5
    with pytest.warns(lockstep.InputBoundWarning, match=r"50% of the time: 12.0 s of 24.0 s"):
        clock.end_epoch()
    clock.begin()
    assert clock.share == 0.0


@pytest.mark.usefixtures("clock")
def test_one_long_wait_is_no_reason_to_warn() -> None:
    """Reading ahead would not help where a file is opened, or the machine was held up."""
    clock = InputClock()
    for waited in (20.0, 1.0, 1.0, 1.0):
        with waiting(clock):
            spend(waited)
        spend(3.0)
        clock.end_step()
    with warnings.catch_warnings(action="error"):
        clock.end_epoch()
    assert clock.share > 0.5


@pytest.mark.usefixtures("clock")
def test_a_warning_that_is_an_error_ends_training() -> None:
    with (
        warnings.catch_warnings(action="error"),
        pytest.raises(lockstep.InputBoundWarning, match="waited for its data"),
    ):
        make_trainer(2, seconds=0.5).fit(rows(), batch_size=4, verbose=0)
