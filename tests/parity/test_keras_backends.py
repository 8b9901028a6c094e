"""Keras beside TensorFlow and JAX, each in processes of their own."""

from pathlib import Path

import pytest

from tests.launchers import run_script

pytestmark = pytest.mark.thorough

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
STRATEGIES = ("hybrid", "mirrored", "pipeline")


def run(script: str, *arguments: Path, like: str | None, **environment: str) -> list[str]:
    """A script's lines."""
    own = {"KERAS_BACKEND": None, "PYTHONPATH": str(REPOSITORY), **environment}
    return run_script([HERE / script, *arguments], REPOSITORY, own, like=like).splitlines()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A folder of models trained under strategies, and what was found meanwhile."""
    folder = tmp_path_factory.mktemp("models")
    return folder, run("keras_tensorflow.py", folder, like="keras")


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
def test_data_of_tensorflow(trained: tuple[Path, list[str]]) -> None:
    said = [f"once {name} same" for name in ("mirrored", "pipeline", "hybrid")]
    assert trained[1] == [*said, "repeated mirrored same", "weighted mirrored same"]


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_files_load_on_other_backends(trained: tuple[Path, list[str]], backend: str) -> None:
    found = run("keras_loading.py", trained[0], like=None, KERAS_BACKEND=backend)
    assert found == [f"{backend} {name} same" for name in STRATEGIES]


SCOPE = """
import sys
{first}
import lockstep
try:
    with lockstep.SingleDeviceStrategy().scope():
        {inside}
except lockstep.LockstepError as error:
    sys.stdout.write(str(error))
"""


@pytest.mark.parametrize(
    ("first", "inside"),
    [
        pytest.param("import keras", "pass", id="before"),
        pytest.param("", "import keras", id="within", marks=pytest.mark.exhaustive),
    ],
)
def test_another_backend(tmp_path: Path, first: str, inside: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCOPE.format(first=first, inside=inside))
    (said,) = run(str(script), like="torch", KERAS_BACKEND="jax")
    assert "'jax'" in said
    assert 'import os; os.environ["KERAS_BACKEND"] = "torch"' in said


@pytest.mark.exhaustive
def test_keras_imported_in_a_scope(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        """
import sys
import lockstep
with lockstep.MirroredStrategy(devices=2).scope():
    import keras
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
import numpy as np
model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
sys.stdout.write(model.fit.__func__.__module__)
assert keras.Model.fit.__module__.startswith("keras.")
"""
    )
    assert run(str(script), like=None) == ["lockstep.frontends.keras.methods"]
