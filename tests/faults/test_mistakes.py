"""Ordinary mistakes: a script's screen is short, without Lockstep's frames, and says what to do."""

import os
import re
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.faults.processes import TIMEOUT_SECONDS
from tests.launching import CALM
from tests.thorough import core_of

SCRIPT = Path(__file__).with_name("mistakes.py")
MOST_LINES = 25


def screens(layout: str, directory: Path) -> dict[str, list[str]]:
    """What the script shows, by mistake."""
    path = directory / "screens"
    environment = {**os.environ, **warm.VARIABLES, "PYTHONPATH": str(SCRIPT.parents[2])}
    order = warm.Order(
        words=[*CALM, str(SCRIPT), layout], environment=environment, directory=str(directory)
    )
    with path.open("wb") as file:
        process = warm.start("torch", order, file.fileno(), file.fileno())
        assert process.wait(TIMEOUT_SECONDS) == 0, path.read_text()
    parts = re.split(r"^=== (.*)\n", path.read_text(), flags=re.M)[1:]
    shown = [text.rstrip().splitlines() for text in parts[1::2]]
    return dict(zip(parts[::2], shown, strict=True))


@pytest.mark.parametrize("layout", core_of(["mirrored", "pipeline", "single"], ["mirrored"], []))
def test_the_screen_of_an_ordinary_mistake_is_short(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["mistakes.py", layout])
    from tests.faults.mistakes import MISTAKES  # it reads its arguments

    found = screens(layout, tmp_path)
    assert list(found) == list(MISTAKES)
    assert len(found) >= 30
    package = f'File "{SCRIPT.parents[2] / "lockstep"}'
    for name, lines in found.items():
        screen = "\n".join(lines)
        assert len(lines) <= MOST_LINES, (name, screen)
        said = [*lines[-3:], *(line for line in lines if line.startswith("lockstep.errors."))]
        assert MISTAKES[name][1] in "\n".join(said), (name, screen)
        assert package not in screen, (name, screen)
    assert found["Ctrl-C"][0] == "KeyboardInterrupt"
    assert len(found["Ctrl-C"]) == 2
