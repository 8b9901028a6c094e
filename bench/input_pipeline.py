"""The input pipeline: is a step as long as the longer of reading and computing?

A sample takes 5 ms to read, asleep, as from a disk or over a network. Two replicas train on it with
``lockstep.data.prefetch``; a step is held against what reading its samples takes alone and what
computing takes alone, once where reading is longer and once where computing is. Then the same with
``lockstep.data.cache``: how many samples the second epoch reads. Run: ``make bench-input``.
"""

import argparse
import os
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import lockstep

READ_SECONDS = 0.005
REPLICAS = 2
BATCH_SIZE = 32
WIDTH = 512
BAR = 0.10  # of the longer of both

# Hidden layers of the net, so that a step computes for less, and for more, than it reads.
CASES = {"reading is longer": 1, "computing is longer": 120}


class SlowRows(Dataset[tuple[torch.Tensor, int]]):
    """Rows that take a while to read; every read is noted in a file."""

    def __init__(self, num_samples: int, seconds: float, log: Path | None = None) -> None:
        self.rows = torch.rand(num_samples, WIDTH, generator=torch.Generator().manual_seed(0))
        self.seconds = seconds
        self.log = log

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.seconds)
        if self.log is not None:
            descriptor = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(descriptor, b".")
            os.close(descriptor)
        return self.rows[index], index % 10


class StepTimes(lockstep.Callback):
    """Times from one step's end to the next, but for an epoch's first, and reads per epoch."""

    def __init__(self, log: Path | None = None) -> None:
        self.seconds: list[float] = []
        self.reads: list[int] = []
        self._log = log
        self._last: float | None = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._last = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        now = time.perf_counter()
        if self._last is not None and batch > 3:
            self.seconds.append(now - self._last)
        self._last = now

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._log is not None:
            self.reads.append(self._log.stat().st_size - sum(self.reads))


def net(num_layers: int) -> nn.Module:
    hidden = [layer for _ in range(num_layers) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 10))


def fit(data: Any, num_layers: int, epochs: int = 1, log: Path | None = None) -> StepTimes:
    times = StepTimes(log)
    trainer = lockstep.Trainer(
        net(num_layers),
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD,
        strategy=lockstep.MirroredStrategy(REPLICAS),
        callbacks=[times],
    )
    trainer.fit(data, batch_size=BATCH_SIZE, epochs=epochs, verbose=0)
    trainer.close()
    return times


def reading_alone(steps: int) -> float:
    """Seconds that a replica reads for a step, with nothing else to do."""
    rows, share = SlowRows(BATCH_SIZE, READ_SECONDS), BATCH_SIZE // REPLICAS
    began = time.perf_counter()
    for _ in range(steps):
        for index in range(share):
            _ = rows[index]
    return (time.perf_counter() - began) / steps


def measure(num_layers: int, steps: int, workers: int) -> tuple[float, float, float, float]:
    """Seconds per step: reading alone, computing alone, plainly, with prefetch."""
    quick = SlowRows(steps * BATCH_SIZE, 0)
    slow = SlowRows(steps * BATCH_SIZE, READ_SECONDS)
    ahead = lockstep.data.prefetch(slow, workers=workers)
    computing, plain, step = (
        statistics.mean(fit(data, num_layers).seconds) for data in (quick, slow, ahead)
    )
    return reading_alone(steps), computing, plain, step


def show_case(name: str, num_layers: int, steps: int, rounds: int, workers: int) -> bool:
    """Print a row, medians over the rounds; returns whether it is within the bar."""
    measured = [measure(num_layers, steps, workers) for _ in range(rounds)]
    over = statistics.median(
        step / max(reading, computing) - 1 for reading, computing, _, step in measured
    )
    kind = "a thread" if workers == 0 else "a process"
    medians = [statistics.median(column) for column in zip(*measured, strict=True)]
    figures = "".join(f"{1000 * seconds:11.1f}" for seconds in medians)
    print(f"{name:22} {kind:10}{figures}{over:+13.1%}", flush=True)
    return over <= BAR


def show_cache(path: Path | None, folder: Path) -> bool:
    """Print how many samples each epoch reads; returns whether the second reads none."""
    log = folder / f"reads-{path is not None}"
    rows = SlowRows(8 * BATCH_SIZE, READ_SECONDS, log)
    cached = lockstep.data.cache(rows, path)
    times = fit(cached, 1, epochs=2, log=log)
    where = "in memory" if path is None else "on disk"
    print(f"cache {where}: {len(rows)} samples; reads by epoch: {times.reads}")
    return times.reads == [len(rows), 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60, help="per measurement")
    parser.add_argument("--rounds", type=int, default=5, help="ratios are taken within a round")
    options = parser.parse_args()
    warnings.simplefilter("ignore", lockstep.InputBoundWarning)  # that is what is measured here
    print(f"{READ_SECONDS * 1000:.0f} ms per sample, {REPLICAS} replicas, batch {BATCH_SIZE}")
    print("milliseconds per step: reading alone, computing alone, one after the other, prefetch")
    titles = ("reading", "computing", "plain", "prefetch")
    print(" " * 33 + "".join(f"{title:>11}" for title in titles) + f"{'over longer':>13}")
    held = [
        show_case(name, num_layers, options.steps, options.rounds, workers)
        for name, num_layers in CASES.items()
        for workers in (0, 1)
    ]
    with tempfile.TemporaryDirectory() as name:
        held += [show_cache(path, Path(name)) for path in (None, Path(name) / "cache")]
    print("held" if all(held) else f"MISSED: a step may be {BAR:.0%} longer, an epoch read nothing")
    raise SystemExit(not all(held))


if __name__ == "__main__":
    main()
