"""Every program in ``examples/keras`` runs as it stands, on small real data."""

from pathlib import Path

import pytest

from tests.launchers import run_script
from tests.pages import imports_lockstep_first

FOLDER = Path(__file__).parents[2] / "examples" / "keras"
PROGRAMS = sorted(path.name for path in FOLDER.glob("*.py") if path.name != "digits.py")


@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PROGRAMS)
def test_example(name: str) -> None:
    text = (FOLDER / name).read_text()
    assert imports_lockstep_first(text)  # a warm interpreter has Keras
    own = {
        "KERAS_BACKEND": None,
        "PYTHONPATH": str(FOLDER.parents[1]),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    like = "keras" if "import keras" in text else "torch"
    run_script([FOLDER / name], Path.cwd(), own, like=like)


def test_there_are_examples() -> None:
    assert len(PROGRAMS) >= 7
