"""Trainings with the faults of public reports, and as they should be.

``python recorded_reports.py FOLDER NAME...``, as in ``recorded_loops``: a name is a training, or
a training and a fault, and with one process a training is the reference, without the fault.
"""

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

import lockstep
from tests.parity.recorded_libraries import BATCH, STEPS, data, make_model, run_trainings


def wrapped() -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    model = DistributedDataParallel(make_model())
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(model: nn.Module, index: int, size: int, recorder: Any) -> torch.Tensor:
    """The loss of this rank's part of batch ``index``."""
    numbers = torch.arange(size)[dist.get_rank() :: dist.get_world_size()] + index * size
    x, y, _ = data()[numbers]
    loss = F.cross_entropy(model(x), y)
    recorder.batch(numbers)
    recorder.loss(loss, weight=len(x))
    return loss


def accumulation(path: Path, fault: str) -> None:
    """Gradients are summed over ranks in a window's first pass, and the others are added."""
    model, optimizer = wrapped()
    summing = 0 if fault == "summed in the first pass" else 2
    with lockstep.record(model, optimizer, path, steps=STEPS) as recorder:
        for index in range(3 * STEPS):
            with model.no_sync() if index % 3 != summing else contextlib.nullcontext():
                (loss_of(model, index, BATCH // 3, recorder) / 3).backward()
            if index % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()


def windows(path: Path, fault: str) -> None:
    """An epoch's last window has two batches of three."""
    model, optimizer = wrapped()
    count = 3 * STEPS - 1
    with lockstep.record(model, optimizer, path, steps=STEPS) as recorder:
        for index in range(count):
            own = 3 if fault == "divided by all" else min(3, count - index // 3 * 3)
            (loss_of(model, index, BATCH // 3, recorder) / own).backward()
            if index % 3 == 2 or index == count - 1:
                optimizer.step()
                optimizer.zero_grad()


def scaler(path: Path, fault: str) -> None:
    """A loss scale, and clipping."""
    model, optimizer = wrapped()
    scaling = torch.amp.GradScaler("cpu")
    with lockstep.record(model, optimizer, path, steps=STEPS) as recorder:
        for index in range(STEPS):
            scaling.scale(loss_of(model, index, BATCH, recorder)).backward()
            if fault != "clipped before unscaled":
                scaling.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaling.step(optimizer)
            scaling.update()
            optimizer.zero_grad()


def epochs(path: Path, fault: str) -> None:
    """Two epochs of two steps, shuffled."""
    model, optimizer = wrapped()
    part = Subset(data(), range(2 * BATCH))
    sampler: Any = DistributedSampler(part, shuffle=True)
    loader = DataLoader(part, batch_size=BATCH // dist.get_world_size(), sampler=sampler)
    with lockstep.record(model, optimizer, path, steps=STEPS) as recorder:
        for epoch in range(2):
            if fault != "no set_epoch":
                sampler.set_epoch(epoch)
            for x, y, numbers in loader:
                loss = F.cross_entropy(model(x), y)
                recorder.batch(numbers)
                recorder.loss(loss, weight=len(x))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()


def averages(path: Path, fault: str) -> None:
    """A moving average of the weights, which the model takes over after every second update."""
    model, optimizer = wrapped()
    average = copy.deepcopy(model.module)
    with lockstep.record(model, optimizer, path, steps=STEPS) as recorder:
        for index in range(STEPS):
            loss_of(model, index, BATCH, recorder).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for mean, each in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(each, 0.5)
                    if index % 2 and (fault != "on rank 0" or dist.get_rank() == 0):
                        each.copy_(mean)


def sharded(path: Path, fault: str) -> None:
    """FSDP2, whose unsharded parameters are what the model has behind a forward pass."""
    model = make_model()
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
    if fault == "optimizer behind a pass":
        model(data()[:4][0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lockstep.record(model, optimizer, path, steps=STEPS) as recorder:
        for index in range(STEPS):
            loss_of(model, index, BATCH, recorder).backward()
            optimizer.step()
            optimizer.zero_grad()


TRAININGS: dict[str, Callable[[Path, str], None]] = {
    "accumulation": accumulation,
    "windows": windows,
    "scaler": scaler,
    "epochs": epochs,
    "averages": averages,
    "sharded": sharded,
}

if __name__ == "__main__":
    run_trainings(TRAININGS)
