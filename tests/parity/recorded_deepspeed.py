"""Trainings of DeepSpeed, with ZeRO's stages 0, 1 and 2, right ones and with planted faults.

``python recorded_deepspeed.py FOLDER NAME...``, as in ``recorded_loops``: a name is a training, or
a training and a fault, and with one process a training is the reference, without the fault.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import lockstep
from tests.parity.recorded_libraries import BATCH, STEPS, data, make_model, run_trainings

MICROBATCHES = 3
SIZE = BATCH // MICROBATCHES


def train(
    path: Path, fault: str, *, stage: int, kind: Any = torch.optim.SGD, **config: Any
) -> None:
    import deepspeed

    # Sums through shared memory would be compiled first, for minutes; gloo's need no compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model, size = make_model(), dist.get_world_size()
    if fault == "not clipped":
        del config["gradient_clipping"]
    engine, optimizer, *_ = deepspeed.initialize(
        model=model,
        optimizer=kind(groups_of(model, fault), lr=0.01),
        config={
            "train_micro_batch_size_per_gpu": SIZE // size,
            "gradient_accumulation_steps": MICROBATCHES,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            **config,
        },
        dist_init_required=False,
    )
    own = _float32 if "bf16" not in config else torch.Tensor.bfloat16
    with lockstep.record(engine, optimizer, path, steps=STEPS) as recorder:
        for index in range(STEPS * MICROBATCHES):
            part = numbers_of(index, fault)
            x, y, _ = data()[part]
            loss = F.cross_entropy(engine(own(x)).float(), y)
            recorder.batch(part)
            recorder.loss(loss, weight=len(part))
            factors = {"divided by hand": 1 / MICROBATCHES, "times processes": float(size)}
            engine.backward(loss * factors.get(fault, 1.0))
            engine.step()


def _float32(x: torch.Tensor) -> torch.Tensor:
    return x


def groups_of(model: torch.nn.Module, fault: str) -> list[dict[str, Any]]:
    """Matrices, which decay, and the others."""
    parameters = list(model.parameters())
    matrices = [each for each in parameters if each.dim() > 1]
    others = [each for each in parameters if each.dim() < 2]
    decay = 0.1 if fault == "all decay" else 0.0
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": others, "weight_decay": decay},
    ]


def numbers_of(index: int, fault: str) -> torch.Tensor:
    """The numbers of a microbatch's samples on this rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if fault == "batch of each":
        return torch.arange(SIZE) + SIZE * (index * size + rank)
    part = torch.arange(SIZE) + SIZE * index
    return part if fault == "no sampler" else part[rank::size]


TRAININGS: dict[str, Callable[[Path, str], None]] = {
    "stage 0": partial(train, stage=0),
    "stage 1": partial(train, stage=1),
    "stage 2": partial(train, stage=2),
    "stage 1, adam": partial(train, stage=1, kind=torch.optim.Adam, gradient_clipping=0.1),
    "stage 2, adam": partial(train, stage=2, kind=torch.optim.Adam),
    "stage 1, bf16": partial(train, stage=1, bf16={"enabled": True}),
    "stage 2, bf16": partial(train, stage=2, bf16={"enabled": True}),
}

if __name__ == "__main__":
    run_trainings(TRAININGS)
