"""SIGTERM to every process of a job at once, as Slurm and Kubernetes send it."""

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint.generations import generations
from lockstep.checkpoint.reading import read_newest
from tests.faults.processes import marked, running, wait_until
from tests.launchers import run_script
from tests.launching import STRICT

STEPS = 40
SCRIPT = """
import json, sys, time
from functools import partial
import torch
from torch import nn
import lockstep
from lockstep.train.checkpointing.training_state import TrainingState

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 80
    def __getitem__(self, index):
        time.sleep(0.003)
        return torch.full((8,), index / 100), torch.tensor(index % 3)

torch.manual_seed(0)
trainer = lockstep.Trainer(
    nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 3)),
    loss=nn.CrossEntropyLoss(), optimizer=partial(torch.optim.Adam, lr=1e-2),
    strategy=lockstep.STRATEGY)
history = trainer.fit(
    lockstep.data.prefetch(Rows(), workers=1), epochs=4, batch_size=8, verbose=0,
    checkpoint=lockstep.Checkpoint(sys.argv[1], every="epoch"))
said = [TrainingState.of(trainer.state_dict()).digest(), history.history]
sys.stdout.write(json.dumps(said) + "\\n")
"""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("strategy", "launcher"),
    [
        pytest.param("MirroredStrategy(2)", [], marks=pytest.mark.exhaustive),
        ("MultiWorkerMirroredStrategy()", TORCHRUN),
    ],
    ids=["helpers", "torchrun"],
)
def test_all_processes_are_told_to_end(strategy: str, launcher: list[str], tmp_path: Path) -> None:
    expected = result_of("MirroredStrategy(2)", [], tmp_path, "whole")  # the same bits
    with started(strategy, launcher, tmp_path, "told") as script:
        wait_until(lambda: bool(generations(tmp_path / "told")), 60)
        before = step_of(tmp_path / "told")
        for pid in marked(script.mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        began = time.monotonic()
        status, _, err = script.finish()
        assert status == 143 or launcher, err  # torchrun has a status of its own
        assert time.monotonic() - began < 30  # on a busy machine; else 10 at most
        wait_until(lambda: not script.others(), 5, lambda: f"left: {script.others()}")
    assert before < step_of(tmp_path / "told") < STEPS
    assert result_of(strategy, launcher, tmp_path, "told") == expected


def started(strategy: str, launcher: list[str], folder: Path, run: str) -> Any:
    command = [*launcher, str(folder / "script.py"), str(folder / run)]
    return running(SCRIPT.replace("STRATEGY", strategy), directory=folder, command=command)


def result_of(strategy: str, launcher: list[str], folder: Path, run: str) -> object:
    """What the script comes to; what starts it is a fork of a warm interpreter."""
    (folder / "script.py").write_text(SCRIPT.replace("STRATEGY", strategy))
    words = [*STRICT, *launcher, str(folder / "script.py"), str(folder / run)]
    out = run_script(words, folder)
    return json.loads(next(line for line in out.splitlines() if line.startswith("[")))


def step_of(folder: Path) -> int:
    found = read_newest(folder)
    assert found is not None
    return int(found.manifest.summary.step)
