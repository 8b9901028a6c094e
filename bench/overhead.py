"""What progress, metrics and callbacks add to a step: ``fit`` with each of them, and bare.

The MLP 784-256-256-10 on 61,440 random samples in batches of 512, Adam, two replicas. Every round
runs every variant once, beginning with another one, as a whole ``fit`` of some epochs; a ratio is
to the bare ``fit`` of the same round, and the table shows the median over the rounds.

Where other programs share the cores, whole runs differ by more than what is to be measured. So a
second table has a clock around each part on rank 0, which waits for nobody, and compares quiet
moments: the time that one in four stays below, of each part and of the steps.

Run: ``python bench/overhead.py [--rounds 11] [--epochs 3] [--devices 2] [--only bare all]``

With ``--against FOLDER``, a checkout of another commit, every round runs each variant with the code
there and with the code here, in fresh processes and in turns; a ratio is of the two of one round.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from nets import NETS
from rich.progress import Progress

import lockstep
from lockstep import callbacks
from lockstep.parallel.worker import Worker
from lockstep.train.callbacks.fit_driver import FitDriver
from lockstep.train.callbacks.rank_sync import RankSync
from lockstep.train.logging import metrics
from lockstep.train.logging.metrics import Metrics

NET = NETS["mlp"]


class LastLoss(lockstep.Callback):
    """The smallest callback that is called after every batch."""

    def __init__(self) -> None:
        self.loss = float("nan")

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        assert logs is not None
        self.loss = logs["loss"]


def accuracy() -> dict[str, Any]:
    return {"accuracy": torchmetrics.Accuracy(task="multiclass", num_classes=10)}


def of_batches() -> dict[str, Any]:
    """A metric that gets outputs of whole batches."""
    return {"auroc": torchmetrics.AUROC(task="multiclass", num_classes=10, thresholds=20)}


def per_epoch(folder: Path) -> list[lockstep.Callback]:
    return [
        callbacks.EarlyStopping(monitor="loss", patience=1000),
        callbacks.CSVLogger(folder / "log.csv"),
        callbacks.TensorBoard(folder / "tensorboard"),
    ]


# Name -> (shows progress, options of the Trainer).
VARIANTS: dict[str, tuple[bool, Callable[[Path], dict[str, Any]]]] = {
    "bare": (False, lambda folder: {}),
    "progress": (True, lambda folder: {}),
    "metrics": (False, lambda folder: {"metrics": accuracy()}),
    "metrics of batches": (False, lambda folder: {"metrics": of_batches()}),
    "callbacks per epoch": (False, lambda folder: {"callbacks": per_epoch(folder)}),
    "callback per batch": (False, lambda folder: {"callbacks": [LastLoss()]}),
    "all": (
        True,
        lambda folder: {"metrics": accuracy(), "callbacks": [*per_epoch(folder), LastLoss()]},
    ),
}


def run(name: str, epochs: int, devices: int, data: Any, folder: Path) -> float:
    """Seconds of one ``fit``, the start of helper processes not counted."""
    shows, make_options = VARIANTS[name]
    trainer = lockstep.Trainer(
        NET.make_model(),
        loss=NET.loss,
        optimizer=partial(torch.optim.Adam, lr=1e-3, fused=True),
        strategy=lockstep.MirroredStrategy(devices),
        **make_options(folder),
    )
    few = tuple(part[: NET.batch_size] for part in data)
    trainer.evaluate(few, batch_size=NET.batch_size)  # helpers start, and import torchmetrics
    began = time.perf_counter()
    trainer.fit(data, epochs=epochs, batch_size=NET.batch_size, verbose=int(shows))
    seconds = time.perf_counter() - began
    trainer.close()
    return seconds


def measure(names: list[str], rounds: int, epochs: int, devices: int) -> dict[str, list[float]]:
    data = NET.make_data(NET.num_samples)
    times: dict[str, list[float]] = {name: [] for name in names}
    os.environ["FORCE_COLOR"] = "1"  # rich draws its bar as on a terminal
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        run_one = partial(run, epochs=epochs, devices=devices, data=data, folder=Path(folder))
        for number in range(-1, rounds):  # the first round warms up
            for place in range(len(names)):
                name = names[(number + place) % len(names)]
                with redirect_stdout(nowhere):
                    seconds = run_one(name)
                if number >= 0:
                    times[name].append(seconds)
    return times


def compare(names: list[str], folder: Path, options: argparse.Namespace) -> None:
    """Print the times of the code here, and their ratios to those of the code in a folder."""
    trees = {"there": folder, "here": Path(__file__).parents[1]}
    print(f"{'variant':20} {'ms a step':>9}  {'to there':>8}  min to max")
    for name in names:
        times: dict[str, list[float]] = {tree: [] for tree in trees}
        for number in range(options.rounds):
            for tree in sorted(trees, reverse=bool(number % 2)):
                times[tree].append(run_in(trees[tree], name, options))
        steps = options.epochs * NET.num_samples // NET.batch_size
        ratios = [here / there for here, there in zip(times["here"], times["there"], strict=True)]
        print(
            f"{name:20} {statistics.median(times['here']) / steps * 1e3:9.3f}  "
            f"{statistics.median(ratios):8.3f}  {min(ratios):.3f} to {max(ratios):.3f}"
        )


def run_in(tree: Path, name: str, options: argparse.Namespace) -> float:
    """Seconds of one ``fit`` with the code in a folder, after one that warms up."""
    command = [sys.executable, __file__, "--once", "--only", name]
    command += ["--epochs", str(options.epochs), "--devices", str(options.devices)]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


# What rank 0 does beside the steps. The first and third are what most calls take; the others are
# within them, now and then.
PARTS: list[tuple[str, Any, str]] = [
    ("metrics, at each step", Metrics, "update"),
    ("metrics, counted now and then", metrics, "update_each"),
    ("callbacks and progress, at each step", RankSync, "sync_callback"),
    ("callbacks and progress, at each epoch", FitDriver, "end_epoch"),
    ("the bar, redrawn", Progress, "refresh"),
    ("optimizer shown to callbacks, at each epoch", RankSync, "show_slots"),
]


def time_parts(epochs: int, devices: int) -> tuple[float, dict[str, tuple[float, float]]]:
    """Seconds of a step; by part, seconds and calls per step. Puts clocks into classes."""
    clocks: dict[str, list[float]] = {}
    for label, owner, name in [*PARTS, ("step", Worker, "train_step")]:
        setattr(owner, name, timed(getattr(owner, name), clocks.setdefault(label, [])))
    measure(["all"], 1, epochs, devices)
    steps = clocks.pop("step")
    return quiet(steps), {
        label: (quiet(times), len(times) / len(steps)) for label, times in clocks.items()
    }


def quiet(times: list[float]) -> float:
    """What one in four stays below."""
    return sorted(times)[len(times) // 4]


def timed(function: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*arguments, **options)
        finally:
            times.append(time.perf_counter() - began)

    return call


def print_parts(epochs: int, devices: int) -> None:
    step, parts = time_parts(epochs, devices)
    print(f"\nOn rank 0, beside a step of {step * 1e3:.3f} ms, of all together:")
    for label, (seconds, calls) in parts.items():
        print(f"{label:44} {seconds * 1e6:8.1f} us, {calls:6.3f} times a step")
    total = sum(seconds * calls for seconds, calls in parts.values())
    print(f"together {total * 1e6:.1f} us a step: {total / step:.1%} of it")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--against", type=Path, help="a checkout of another commit")
    parser.add_argument("--once", action="store_true", help="print the seconds of one round")
    options = parser.parse_args()
    if options.against is not None:
        compare(options.only, options.against, options)
        return
    if options.once:
        found = measure(options.only, 1, options.epochs, options.devices)
        print(found[options.only[0]][0])
        return
    times = measure(options.only, options.rounds, options.epochs, options.devices)
    steps = options.epochs * NET.num_samples // NET.batch_size
    print(f"{'variant':20} {'ms a step':>9}  {'to bare':>7}  min to max")
    for name, seconds in times.items():
        ratios = [one / bare for one, bare in zip(seconds, times["bare"], strict=True)]
        print(
            f"{name:20} {statistics.median(seconds) / steps * 1e3:9.3f}  "
            f"{statistics.median(ratios):7.3f}  {min(ratios):.3f} to {max(ratios):.3f}"
        )
    print_parts(3 * options.epochs, options.devices)


if __name__ == "__main__":
    main()
