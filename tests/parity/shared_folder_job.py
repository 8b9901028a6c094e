"""A divided training with checkpoints on several hosts, one process each, that counts its traffic.

Arguments: a folder, which is the host's own if it ends in a slash; the number of epochs.
"""

import sys
from functools import partial
from typing import Any

import torch
from torch import nn

import lockstep
from lockstep.checkpoint import parted_files
from lockstep.train.checkpointing.training_state import TrainingState
from tests.launching import be_strict

INPUTS = torch.randn(24, 12, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randint(0, 5, (24,), generator=torch.Generator().manual_seed(2))


def make_model() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(12, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()),
        nn.Linear(64, 5),
    )


def make_trainer(strategy: lockstep.Strategy) -> lockstep.Trainer:
    torch.manual_seed(0)
    return lockstep.Trainer(
        make_model,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        strategy=strategy,
    )


def train(strategy: lockstep.Strategy, folder: str, epochs: int, **options: Any) -> str:
    """Train; returns the digest of what that comes to."""
    trainer = make_trainer(strategy)
    checkpoint = lockstep.Checkpoint(folder, every="1 steps")
    trainer.fit(
        (INPUTS, TARGETS), batch_size=12, epochs=epochs, checkpoint=checkpoint, verbose=0, **options
    )
    return TrainingState.of(trainer.state_dict()).digest()


def counted() -> list[int]:
    """Bytes that this process writes to files that several write, write by write."""
    found: list[int] = []
    write_at = parted_files._write_at

    def counting(descriptor: int, data: Any, start: int) -> None:
        found.append(len(data))
        write_at(descriptor, data, start)

    parted_files._write_at = counting
    return found


if __name__ == "__main__":
    import json
    import os

    be_strict()
    folder, epochs = sys.argv[1], int(sys.argv[2])
    if folder.endswith("/"):
        folder += json.loads(os.environ["TF_CONFIG"])["task"]["index"].__str__()
    written = counted()
    digest = train(lockstep.FullyShardedStrategy(timeout_seconds=120), folder, epochs)
    sys.stdout.write(json.dumps({"digest": digest, "written": sum(written)}) + "\n")
    sys.stdout.flush()
