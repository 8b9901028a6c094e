"""The tests of ``tests/devices`` on a stand-in for two accelerators, wherever there is a compiler.

They have a process of their own: in this one, devices that are not named are cores.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stand_ins.accelerator import standin
from tests.thorough import CORE

ROOT = Path(__file__).parents[2]
STAND_IN = ROOT / "tests" / "stand_ins" / "accelerator"
# Names of tests there that `make test` runs, too.
QUICK = "second_fit or moved or gpt_tied-mirrored-2 or gpt_tied-sharded-2 or gpt_tied-pipeline-2"
# And those that CI does not run: others show the same on devices, or these do on cores.
DEAR = (
    "loop_of_keras or gpt_tied-sharded-3 or gpt_tied-mirrored-4 or data-2-tensor-2 or zb-h1 or lstm"
    " or (not_depend_on and not cnn_dropout) or two-sgd or Adafactor-parameters"
    " or bf16-parameters or unknown-parameters or 2-Recomputed or 2-perceptron"
    " or hybrid-2x2 or one-sgd or Muon-replicas or (what_is_away and False) or unet"
    " or gpt_tied-mirrored-1-shares or (go_on_from_a_file and start) or ASGD or NAdam"
    " or cnn_batch_norm-mirrored-2 or mixed-pipeline or (its_part and slots)"
    " or cnn_batch_norm-sharded-2 or gpt_tied-sharded-2-slots or gpt_tied-hybrid or two-adam"
    " or accumulation-1-parameters or Patchy or wherever_their_slots_are"
)


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    if not standin.has_compiler():
        pytest.skip("no g++, which builds the stand-in")
    standin.library()


def run_with_it(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a Python that has the stand-in, as all processes have that it starts."""
    path = os.pathsep.join(map(str, (STAND_IN, ROOT)))
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )


def test_what_is_tested_on_accelerators(pytestconfig: pytest.Config) -> None:
    """What is not marked ``thorough``: all takes twice as long."""
    run_chosen(QUICK if pytestconfig.option.markexpr == CORE else f"not ({DEAR})")


@pytest.mark.exhaustive
def test_what_is_dear_there() -> None:
    run_chosen(DEAR)


def run_chosen(chosen: str) -> None:
    options = ["-p", "no:cacheprovider", "-m", CORE, "-k", chosen]
    done = run_with_it("-m", "pytest", "tests/devices", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout), done.stdout
    assert not re.search(r"\d+ skipped", done.stdout), done.stdout


def test_nobody_else_touches_its_memory() -> None:
    touch = "import ctypes, torch; ctypes.string_at(torch.ones(3, device='standin').data_ptr())"
    assert run_with_it("-c", touch).returncode == -signal.SIGSEGV
