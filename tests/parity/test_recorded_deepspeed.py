"""``lockstep.record`` and ``compare`` on trainings of DeepSpeed; see ``recorded_deepspeed``.

DeepSpeed is none of the tests' own packages: ``make test-deepspeed`` installs it and runs these.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest

import lockstep
from tests.launchers import ROOT
from tests.parity.recorded_deepspeed import TRAININGS
from tests.parity.test_recorded_loops import record_all
from tests.thorough import wanted

pytestmark = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="deepspeed is not installed: run make test-deepspeed"
)
PROGRAM = ROOT / "tests" / "parity" / "recorded_deepspeed.py"

WEIGHT = "0.weight"
# Training and fault -> step, kind and tensor of the first difference, and its cause.
FAULTS = {
    # Whether the engine divides the loss: https://github.com/deepspeedai/DeepSpeed/issues/7439
    "stage 0:divided by hand": (0, "gradient", WEIGHT, "constant factor"),
    # https://github.com/huggingface/accelerate/pull/3880
    "stage 2:divided by hand": (0, "gradient", WEIGHT, "constant factor"),
    # What a loss is worth: https://github.com/deepspeedai/DeepSpeed/issues/1107
    "stage 0:times processes": (0, "gradient", WEIGHT, "constant factor"),
    "stage 0:no sampler": (0, "samples", "", "samples repeated"),
    "stage 1:batch of each": (0, "samples", "", "batch size"),
    "stage 1:all decay": (0, "option", "0.bias weight_decay", "weight decay"),
    "stage 1, adam:not clipped": (0, "gradient", WEIGHT, "clipping"),
}


@pytest.fixture(scope="module")
def records(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    record_all({PROGRAM: TRAININGS}, wanted(request, "name"), folder)
    return folder


@pytest.mark.parametrize("name", TRAININGS)
def test_a_right_run_agrees_with_one_process(name: str, records: Path) -> None:
    outcome = lockstep.compare(records / "of2" / name, records / "of1" / name)
    assert outcome.passed, outcome
    assert outcome.pairing.num_steps == 4
    kinds = {each.kind for each in outcome.pairing.differences}
    assert {"samples", "loss", "gradient", "parameter"} <= kinds
    assert ("slot" in kinds) == ("adam" in name)
    assert lockstep.compare(records / "of2" / name).passed


@pytest.mark.parametrize("name", ["stage 1", "stage 2"])
def test_every_stage_trains_as_stage_0_on_one_process(name: str, records: Path) -> None:
    outcome = lockstep.compare(records / "of2" / name, records / "of1" / "stage 0")
    assert outcome.passed, outcome


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name: str, records: Path) -> None:
    step, kind, tensor, cause = FAULTS[name]
    outcome = lockstep.compare(records / "of2" / name, records / "of1" / name.partition(":")[0])
    assert outcome.first is not None
    assert outcome.cause is not None
    found = outcome.first.step, outcome.first.kind, outcome.first.name, outcome.cause.kind
    assert found == (step, kind, tensor, cause), outcome
