"""``lockstep demo``: it trains, proves, and says what it needs."""

import os
import sys

import pytest

from lockstep.cli import demo
from lockstep.cli.main import main


@pytest.mark.thorough
def test_it_trains_in_turns_and_proves(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[demo._Side] = []
    genuine = demo._Side.train

    def train(side: demo._Side, epochs: int) -> None:
        turns.append(side)
        genuine(side, epochs)

    monkeypatch.setattr(demo._Side, "train", train)
    monkeypatch.setattr(demo, "busy_cores", lambda: float(os.cpu_count() or 1))
    assert main(["demo", "--epochs", "2"]) == 0
    out = capsys.readouterr().out
    assert turns == [*turns[:2], *turns[:2]]
    assert turns[0] is not turns[1]
    assert "Training on 2 devices" in out
    assert "samples/s (median of 2 rounds)" in out
    assert out.count("cores are busy with other work: the speeds mean nothing now.") == 2
    assert "Passed: the same" in out


@pytest.mark.parametrize(
    ("devices", "busy", "is_busy"),
    [(1, 0.0, False), (2, 0.2, False), (2, 0.3, True), (1, 1.1, False), (1, 1.3, True)],
)
def test_speeds_mean_nothing_where_the_devices_lack_cores(
    devices: int, busy: float, is_busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(demo, "usable_cores", lambda: 2)
    assert bool(demo._warning(devices, busy)) is is_busy
    assert not demo._warning(devices, None)  # another system, where nobody says


@pytest.mark.parametrize(
    ("epochs", "rounds"), [(1, [1]), (3, [1, 1, 1]), (7, [2, 2, 1, 1, 1]), (20, [4] * 5)]
)
def test_rounds_are_of_about_the_same_length(epochs: int, rounds: list[int]) -> None:
    assert demo._rounds(epochs) == rounds


def test_without_the_digits_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["demo"]) == 2
    told = capsys.readouterr().err
    assert 'Run `pip install ".[demo]"` in a clone of Lockstep, or use --mnist FOLDER.' in told
