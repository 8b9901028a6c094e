"""Keras models on several hosts: the weights of plain Keras on one device, on all hosts alike."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launchers import by_standalone_torchrun, lines_of_all, on_loopback
from tests.launching import CALM
from tests.netns import HostProcess
from tests.parity.keras_host_jobs import JOBS
from tests.thorough import core_of, wanted

pytestmark = pytest.mark.thorough

SECONDS = 400.0
# TensorFlow, which Keras imports, says what it finds; some of it, whatever it is told.
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}
NOISE = ("WARNING: All log messages before absl", "I0000 ")
CORE = (
    *("sequential", "batch normalization", "loader", "pipeline", "own loss", "own step"),
    "servers",
)
FOLLOWED = ["sequential", "images", "loader", "stopping early", "meddler", "pipeline"]

Told = dict[str, Any]


def told_by(process: HostProcess, timeout_seconds: float) -> list[Any]:
    """All that a script has told; it must come to a good end, and have nothing to complain of."""
    status, out, err = process.finish(timeout_seconds)
    complaints = [line for line in err.splitlines() if not line.startswith(NOISE)]
    assert (status, complaints) == (0, [])
    return [json.loads(line) for line in out.splitlines()]


@pytest.fixture(scope="module")
def two_hosts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[dict[str, Told]]]:
    """By host, what it tells of each job."""
    folder = str(tmp_path_factory.mktemp("jobs"))
    script = ["-m", "tests.parity.keras_host_jobs", folder, *wanted(request, "name")]
    with on_loopback(script, variables=QUIET, like="keras") as processes:
        told = lines_of_all(processes, SECONDS, told_by)
        yield [{line["job"]: line for line in each} for each in told]


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> list[Told]:
    """What the processes of one host tell, that torchrun has started."""
    folder = str(tmp_path_factory.mktemp("followed"))
    script = ["-m", "tests.parity.keras_host_jobs", folder, *FOLLOWED]
    return by_standalone_torchrun(script, SECONDS, like="keras")


def assert_alike(told: list[Told]) -> None:
    """All have come to the same, and one of them to what plain Keras comes to."""
    assert len(told) == 2
    for each in told:
        assert "error" not in each, each["error"]
    assert told[0]["digest"] == told[1]["digest"]
    (compared,) = (each for each in told if "weights" in each)
    assert compared["weights"] < 1e-12
    assert compared["slots"] < 1e-9
    assert {part: gap for part, gap in compared["values"].items() if not gap < 1e-6} == {}


@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", core_of(JOBS, CORE))
def test_two_hosts_train_as_plain_keras(name: str, two_hosts: list[dict[str, Told]]) -> None:
    ours = [host[name] for host in two_hosts]
    assert_alike(ours)
    assert ours[0]["digest of slots"] == ours[1]["digest of slots"]


# The tasks of a TF_CONFIG with a server on a host of its own.
SERVED = """
import json, sys, warnings
from tests.launching import be_strict
import lockstep
from tests import keras_zoo as zoo
from tests.parity.keras_host_jobs import OPTIONS, X, Y, digest

be_strict()
warnings.filterwarnings("ignore", "__array__ implementation")  # Keras's
with zoo.true_float64():
    plain = zoo.compiled(zoo.sequential)
    staleness = json.loads(sys.argv[1])
    with lockstep.ParameterServerStrategy(staleness=staleness, timeout_seconds=180).scope():
        model = zoo.compiled(zoo.sequential)
    history = model.fit(X, Y, **OPTIONS | {"epochs": 4}).history
    plain.fit(X, Y, **OPTIONS | {"epochs": 4})
    gap, steps = zoo.distance(plain, model), int(model.optimizer.iterations)
    print(json.dumps([digest(model.get_weights()), gap, steps, history]))
"""


@pytest.mark.timeout(500)
@pytest.mark.parametrize("staleness", core_of([0, 2], [2], []))
def test_tasks_with_a_server_train_a_keras_model(staleness: int, tmp_path: Path) -> None:
    script = tmp_path / "served.py"
    script.write_text(SERVED)
    roles = {"chief": [0], "worker": [1], "ps": [2]}
    with on_loopback(
        [str(script), str(staleness)], roles=roles, variables=QUIET, like="keras"
    ) as processes:
        (first,), *others = lines_of_all(processes, SECONDS, told_by)
    _, gap, num_steps, history = first
    assert others == [[first]] * 2
    assert num_steps == 4 * 4
    assert gap < 1e-12 or staleness
    assert max(history.get("staleness", [0])) <= staleness
    assert history["loss"][-1] < 0.95 * history["loss"][0]


QUARREL = """
import json, os
import lockstep
import keras
import numpy as np

host = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")

class Drop(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.layers[-1].rate = 0.5

def said(activation="relu", loss="mse", seed=0, callbacks=()):
    with lockstep.MultiWorkerMirroredStrategy(timeout_seconds=180).scope():
        keras.backend.clear_session()
        keras.utils.set_random_seed(seed)
        layers = keras.layers.Dense(1, activation), keras.layers.Dropout(0.1)
        model = keras.Sequential([keras.Input((3,)), *layers])
        model.compile("sgd", loss)
    try:
        model.fit(x, y, epochs=2, callbacks=list(callbacks), verbose=0)
    except lockstep.LockstepError as error:
        return str(error)
    return "trained"

print(json.dumps([
    said(activation=["relu", "tanh"][host]),
    said(loss=["mse", "mae"][host]),
    said(seed=host),
    said(callbacks=[Drop()]),
    said(),
]))
"""


@pytest.mark.thorough
@pytest.mark.timeout(500)
def test_what_hosts_do_not_have_alike_is_named(tmp_path: Path) -> None:
    script = tmp_path / "quarrel.py"
    script.write_text(QUARREL)
    with on_loopback([str(script)], options=CALM, variables=QUIET, like="keras") as processes:
        for (told,) in lines_of_all(processes, SECONDS, told_by):
            activation, loss, seed, changed, alike = told
            assert "`activation` of the layer" in activation
            assert "relu on Host 0" in activation
            assert "tanh on Host 1" in activation
            assert "the loss of compile" in loss
            assert "`seed`" in seed
            assert "`rate` of the layer" in changed  # by the chief's callback
            assert alike == "trained"


@pytest.mark.exhaustive
@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", FOLLOWED)
def test_processes_of_torchrun(name: str, two_processes: list[Told]) -> None:
    """Each is one device, and all have the result."""
    assert_alike([told for told in two_processes if told["job"] == name])
