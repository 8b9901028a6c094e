"""``lockstep demo``: real digits, a convolutional net, many devices, and the proof."""

import argparse
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import lockstep
from lockstep.data.mnist import load_mnist
from lockstep.extras import import_extra
from lockstep.train.checks import check_counts
from lockstep.units import format_count, format_seconds

Arrays = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]

DIGITS_EPOCHS, MNIST_EPOCHS = 20, 3
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
    """Train on many devices, then on one, then prove that both are the same."""
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
    outcomes = {}
    for name, strategy in strategies.items():
        console.print(f"[bold]Training on {name}[/bold] ({_describe(strategy)})")
        outcomes[name] = _train(strategy, train, test, epochs)
        console.print()
    console.print(_comparison(outcomes))
    console.print(_PROOF)
    report = lockstep.verify(_job(train), strategies[_named(options.devices)])
    console.print(str(report), markup=False, soft_wrap=True)
    console.print(_NEXT, markup=False)
    return 0 if report.passed else 1


@dataclass(frozen=True)
class _Outcome:
    accuracy: float
    loss: float
    samples_per_second: float
    seconds: float


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


def _train(
    strategy: lockstep.MirroredStrategy, train: Arrays, test: Arrays, epochs: int
) -> _Outcome:
    import torchmetrics

    trainer = lockstep.Trainer(
        _make_model(train[0].shape[-1]),
        loss=nn.CrossEntropyLoss(),
        optimizer=ADAM,
        metrics={"accuracy": torchmetrics.Accuracy(task="multiclass", num_classes=10)},
        strategy=strategy,
    )
    trainer.evaluate(test)  # starts the helpers, so that the times are of training alone
    began = time.perf_counter()
    trainer.fit(train, epochs=epochs, batch_size=BATCH_SIZE)
    seconds = time.perf_counter() - began
    result = trainer.evaluate(test, batch_size=BATCH_SIZE)
    return _Outcome(result["accuracy"], result["loss"], epochs * len(train[0]) / seconds, seconds)


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


def _comparison(outcomes: dict[str, _Outcome]) -> Table:
    table = Table("", "held-out accuracy", "held-out loss", "samples/s", "time", box=None)
    for name, outcome in outcomes.items():
        table.add_row(
            name,
            f"{outcome.accuracy:.2%}",
            f"{outcome.loss:.4f}",
            format_count(round(outcome.samples_per_second)),
            format_seconds(outcome.seconds),
        )
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
