"""The clock of the input: what it counts, when it warns, and what the progress line shows."""

import time
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.data import prefetch
from lockstep.train import waiting
from lockstep.train.waiting import InputClock
from tests.map_datasets import Rows


class Slow(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.seconds = seconds

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        output: torch.Tensor = self.layer(rows)
        return output


def make_trainer(devices: int, seconds: float = 0.0) -> lockstep.Trainer:
    return lockstep.Trainer(
        Slow(seconds),
        loss=nn.MSELoss(),
        optimizer=torch.optim.SGD,
        strategy=lockstep.MirroredStrategy(devices),
    )


def rows(seconds: float) -> Rows:
    return Rows(torch.rand(16, 3), torch.rand(16, 1), seconds=seconds)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_SHORTEST_SECONDS", 0.05)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("devices", [1, 2])
def test_an_epoch_that_waits_is_told_once_and_at_the_users_line(
    devices: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.warns(lockstep.InputBoundWarning) as caught:
        make_trainer(devices).fit(rows(0.01), batch_size=4, epochs=3)
    (warning,) = caught
    message = str(warning.message)
    assert warning.filename == __file__
    assert "Training waited for its data" in message
    for cure in ("lockstep.data.prefetch", "lockstep.data.cache", "DataLoader"):
        assert cure in message
    lines = capsys.readouterr().out.splitlines()
    assert all("input wait " in line for line in lines)
    shown = int(lines[-1].partition("input wait ")[2].partition("%")[0])
    assert 50 <= shown <= 100


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_read_ahead_is_not_waited_for(
    workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    ahead = prefetch(rows(0.002), workers=workers)
    trainer = make_trainer(1, seconds=0.15)  # so that a busy machine reads in time, too
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lockstep.InputBoundWarning)
        trainer.fit(ahead, batch_size=2, epochs=2)
    last = capsys.readouterr().out.splitlines()[-1]
    assert "Epoch 2/2" in last
    assert "input wait" not in last


def test_a_short_epoch_and_one_that_waits_little_say_nothing() -> None:
    make_trainer(1).fit(rows(0.005), batch_size=8, verbose=0)
    clock = InputClock()
    clock.begin()
    clock._began -= 100
    with clock.waiting():
        time.sleep(0.01)
    clock.end_step()
    clock.end_epoch()
    assert 0 < clock.share < 0.01


def test_what_comes_after_the_last_step_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = InputClock()
    for waited, worked in ((1.0, 2.0), (2.0, 1.0)):
        with clock.waiting():
            now[0] += waited
        now[0] += worked
        clock.end_step()
    now[0] += 50  # validation
    assert clock.share == 0.5
    with pytest.warns(lockstep.InputBoundWarning, match=r"50% of the time: 3.0 s of 6.0 s"):
        clock.end_epoch()
    clock.begin()
    assert clock.share == 0.0


def test_a_warning_that_is_an_error_ends_training(short: Any) -> None:
    with (
        warnings.catch_warnings(action="error"),
        pytest.raises(lockstep.InputBoundWarning, match="waited for its data"),
    ):
        make_trainer(2).fit(rows(0.01), batch_size=4, verbose=0)
