"""A script with checkpoints is killed, again and again: in the end nothing is lost."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from lockstep.checkpoint.generations import generations
from tests import warm
from tests.faults.processes import num_kills, wait_until
from tests.thorough import core_of

JOB = """
import json, sys, time
from functools import partial
import torch
from torch import nn
import lockstep
from lockstep.train.training_state import TrainingState

class Slow(lockstep.Callback):
    is_observer = True

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.01)

torch.manual_seed(0)
x = torch.randn(60, 6)
trainer = lockstep.Trainer(
    nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.BatchNorm1d(16), nn.Linear(16, 3)),
    loss=nn.CrossEntropyLoss(),
    optimizer=partial(torch.optim.Adam, lr=1e-2),
    strategy=None if sys.argv[2] == "1" else lockstep.MirroredStrategy(int(sys.argv[2])),
    callbacks=[Slow()],
)
history = trainer.fit(
    (x, (x[:, 0] > 0).long()), epochs=int(sys.argv[3]), batch_size=12, verbose=0,
    checkpoint=lockstep.Checkpoint(sys.argv[1], every="3 steps", keep=2),
)
print(json.dumps([TrainingState.of(trainer.state_dict()).digest(), history.history]))
"""
NUM_KILLS = num_kills(2)


@pytest.mark.parametrize(
    ("kills", "devices"),
    core_of([(NUM_KILLS, 1), (NUM_KILLS, 2), (10, 2)], [(NUM_KILLS, 2)]),
)
def test_a_script_is_killed_at_any_moment(kills: int, devices: int, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    epochs = 10 * kills  # of which none takes less than 50 ms
    expected = finished(tmp_path, "whole", devices, epochs)
    chance = random.Random(devices)
    for _ in range(kills):
        kill(tmp_path, devices, epochs, chance.uniform(0, 0.4))
    assert finished(tmp_path, "killed", devices, epochs) == expected


def kill(folder: Path, devices: int, epochs: int, seconds: float) -> None:
    """Start the script, and kill it so long after its first checkpoint of this attempt."""
    before = generations(folder / "killed")[-1:]
    process = started(folder, "killed", devices, epochs)
    wait_until(lambda: generations(folder / "killed")[-1:] != before, 60)
    time.sleep(seconds)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL


def finished(folder: Path, run: str, devices: int, epochs: int) -> object:
    """What the script says at its end."""
    process = started(folder, run, devices, epochs)
    assert process.wait(120) == 0, (folder / "err").read_text()
    return json.loads((folder / "out").read_text())


def started(folder: Path, run: str, devices: int, epochs: int) -> warm.Process:
    order = warm.Order(
        words=["-W", "error", *map(str, (folder / "job.py", folder / run, devices, epochs))],
        environment={**os.environ, **warm.VARIABLES},
        directory=str(folder),
    )
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        return warm.start("torch", order, out.fileno(), err.fileno())
