"""Blocks of ``lockstep.record``: run again, one within another, and those that record nothing."""

import code
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lockstep
from lockstep.errors import OptionError
from lockstep.proof.recording import watches
from lockstep.proof.records.run import Run

X, Y = torch.randn(10, 4, generator=torch.Generator().manual_seed(0)), torch.arange(10) % 3


@pytest.fixture(scope="module", autouse=True)
def no_hooks_for_other_files() -> Iterator[None]:
    """The hook on all optimizers stays, and other tests count what a step calls."""
    yield
    while watches._hooks:
        watches._hooks.pop().remove()


def make_model() -> Any:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(X), Y).backward()
    optimizer.step()


def test_cells_of_a_notebook_that_are_run_again(tmp_path: Path) -> None:
    """After an interrupt in the midst, with what earlier cells have left."""
    console = code.InteractiveConsole({"F": F, "X": X, "Y": Y, "path": tmp_path})
    stop = "raise KeyboardInterrupt"
    cells = [
        "import lockstep, torch; from torch import nn",
        "model = nn.Linear(4, 3); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
        "def loop(end):\n    with lockstep.record(model, optimizer, path) as record:\n"
        "        for index in range(8):\n            optimizer.zero_grad()\n"
        "            F.cross_entropy(model(X), Y).backward()\n            optimizer.step()\n"
        f"            if index == end: {stop}\n",
        "try: loop(1)\nexcept KeyboardInterrupt: print('stopped')\n",
    ]
    for cell in cells:
        assert not console.push(cell) or not console.push("\n")
    assert Run(tmp_path).num_steps == 2
    console.push("loop(None)")
    assert Run(tmp_path).num_steps == 5
    assert not console.locals["optimizer"]._optimizer_step_pre_hooks


def test_one_block_at_a_time_writes_into_a_folder(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lockstep.record(model, optimizer, tmp_path / "one"):
        with pytest.raises(OptionError, match="two folders"):
            lockstep.record(model, optimizer, tmp_path / "one").__enter__()
        with lockstep.record(model, None, tmp_path / "two", steps=2):
            for _ in range(3):
                step(model, optimizer)
    assert (Run(tmp_path / "one").num_steps, Run(tmp_path / "two").num_steps) == (3, 2)
    with lockstep.record(model, optimizer, tmp_path / "one"):
        for _ in range(3):
            step(model, optimizer)
    assert Run(tmp_path / "one").num_steps == 3


def test_a_block_in_which_nothing_was_recorded_warns(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(make_model().parameters(), lr=0.1)
    with (
        pytest.warns(UserWarning, match="Nothing was recorded"),
        lockstep.record(model, optimizer, tmp_path),
    ):
        optimizer.step()


def test_optimizers_of_zero_are_refused(tmp_path: Path) -> None:
    """As DeepSpeed makes them: around an optimizer whose parameters are flat pieces."""

    class ZeROOptimizer:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

        def step(self) -> None:
            self.optimizer.step()

    class Stage(ZeROOptimizer):
        pass

    class Wrapper:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    for given in (Stage(inner), Wrapper(Stage(inner))):
        with pytest.raises(OptionError, match="ZeRO"):
            lockstep.record(model, given, tmp_path).__enter__()
