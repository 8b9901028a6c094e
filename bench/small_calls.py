"""What a call takes that does little: Keras's methods with 32 samples, plain and distributed.

An MLP 784-256-256-10 with Adam and accuracy; two replicas, one thread each, against plain Keras
with two threads, in turn. Each round is a process; ``--against`` runs another checkout of Lockstep,
too, in turn with this one.

Run: ``python bench/small_calls.py [--rounds 3] [--calls 40] [--against ../before]``
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

SAMPLES = 32
METHODS = ("predict", "predict_on_batch", "train_on_batch", "test_on_batch", "fit")

# A process makes so many rounds of its own, and one before that starts and builds.
_INNER_ROUNDS = 2

# Seconds of calls, by method and by who made them.
Times = dict[str, dict[str, list[float]]]


def make_model() -> Any:
    import keras

    model = keras.Sequential(
        [keras.Input((784,))]
        + [keras.layers.Dense(256, activation="relu") for _ in range(2)]
        + [keras.layers.Dense(10)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="adam", loss=loss, metrics=["accuracy"])
    return model


def calls_of(model: Any) -> dict[str, Callable[[], object]]:
    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.standard_normal((SAMPLES, 784)).astype("float32")
    y = rng.integers(0, 10, SAMPLES)
    return {
        "predict": lambda: model.predict(x, verbose=0),
        "predict_on_batch": lambda: model.predict_on_batch(x),
        "train_on_batch": lambda: model.train_on_batch(x, y),
        "test_on_batch": lambda: model.test_on_batch(x, y),
        "fit": lambda: model.fit(x, y, batch_size=SAMPLES, verbose=0),
    }


def run(calls: int) -> Times:
    """Time calls of both models in turn."""
    os.environ["KERAS_BACKEND"] = "torch"
    import torch

    import lockstep

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    with lockstep.MirroredStrategy(2).scope():
        mirrored = calls_of(make_model())
    both = {"plain": calls_of(make_model()), "two replicas": mirrored}
    times: Times = {method: {who: [] for who in both} for method in METHODS}
    for number in range(_INNER_ROUNDS + 1):
        for method in METHODS:
            for who, own in both.items():
                found = [_timed(own[method]) for _ in range(calls)]
                if number:
                    times[method][who].append(statistics.median(found))
    return times


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure(checkout: Path, options: argparse.Namespace) -> Times:
    """The times that a checkout takes, in a process of its own."""
    command = [sys.executable, __file__, "--inner"]
    command += ["--calls", str(options.calls)]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{checkout} failed:\n{done.stderr}")
    found: Times = json.loads(done.stdout.splitlines()[-1])
    return found


def joined(runs: list[Times]) -> Times:
    """The times of all rounds."""
    return {
        method: {who: [one for run in runs for one in run[method][who]] for who in by_who}
        for method, by_who in runs[0].items()
    }


def report(runs: Mapping[str, Times]) -> None:
    """A table of milliseconds, and of ratios to plain Keras."""
    for name, times in runs.items():
        print(f"\n{name}\n{'ms':18}{'plain':>24}{'two replicas':>24}{'ratio':>8}")
        for method, by_who in times.items():
            plain, ours = by_who["plain"], by_who["two replicas"]
            ratio = statistics.median(b / a for a, b in zip(plain, ours, strict=True))
            print(f"{method:18}{_figures(plain):>24}{_figures(ours):>24}{ratio:8.2f}")


def _figures(seconds: list[float]) -> str:
    most, least = max(seconds) * 1e3, min(seconds) * 1e3
    return f"{statistics.median(seconds) * 1e3:.1f} ({least:.1f} to {most:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=40)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inner:
        print(json.dumps(run(options.calls)))
        return
    checkouts = {"this": Path(__file__).parents[1]}
    if options.against is not None:
        checkouts = {"before": options.against.resolve(), **checkouts}
    runs: dict[str, list[Times]] = {name: [] for name in checkouts}
    for _ in range(options.rounds):
        for name, checkout in checkouts.items():
            runs[name].append(measure(checkout, options))
    report({name: joined(found) for name, found in runs.items()})


if __name__ == "__main__":
    main()
