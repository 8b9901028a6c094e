"""``lockstep demo``: real digits, a convolutional net, many devices, and the proof."""

import argparse
import os
import statistics
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import lockstep
from lockstep.cli.examination import busy_cores
from lockstep.cluster.devices import usable_cores
from lockstep.data.mnist import load_mnist
from lockstep.extras import import_extra
from lockstep.formatting import format_count
from lockstep.train.validation.checks import check_counts

Arrays = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]

DIGITS_EPOCHS, MNIST_EPOCHS = 20, 3
MOST_ROUNDS = 5  # both train in turns, so that other load on the machine affects both
_SPARE_CORES = 0.25  # this part may be missing
BATCH_SIZE = 64
ADAM = partial(torch.optim.Adam, lr=2e-3)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument(
        "--devices", type=int, default=2, metavar="N", help="number of devices (default: 2)"
    )
    parser.add_argument(
        "--epochs",
        type=int,
        metavar="N",
        help=f"passes over the data (default: {DIGITS_EPOCHS}; {MNIST_EPOCHS} with --mnist)",
    )
    parser.add_argument(
        "--mnist",
        metavar="FOLDER",
        help="train on MNIST: a folder with its idx(.gz) files or its .npz file "
        "(default: scikit-learn's 8 x 8 digits)",
    )


def run(options: argparse.Namespace) -> int:
    """Train on many devices and on one, in turns, then prove that both are the same."""
    default = DIGITS_EPOCHS if options.mnist is None else MNIST_EPOCHS
    (epochs,) = check_counts(epochs=default if options.epochs is None else options.epochs)
    strategies = {
        _named(devices): lockstep.MirroredStrategy(devices) for devices in (options.devices, 1)
    }
    console = Console(highlight=False)
    train, test = _load(options.mnist)
    console.print(
        f"{len(train[0]):,} handwritten digits of {train[0].shape[-1]} x {train[0].shape[-1]} "
        f"pixels to learn from, {len(test[0]):,} held out.\n"
    )
    warning = _warning(options.devices, busy_cores())
    if warning:
        console.print(f"[yellow]{warning}[/yellow]\n", soft_wrap=True)
    described = [f"{name} ({_describe(each)})" for name, each in strategies.items()]
    console.print(f"[bold]Training on {' and on '.join(described)}[/bold]", soft_wrap=True)
    sides = {name: _Side(strategy, train, test) for name, strategy in strategies.items()}
    done = 0
    for more in _rounds(epochs):
        for side in sides.values():
            side.train(more)
        done += more
        console.print(_progress(done, epochs, sides), soft_wrap=True)
    console.print()
    console.print(_comparison(sides))
    if warning:
        console.print(f"[yellow]{warning}[/yellow]", soft_wrap=True)
    console.print(_PROOF)
    report = lockstep.verify(_job(train), strategies[_named(options.devices)])
    console.print(str(report), markup=False, soft_wrap=True)
    console.print(_NEXT, markup=False)
    return 0 if report.passed else 1


class _Side:
    """A training, in rounds.

    Args:
        strategy: of its Trainer.
        train: data to learn from.
        test: data that is held out.

    Attributes:
        speeds: samples per second, of each round.
        loss: of the last epoch.
    """

    def __init__(self, strategy: lockstep.MirroredStrategy, train: Arrays, test: Arrays) -> None:
        import torchmetrics

        self._train, self._test = train, test
        self._trainer = lockstep.Trainer(
            _make_model(train[0].shape[-1]),
            loss=nn.CrossEntropyLoss(),
            optimizer=ADAM,
            metrics={"accuracy": torchmetrics.Accuracy(task="multiclass", num_classes=10)},
            strategy=strategy,
        )
        self.evaluate()  # starts the helpers, so that times are of training alone
        self.speeds: list[float] = []
        self.loss = 0.0

    def train(self, epochs: int) -> None:
        """Train for this many further epochs."""
        began = time.perf_counter()
        history = self._trainer.fit(self._train, epochs=epochs, batch_size=BATCH_SIZE, verbose=0)
        self.speeds.append(epochs * len(self._train[0]) / (time.perf_counter() - began))
        self.loss = history.history["loss"][-1]

    def evaluate(self) -> Mapping[str, float]:
        """Loss and accuracy on the test data."""
        return self._trainer.evaluate(self._test, batch_size=BATCH_SIZE)


def _rounds(epochs: int) -> list[int]:
    """The number of epochs of each round."""
    rounds = min(epochs, MOST_ROUNDS)
    return [epochs // rounds + (number < epochs % rounds) for number in range(rounds)]


def _warning(devices: int, busy: float | None) -> str:
    """Why speeds mean nothing on this machine now; empty if they are valid."""
    total = os.cpu_count() or 1
    if busy is None or total - busy > min(devices, usable_cores()) - _SPARE_CORES:
        return ""
    return (
        f"{busy:.1f} of {total} cores are busy with other work: the speeds mean nothing now. "
        "The results do not suffer."
    )


class DigitsNet(nn.Module):
    """3 convolutions, 2 poolings, 2 dense layers.

    Args:
        image_size: height and width of the images.
    """

    def __init__(self, image_size: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64 * (image_size // 4) ** 2, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(n, 1, size, size) -> logits (n, 10)."""
        logits: torch.Tensor = self.classifier(self.features(images))
        return logits


def _load(mnist: str | None) -> tuple[Arrays, Arrays]:
    if mnist is not None:
        data = load_mnist(mnist)
        return data.train, data.test
    datasets = import_extra(
        "sklearn.datasets",
        extra="demo",
        user="`lockstep demo`",
        otherwise=", or use --mnist FOLDER",
    )
    images, labels = datasets.load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    order = np.random.default_rng(0).permutation(len(images))
    held_out, rest = order[:360], order[360:]
    return (images[rest], labels[rest]), (images[held_out], labels[held_out])


def _make_model(image_size: int) -> DigitsNet:
    torch.manual_seed(0)
    return DigitsNet(image_size)


def _job(train: Arrays) -> lockstep.Job:
    return lockstep.Job(
        model=_make_model(train[0].shape[-1]),
        loss=nn.CrossEntropyLoss(),
        optimizer=ADAM,
        data=train,
        batch_size=BATCH_SIZE - 1,  # does not divide by two
    )


def _named(devices: int) -> str:
    return "1 device" if devices == 1 else f"{devices} devices"


def _describe(strategy: lockstep.MirroredStrategy) -> str:
    replicas = strategy.num_replicas_in_sync
    return "one core" if replicas == 1 else f"{replicas} cores, one copy of the weights"


def _progress(done: int, epochs: int, sides: Mapping[str, _Side]) -> str:
    values = [
        f"{name}: loss {side.loss:.4f}, {format_count(round(side.speeds[-1]))} samples/s"
        for name, side in sides.items()
    ]
    return f"Epoch {done:{len(str(epochs))}}/{epochs}  {'  '.join(values)}"


def _comparison(sides: Mapping[str, _Side]) -> Table:
    rounds = len(next(iter(sides.values())).speeds)
    speed = "samples/s" if rounds == 1 else f"samples/s (median of {rounds} rounds)"
    table = Table("", "held-out accuracy", "held-out loss", speed, box=None)
    for name, side in sides.items():
        found = side.evaluate()
        median = format_count(round(statistics.median(side.speeds)))
        table.add_row(name, f"{found['accuracy']:.2%}", f"{found['loss']:.4f}", median)
    return table


_PROOF = """
[bold]Is it the same training?[/bold] Above, only float32 rounding differs. Here are five
steps in float64, compared tensor by tensor with a plain PyTorch loop:
"""

_NEXT = """
What to try next:
  lockstep demo --devices 4            the same on 4 replicas
  lockstep demo --mnist FOLDER         the same on MNIST, from its files
  lockstep verify job.py:make_job      the proof for a model of your own
  lockstep --help                      all commands"""
