"""Every program in ``examples/keras`` runs as it stands, on small real data."""

import os
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.netns import HostProcess
from tests.pages import imports_lockstep_first
from tests.thorough import core_of

FOLDER = Path(__file__).parents[2] / "examples" / "keras"
PROGRAMS = sorted(path.name for path in FOLDER.glob("*.py") if path.name != "digits.py")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", core_of(PROGRAMS, ["mirrored_mlp.py", "plain_pytorch.py"]))
def test_example(name: str) -> None:
    assert imports_lockstep_first((FOLDER / name).read_text())  # a warm interpreter has Keras
    kept = {key: value for key, value in os.environ.items() if key != "KERAS_BACKEND"}
    own = {"PYTHONPATH": str(FOLDER.parents[1]), "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment = {**kept, **warm.VARIABLES, **own}
    argv = [sys.executable, str(FOLDER / name)]
    process = HostProcess(argv, environment, Path.cwd(), like="keras")
    try:
        status, out, err = process.finish(280)
    finally:
        process.close()
    assert status == 0, f"{out[-2000:]}\n{err[-3000:]}"


def test_there_are_examples() -> None:
    assert len(PROGRAMS) >= 7
