"""A script with checkpoints is killed, again and again: in the end nothing is lost."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from lockstep.checkpoint.generations import generations
from lockstep.checkpoint.reading import read_newest
from tests import warm
from tests.faults.processes import descendants, num_kills, wait_until
from tests.thorough import core_of

JOB = """
import json, sys, time
from functools import partial
import torch
from torch import nn
import lockstep
from lockstep.train.checkpointing.training_state import TrainingState

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
    checkpoint=lockstep.Checkpoint(sys.argv[1], every=sys.argv[4], keep=2),
)
print(json.dumps([TrainingState.of(trainer.state_dict()).digest(), history.history]))
"""

KERAS_JOB = """
import json, sys, time
import lockstep
import keras
import numpy as np
from lockstep.train.checkpointing.training_state import TrainingState

class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.01)

keras.utils.set_random_seed(0)
x = np.random.default_rng(0).normal(size=(60, 6)).astype("float32")
devices = int(sys.argv[2])
with lockstep.MirroredStrategy(devices).scope():
    stack = [keras.layers.Dense(16), keras.layers.Dropout(0.3), keras.layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((6,)), *stack, keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
checkpoint = lockstep.keras.Checkpoint(sys.argv[1], every="3 steps", keep=2)
history = model.fit(
    x, (x[:, 0] > 0).astype("int64"), epochs=int(sys.argv[3]), batch_size=12, verbose=0,
    callbacks=[Slow(), checkpoint],
)
state = model._lockstep.trainer.state.take()
# Where warnings are errors, Keras leaves some values as tensors.
values = {name: [*map(float, each)] for name, each in history.history.items()}
print(json.dumps([state.digest(), values]))
"""
JOBS = {"torch": JOB, "keras": KERAS_JOB}
NUM_KILLS = num_kills(2)
CORE = [("torch", NUM_KILLS, 1), ("torch", NUM_KILLS, 2)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("library", "kills", "devices"),
    core_of([*CORE, ("keras", NUM_KILLS, 2)], CORE[1:], []),
)
def test_a_script_is_killed_at_any_moment(
    library: str, kills: int, devices: int, tmp_path: Path
) -> None:
    (tmp_path / "job.py").write_text(JOBS[library])
    epochs = 10 * kills  # of which none takes less than 50 ms
    expected = finished(tmp_path, library, "whole", devices, epochs)
    chance = random.Random(devices)
    for _ in range(kills):
        kill(tmp_path, library, devices, epochs, chance.uniform(0, 0.4))
    assert finished(tmp_path, library, "killed", devices, epochs) == expected


@pytest.mark.thorough
@pytest.mark.parametrize("devices", core_of([1, 2], [2], []))
def test_a_script_is_told_to_end(devices: int, tmp_path: Path) -> None:
    """By SIGTERM to all its processes: it writes what it has after the step, and leaves in 10 s."""
    (tmp_path / "job.py").write_text(JOBS["torch"])
    expected = finished(tmp_path, "torch", "whole", devices, 6, "epoch")
    process = started(tmp_path, "torch", "told", devices, 6, "epoch")
    wait_until(lambda: bool(generations(tmp_path / "told")), 60)
    before = newest_step(tmp_path / "told")
    others = descendants(process.pid)
    assert len(others) >= devices - 1
    for pid in (*others, process.pid):
        os.kill(pid, signal.SIGTERM)
    began = time.monotonic()
    assert process.wait(30) == 143
    assert time.monotonic() - began < 25  # on a busy machine; else 10 at most
    assert newest_step(tmp_path / "told") > before
    assert finished(tmp_path, "torch", "told", devices, 6, "epoch") == expected


def newest_step(folder: Path) -> int:
    """Steps made until the newest checkpoint."""
    found = read_newest(folder)
    assert found is not None
    return int(found.manifest.summary.step)


def kill(folder: Path, library: str, devices: int, epochs: int, seconds: float) -> None:
    """Start the script, and kill it so long after its first checkpoint of this attempt."""
    before = generations(folder / "killed")[-1:]
    process = started(folder, library, "killed", devices, epochs)
    wait_until(lambda: generations(folder / "killed")[-1:] != before, 60)
    time.sleep(seconds)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL


def finished(
    folder: Path, library: str, run: str, devices: int, epochs: int, every: str = "3 steps"
) -> object:
    """What the script says at its end."""
    process = started(folder, library, run, devices, epochs, every)
    assert process.wait(120) == 0, (folder / "err").read_text()
    return json.loads((folder / "out").read_text())


def started(
    folder: Path, library: str, run: str, devices: int, epochs: int, every: str = "3 steps"
) -> warm.Process:
    order = warm.Order(
        words=["-W", "error", *map(str, (folder / "job.py", folder / run, devices, epochs, every))],
        environment={**os.environ, **warm.VARIABLES},
        directory=str(folder),
    )
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        return warm.start(library, order, out.fileno(), err.fileno())
