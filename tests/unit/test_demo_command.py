"""``lockstep demo`` as typed: what cannot be is told in one line, before anything is trained."""

import pytest

from lockstep.cli import demo
from lockstep.cli.main import main

MISTAKES = {
    "no epochs": (
        ["--epochs", "0"],
        "`epochs` must be an integer of at least 1",
    ),
    "fewer": (["--epochs", "-3"], "Received: epochs=-3"),
    "no devices": (["--devices", "0"], "Received: devices=0"),
    "fewer devices": (["--devices", "-1"], "Received: devices=-1"),
    "too many devices": (["--devices", "99999"], "Received: devices=99999"),
    "nowhere": (["--mnist", "/no/such/folder"], "/no/such/folder, which does not exist"),
    "no folder": (["--mnist", "", "--epochs", "0"], "Received: epochs=0"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_take_one_line(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "_Side", None)  # not called
    options, message = MISTAKES[name]
    assert main(["demo", *options]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert len(shown.err.strip().splitlines()) == 1
    assert shown.out == ""


@pytest.mark.parametrize("options", [["--epochs", "one"], ["--epochs", "1.5"], ["--devices", ""]])
def test_what_is_no_number_is_told_by_the_parser(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["demo", *options])
    assert f"argument {options[0]}: invalid int value" in capsys.readouterr().err


def test_one_device_trains_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--devices", "1", "--epochs", "1"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("Training on") == shown.count("Epoch 1/1") == 1
    assert "1 devices" not in shown
    assert "Passed, but nothing was divided" in shown
