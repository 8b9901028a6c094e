"""``lockstep demo``: it trains, proves, and says what it needs."""

import sys

import pytest

from lockstep.cli.main import main


def test_it_trains_and_proves(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--epochs", "1"]) == 0
    out = capsys.readouterr().out
    assert "Training on 2 devices" in out
    assert "Passed: the same" in out


def test_without_the_digits_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["demo"]) == 2
    told = capsys.readouterr().err
    assert 'Run `pip install ".[demo]"` in a clone of Lockstep, or use --mnist FOLDER.' in told
