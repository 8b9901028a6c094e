"""A divided training with checkpoints on several hosts, one process each, that counts its traffic.

Arguments: a folder, which is the host's own if it ends in a slash; the number of epochs.
"""

import json
import os
import sys
from functools import partial
from typing import Any

import torch
from torch import nn

import lockstep
from lockstep.checkpoint import part_reader, partitioned_files
from lockstep.checkpoint.weights import WeightsReader
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


def trained(
    strategy: lockstep.Strategy, folder: str, epochs: int, **options: Any
) -> lockstep.Trainer:
    trainer = make_trainer(strategy)
    checkpoint = lockstep.Checkpoint(folder, every="1 steps")
    trainer.fit(
        (INPUTS, TARGETS), batch_size=12, epochs=epochs, checkpoint=checkpoint, verbose=0, **options
    )
    return trainer


def train(strategy: lockstep.Strategy, folder: str, epochs: int, **options: Any) -> str:
    """Train; returns the digest of what that comes to."""
    return digest_of(trained(strategy, folder, epochs, **options))


def digest_of(trainer: lockstep.Trainer) -> str:
    return TrainingState.of(trainer.state_dict()).digest()


def save_and_load(trainer: lockstep.Trainer, path: str) -> None:
    """Weights are changed in between."""
    trainer.save(path)
    with torch.no_grad():
        for one in trainer.model.state_dict().values():
            one.zero_()
    trainer.load(path)


def count_traffic() -> tuple[list[int], list[int], list[int]]:
    """Bytes of files that several processes write and read, time by time.

    Those that this process writes, those that it reads of checkpoints, and of weights.
    """
    written: list[int] = []
    read: list[int] = []
    loaded: list[int] = []
    close = WeightsReader.close

    def closing(reader: WeightsReader) -> None:
        loaded.append(reader.num_bytes)
        close(reader)

    write_at, span_of = partitioned_files._write_at, part_reader._File._span

    def writing(descriptor: int, data: Any, start: int) -> None:
        written.append(len(data))
        write_at(descriptor, data, start)

    def reading(file: Any, index: int) -> memoryview:
        found = span_of(file, index)
        read.append(len(found))
        return found

    partitioned_files._write_at = writing
    part_reader._File._span = reading  # type: ignore[method-assign,assignment]
    WeightsReader.close = closing  # type: ignore[method-assign,assignment]
    return written, read, loaded


if __name__ == "__main__":
    be_strict()
    folder, epochs = sys.argv[1], int(sys.argv[2])
    if folder.endswith("/"):
        folder += str(json.loads(os.environ["TF_CONFIG"])["task"]["index"])
    written, read, loaded = count_traffic()
    trainer = trained(lockstep.FullyShardedStrategy(timeout_seconds=120), folder, epochs)
    told = {"digest": digest_of(trainer), "written": sum(written), "read": sum(read)}
    save_and_load(trainer, f"{folder}/weights")
    told |= {"loaded": sum(loaded), "same": digest_of(trainer) == told["digest"]}
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
