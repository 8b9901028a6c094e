"""The time of a training step of a small MLP, where all but the kernels counts, by strategy.

Every run is a process of its own with one thread a rank; with ``--against FOLDER``, a checkout of
another commit, each round runs both codes in turn. Prints medians over rounds of each run's median
epoch, by step. ``loop`` is a hand-written loop that picks rows by index, as ``fit`` does.

Run: ``python bench/step_time.py [--against FOLDER] [--rounds 5] [--batch 512] [--only loop gloo]``
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lockstep

STEPS, EPOCHS = 150, 6
STRATEGIES: dict[str, Any] = {
    "single": lockstep.SingleDeviceStrategy,
    "mirrored": partial(lockstep.MirroredStrategy, 2),
    "gloo": partial(lockstep.MirroredStrategy, 2, engine="gloo"),
    "servers": partial(lockstep.ParameterServerStrategy, 2),
}


class Clock(lockstep.Callback):
    """Notes when each epoch ends."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.times.append(time.perf_counter())


def loop(model: nn.Module, x: torch.Tensor, y: torch.Tensor, batch: int) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    loss_function, times = nn.CrossEntropyLoss(), []
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x)).split(batch):
            optimizer.zero_grad()
            loss = loss_function(model(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            loss.item()
        times.append(time.perf_counter())
    return times


def fitted(
    kind: str, model: nn.Module, x: torch.Tensor, y: torch.Tensor, batch: int
) -> list[float]:
    clock = Clock()
    trainer = lockstep.Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=1e-3, fused=True),
        strategy=STRATEGIES[kind](),
        callbacks=[clock],
    )
    trainer.fit((x, y), batch_size=batch, epochs=EPOCHS, verbose=0)
    return clock.times


def measure(kind: str, batch: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    x, y = torch.randn(batch * STEPS, 784), torch.randint(0, 10, (batch * STEPS,))
    run = loop if kind == "loop" else partial(fitted, kind)
    times = run(model, x, y, batch)
    print(statistics.median(after - before for before, after in pairwise(times)) / STEPS)


def step_seconds(kind: str, batch: int, code: Path) -> float:
    command = [sys.executable, __file__, "--measure", kind, "--batch", str(batch)]
    environment = {**os.environ, "PYTHONPATH": str(code)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, help="a checkout of another commit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--only", nargs="+", default=["loop", *STRATEGIES])
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        measure(options.measure, options.batch)
        return
    codes = {"this code": Path(__file__).resolve().parents[1]}
    if options.against is not None:
        codes["against"] = options.against.resolve()
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(options.rounds):
        for kind in options.only:
            for name, code in codes.items():
                found.setdefault((kind, name), []).append(step_seconds(kind, options.batch, code))
    for (kind, name), seconds in found.items():
        print(f"{kind:10} {name:10} {statistics.median(seconds) * 1e6:8.0f} us a step")


if __name__ == "__main__":
    main()
