"""What goes wrong in helpers. They import this module: nothing heavy belongs here."""

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.faults.jobs import make_data


class AsAsked(Exception):  # noqa: N818
    pass


class TwoArguments(Exception):  # noqa: N818
    """Pickles well and cannot be unpickled: a classic."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")
        self.two = two


class WithLock(Exception):  # noqa: N818
    def __init__(self) -> None:
        super().__init__("it holds a lock")
        self.lock = threading.Lock()


@dataclass(frozen=True)
class Frozen(Exception):  # noqa: N818
    """Lets nobody set an attribute, be it a note."""

    number: int


class BadStr(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise SystemExit("__str__ leaves")


class BadReduce(Exception):  # noqa: N818
    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


class BadLoad(Exception):  # noqa: N818
    def __reduce__(self) -> Any:
        return sys.exit, (3,)


def fail(error: BaseException) -> None:
    raise error


def recurse() -> None:
    recurse()


class Rows(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        self.script = os.getpid()
        self.rows = list(zip(*make_data(), strict=True))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if os.getpid() != self.script:
            raise AsAsked("in __getitem__")
        return self.rows[index]


IS_TOLD = threading.Event()


def wait_to_be_told() -> None:
    IS_TOLD.wait(1000)


class SlowRows(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Acts in the script's process, when so many samples have been read there."""

    def __init__(self, act: Callable[[], None], first: int = 6) -> None:
        self.script, self.act, self.first, self.num_read = os.getpid(), act, first, 0
        self.rows = list(zip(*make_data(), strict=True))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if os.getpid() == self.script:
            self.num_read += 1
            if self.num_read > self.first:
                self.act()
        return self.rows[index]


class FailingLoss:
    def __init__(self) -> None:
        self.script = os.getpid()

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        if os.getpid() != self.script:
            raise AsAsked("in the loss")
        return torch.nn.functional.cross_entropy(output, target)
