"""Map-style datasets that tell what is read of them, draw random numbers, wait, or fail."""

import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset


class AsRead(Exception):  # noqa: N818
    """What a dataset raises when it is told to."""


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Rows of two tensors.

    Args:
        inputs: shape (n, ...).
        targets: shape (n, ...).
        log: a file that gets a line per sample read, whichever process reads it.
        seconds: that a sample takes to read.
        bad: a sample that cannot be read.
    """

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor,
        *,
        log: Path | None = None,
        seconds: float = 0.0,
        bad: int | None = None,
    ) -> None:
        self.inputs = inputs
        self.targets = targets
        self.log = log
        self.seconds = seconds
        self.bad = bad

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == self.bad:
            raise AsRead(f"as asked, of sample {index}")
        if self.seconds:
            time.sleep(self.seconds)
        if self.log is not None:
            note(self.log, f"{index} {os.getpid()}")
        return self.inputs[index].clone(), self.targets[index]


class Noisy(Rows):
    """Rows with noise from all three random streams."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row, target = super().__getitem__(index)
        noise = torch.rand(row.shape, dtype=row.dtype) + np.random.rand() + random.random()
        return row + noise / 10, target


class Listed(Dataset[Any]):
    """Given samples."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def note(log: Path, line: str) -> None:
    """Append a line; lines of several processes do not mix."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


def reads_in(log: Path) -> Counter[int]:
    """How often each sample was read."""
    return Counter(int(line.split()[0]) for line in lines_of(log))


def readers_in(log: Path) -> set[int]:
    """The processes that have read."""
    return {int(line.split()[1]) for line in lines_of(log)}


def lines_of(log: Path) -> list[str]:
    """What was noted."""
    return log.read_text().splitlines() if log.exists() else []
