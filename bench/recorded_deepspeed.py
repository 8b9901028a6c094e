"""Planted faults in scripts of DeepSpeed, and right ones: what ``lockstep compare`` says of them.

DeepSpeed is no dependency of the tests; install it beside Lockstep. Each training runs in two
processes on the CPU, and without its fault in one, with ZeRO stage 0. The exit status is 1 if a
right run is accused, or if a fault has another cause than the one expected.

Run: ``python bench/recorded_deepspeed.py``
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import lockstep

STEPS, BATCH, MICROBATCHES = 4, 24, 3

# Fault -> cause. The first two are questions of public threads: whether the engine divides the loss
# (https://github.com/deepspeedai/DeepSpeed/issues/7439), and what a loss is then worth
# (https://github.com/deepspeedai/DeepSpeed/issues/1107).
CAUSES = {
    "": None,
    "adam": None,
    "bf16": None,
    "loss divided by hand": "constant factor",
    "loss times processes": "constant factor",
    "no sampler": "samples repeated",
    "batch of each": "batch size",
}


def train(path: Path, fault: str, rank: int, size: int) -> None:
    import deepspeed

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    kind = torch.optim.Adam if fault == "adam" else torch.optim.SGD
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH // size // MICROBATCHES,
        "gradient_accumulation_steps": MICROBATCHES,
    }
    given = kind(model.parameters(), lr=0.01)
    engine, optimizer, *_ = deepspeed.initialize(
        model=model, optimizer=given, config=config, dist_init_required=False
    )
    x = torch.randn(480, 6, generator=torch.Generator().manual_seed(1))
    y = torch.arange(480) % 3
    with lockstep.record(engine, optimizer, path, steps=STEPS) as record:
        for index in range(STEPS * MICROBATCHES):
            part = torch.arange(8) + 8 * index
            if fault == "batch of each":
                part = torch.arange(8) + 8 * (index * size + rank)
            elif fault != "no sampler":
                part = part[rank::size]
            with torch.autocast("cpu", torch.bfloat16, enabled=fault == "bf16"):
                loss = F.cross_entropy(engine(x[part]), y[part])
            record.batch(part)
            record.loss(loss, weight=len(part))
            if fault == "loss divided by hand":
                loss = loss / MICROBATCHES
            if fault == "loss times processes":
                loss = loss * size
            engine.backward(loss)
            engine.step()


def work(folder: Path) -> None:
    """As one of ``WORLD_SIZE`` processes."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store{size}", rank=rank, world_size=size
    )
    for fault, cause in CAUSES.items():
        if size > 1 or cause is None:
            train(folder / f"{fault or 'plain'} of {size}", fault, rank, size)
    os._exit(0)


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, name],
                env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(size)}
                | {"LOCAL_RANK": str(rank), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
                | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for size in (1, 2)
            for rank in range(size)
        ]
        if any(each.wait(900) for each in processes):
            print("a process has failed: run it by hand with RANK and WORLD_SIZE")
            return 2
        return max(check(Path(name), fault) for fault in CAUSES)


def check(folder: Path, fault: str) -> int:
    """Print a row; returns 1 if it is not as expected."""
    name = fault or "plain"
    reference = "plain" if CAUSES[fault] else name
    outcome = lockstep.compare(folder / f"{name} of 2", folder / f"{reference} of 1")
    found = outcome.cause.kind if outcome.cause else None
    print(f"{name:30} {found or 'agrees':24} {outcome.first or ''}")
    return int(found != CAUSES[fault])


if __name__ == "__main__":
    sys.exit(work(Path(sys.argv[1])) if len(sys.argv) > 1 else main())  # type: ignore[func-returns-value]
