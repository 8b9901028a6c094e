"""Loops of one's own, under every launcher: what one device trains, to 1e-12 in float64.

One start trains all of a row's loops, since starting takes longer than training.
"""

import json
from pathlib import Path

import pytest

from tests.launchers import on_loopback, run_script
from tests.launching import STRICT, STRICT_BUT_KERAS
from tests.parity import keras_loop
from tests.parity.loop_processes import (
    KERAS_SCRIPT,
    SCRIPT,
    SECONDS,
    assert_exact,
    run_as_torchrun,
)
from tests.parity.own_loop import LOOPS
from tests.thorough import core_of

ROOT = Path(__file__).parents[2]
FEW = ("mlp, clipped", "mlp, held", "embedding", "wide")

LAYOUTS = {
    "2 of torchrun": (2, "shared", tuple(LOOPS)),
    "3 of torchrun": (3, "shared", tuple(LOOPS)),
    "2 over gloo": (2, "gloo", FEW),
    "3 over gloo": (3, "gloo", tuple(LOOPS)),
}
KERAS_FEW = ("mlp, Adam", "mlp, Muon", "mlp, averaged", "words", "cnn")
# Their optimizers keep their slots as Adam's or SGD's, or another model has the like.
KERAS_LIKE = (
    *("mlp, AdamW", "mlp, RMSprop", "mlp, Adagrad", "mlp, Nadam", "mlp, decayed", "cnn, Adam"),
    "words, Adagrad",
)
KERAS_LAYOUTS = {
    "2 of torchrun": (2, "shared", tuple(k for k in keras_loop.LOOPS if k not in KERAS_LIKE)),
    "3 of torchrun": (3, "shared", tuple(keras_loop.LOOPS)),
    "2 over gloo": (2, "gloo", KERAS_FEW),
    "3 over gloo": (3, "gloo", tuple(keras_loop.LOOPS)),
}


@pytest.mark.parametrize("layout", core_of(LAYOUTS, ("2 of torchrun", "2 over gloo")))
def test_replicas_train_what_one_device_trains(layout: str) -> None:
    count, engine, loops = LAYOUTS[layout]
    assert_exact(run_as_torchrun([*STRICT, SCRIPT, engine, *loops], count), loops)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", core_of(KERAS_LAYOUTS, ["2 of torchrun"], []))
def test_replicas_of_a_keras_loop_train_what_one_device_trains(layout: str) -> None:
    count, engine, loops = KERAS_LAYOUTS[layout]
    words = [*STRICT_BUT_KERAS, KERAS_SCRIPT, engine, *loops]
    assert_exact(run_as_torchrun(words, count, like="keras"), loops)


@pytest.mark.parametrize(
    "num_hosts", [pytest.param(2), pytest.param(3, marks=pytest.mark.thorough)]
)
def test_replicas_on_several_hosts_train_what_one_device_trains(num_hosts: int) -> None:
    with on_loopback([SCRIPT, "shared", *FEW], num_hosts=num_hosts, options=STRICT) as processes:
        assert_exact([each.check(SECONDS) for each in processes], FEW)


@pytest.mark.thorough
def test_two_hosts_of_two_replicas_train_what_one_device_trains() -> None:
    assert_exact(run_as_torchrun([*STRICT, SCRIPT, "shared", *FEW], 4, num_hosts=2), FEW)


@pytest.mark.thorough
def test_replicas_of_a_keras_loop_on_several_hosts() -> None:
    script = [KERAS_SCRIPT, "shared", *KERAS_FEW]
    with on_loopback(script, num_hosts=2, options=STRICT_BUT_KERAS, like="keras") as processes:
        assert_exact([each.check(SECONDS) for each in processes], KERAS_FEW)


@pytest.mark.exhaustive
def test_lockstep_run_starts_replicas(tmp_path: Path) -> None:
    words = ["-m", "lockstep", "run", "--processes", "2", SCRIPT, "shared", "mlp, clipped"]
    said = run_script(words, tmp_path, {"PYTHONPATH": str(ROOT)})
    lines = [line.removeprefix("[process 1] ") for line in said.splitlines()]
    assert sorted(json.loads(line)["rank"] for line in lines) == [0, 1]
    assert_exact(lines, ["mlp, clipped"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("engine", ["shared", "gloo"])
def test_a_state_is_changed_by_loading_it(engine: str) -> None:
    """What is written to ``optimizer.state`` would be lost."""
    script = SCRIPT.replace("own_loop", "own_loop_state")
    for said in run_as_torchrun([*STRICT, script, engine], 2):
        assert "give it to load_state_dict()" in said, said
