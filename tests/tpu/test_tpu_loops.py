"""Processes started by a launcher, each with a TPU, joined by way of host memory, in fp64."""

import subprocess
import sys
from pathlib import Path

from tests.launching import clean_environment, free_port
from tests.parity.loop_processes import ROOT, SCRIPT, assert_exact
from tests.tpu.limits import LIMIT_SECONDS

LOOPS = ("mlp", "embedding")


FIT = str(Path(__file__).with_name("launched_fit.py"))


def run_on_two(*words: str) -> list[str]:
    """What two processes say; the runtime of torch_tpu writes to standard error."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    shared |= {"LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"}
    processes = [
        subprocess.Popen(
            [sys.executable, *words],
            env={**clean_environment(), **shared, "RANK": rank, "LOCAL_RANK": rank},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in ("0", "1")
    ]
    try:
        return [process.communicate(timeout=LIMIT_SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


def test_loops_of_ones_own_equal_one_device() -> None:
    assert_exact(run_on_two(SCRIPT, "gloo@tpu", *LOOPS), LOOPS)


def test_a_fit_equals_one_device() -> None:
    assert_exact(run_on_two(FIT), ["fit"])
