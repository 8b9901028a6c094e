"""A job with checkpoints, on one host or several.

Arguments: what to do, the strategy, how often to write, and a folder. ``whole`` trains to the end;
``end`` to an error in the midst; ``go on`` from there; ``all`` does these in folders of their own.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

import lockstep
from lockstep.train.checkpointing.training_state import TrainingState
from tests.launching import be_strict

GENERATOR = torch.Generator().manual_seed(5)
X = torch.randn(57, 6, generator=GENERATOR)
Y = torch.randint(3, (57,), generator=GENERATOR)
FAILING_STEP = 8  # of 15, counted from 1

STRATEGIES: dict[str, Any] = {
    "pipeline": partial(lockstep.PipelineStrategy, 2, cuts=["3"], microbatches=3),
    "hybrid": partial(lockstep.HybridStrategy, data=2, pipe=2, cuts=["3"], microbatches=2),
    "uneven": partial(lockstep.HybridStrategy, (3, 1), cuts=["3"], microbatches=2),
    "sharded replicas": partial(lockstep.HybridStrategy, 2, shard=2, num_shares=6),
    "mirrored": partial(lockstep.MultiWorkerMirroredStrategy, num_shares=2),
}


class Counting(lockstep.Callback):
    """Counts steps, and fails at one; looks at all weights at the end of an epoch."""

    model: nn.Module

    def __init__(self, failing: int | None) -> None:
        self.num_steps = 0
        self.seen: list[float] = []
        self._failing = failing

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.num_steps += 1
        if self.num_steps == self._failing:
            raise ZeroDivisionError

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen.append(sum(one.double().sum().item() for one in self.model.parameters()))


def make_model() -> nn.Module:
    first = [nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3)]
    return nn.Sequential(*first, nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))


def train(strategy: str, every: str, folder: str, failing: int | None = None) -> dict[str, Any]:
    counting = Counting(failing)
    torch.manual_seed(0)
    trainer = lockstep.Trainer(
        make_model(),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        schedule=partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5),
        strategy=STRATEGIES[strategy](timeout_seconds=120),
        callbacks=[lockstep.callbacks.EarlyStopping("loss", patience=9), counting],
    )
    history = trainer.fit(
        (X, Y),
        epochs=3,
        batch_size=12,
        validation_data=(X[:20], Y[:20]),
        verbose=0,
        checkpoint=lockstep.Checkpoint(folder, every=every),
    )
    digest = TrainingState.of(trainer.state_dict()).digest()
    trainer.close()
    return {
        "digest": digest,
        "num_steps": trainer.same_everywhere(counting.num_steps),
        "history": history.history,
        "seen": trainer.same_everywhere(counting.seen),
    }


def run(what: str, strategy: str, every: str, folder: str) -> Iterator[dict[str, Any]]:
    if what == "all":
        yield from run("whole", strategy, every, f"{folder}-whole")
        yield from run("end", strategy, every, folder)
        if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0:
            shutil.copytree(folder, f"{folder}-ended")
        what = "go on"
    if what == "end":
        try:
            train(strategy, every, folder, FAILING_STEP)
        except ZeroDivisionError:
            return
        raise AssertionError("no step was made at which to fail")
    yield train(strategy, every, folder)


if __name__ == "__main__":
    be_strict()
    for told in run(*sys.argv[1:]):
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()
