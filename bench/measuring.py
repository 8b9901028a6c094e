"""What every contender of the data parallel benchmark is measured with: batches, clock, memory."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from nets import Net

WARM_UP_STEPS = 5


def batches(net: Net, rank: int, num_ranks: int) -> Callable[[int], tuple[Any, Any]]:
    """Step number -> this rank's part of the global batch."""
    inputs, targets = net.make_data(net.num_samples)
    order = torch.randperm(net.num_samples, generator=torch.Generator().manual_seed(0))
    local = net.batch_size // num_ranks

    def batch(step: int) -> tuple[Any, Any]:
        start = step * net.batch_size % net.num_samples + rank * local
        rows = order[start : start + local]
        return inputs[rows], targets[rows]

    return batch


class Stopwatch:
    """Told of every step; leaves out the warm-up, and says when the time is filled.

    Every rank makes the same number of steps: rank 0 decides it from one step after the warm-up.
    """

    def __init__(self, seconds: float, batch_size: int) -> None:
        self.seconds = seconds
        self.batch_size = batch_size
        self.samples_per_second = 0.0
        self._done = 0
        self._began = 0.0
        self._steps = 0

    def step_done(self) -> bool:
        """Note one more step; returns whether it was the last."""
        self._done += 1
        if self._done == WARM_UP_STEPS:
            self._began = time.perf_counter()
        elif self._done == WARM_UP_STEPS + 1:
            self._steps = _agreed(round(self.seconds / (time.perf_counter() - self._began)))
            _barrier()
            self._began = time.perf_counter()
        elif self._done == WARM_UP_STEPS + 1 + self._steps:
            _barrier()
            elapsed = time.perf_counter() - self._began
            self.samples_per_second = self._steps * self.batch_size / elapsed
            return True
        return False

    def figures(self, loss: float) -> dict[str, float]:
        """To be called while model and optimizer are alive: this process's memory is counted."""
        _barrier()
        own = pss_bytes([os.getpid()])
        _barrier()  # all are counted before any of them frees what it has
        return {"samples_per_second": self.samples_per_second, "loss": loss, "bytes": own}


def loop(
    net: Net, step: Callable[[Any, Any], float], batch: Callable[[int], Any], seconds: float
) -> dict[str, float]:
    """Call ``step`` with one batch after the other until the time is filled."""
    watch = Stopwatch(seconds, net.batch_size)
    number = 0
    while True:
        loss = step(*batch(number))
        number += 1
        if watch.step_done():
            return watch.figures(loss)


def _agreed(steps: int) -> int:
    """Rank 0's number of steps, at least 3."""
    shared = torch.tensor([max(3, steps)])
    if torch.distributed.is_initialized():
        torch.distributed.broadcast(shared, 0)
    return int(shared.item())


def _barrier() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def pss_bytes(pids: list[int]) -> float:
    """Memory of some processes, what they share counted once: their proportional set sizes."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def descendants(pid: int) -> list[int]:
    """Children, their children, and so on."""
    children = [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return children + [below for child in children for below in descendants(child)]
