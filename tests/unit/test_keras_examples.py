"""Every program in ``examples/keras`` runs as it stands, on small real data."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "keras"
PROGRAMS = sorted(path.name for path in FOLDER.glob("*.py") if path.name != "digits.py")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PROGRAMS)
def test_example(name: str) -> None:
    kept = {key: value for key, value in os.environ.items() if key != "KERAS_BACKEND"}
    done = subprocess.run(
        [sys.executable, FOLDER / name],
        env={**kept, "PYTHONPATH": str(FOLDER.parents[1]), "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"


def test_there_are_examples() -> None:
    assert len(PROGRAMS) >= 7
