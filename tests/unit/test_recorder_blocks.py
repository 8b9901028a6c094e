"""Blocks of ``lockstep.record``: run again, one within another, and those that record nothing."""

import code
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lockstep
from lockstep.errors import OptionError
from lockstep.proof.recording import watches
from lockstep.proof.records.run import Run
from tests import warm
from tests.launchers import ROOT
from tests.netns import HostProcess

X, Y = torch.randn(10, 4, generator=torch.Generator().manual_seed(0)), torch.arange(10) % 3


@pytest.fixture(scope="module", autouse=True)
def no_hooks_for_other_files() -> Iterator[None]:
    """The hook on all optimizers stays, and other tests count what a step calls."""
    yield
    while watches._hooks:
        watches._hooks.pop().remove()


VARIABLES = {**os.environ, **warm.VARIABLES, "PYTHONPATH": str(ROOT)}


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


_KILLED = """
import os, signal
import torch
import lockstep

for name in ("whole", "killed"):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lockstep.record(model, optimizer, name):
        def kill(*_):
            if name == "killed" and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)

        optimizer.register_step_pre_hook(kill)  # behind the recorder's, which has read gradients
        for step in range(5):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
"""


def test_of_a_process_that_is_killed_all_updates_can_be_compared(tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text(_KILLED)
    process = HostProcess([sys.executable, "killed.py"], VARIABLES, tmp_path, like="torch")
    try:
        assert process.finish(200)[0] == -signal.SIGKILL
    finally:
        process.close()
    outcome = lockstep.compare(tmp_path / "killed", tmp_path / "whole")
    assert outcome.has_same_bits
    assert outcome.pairing.num_steps == 3
    assert Run(tmp_path / "whole").num_steps == 5


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
    with (
        pytest.warns(UserWarning, match="nothing was recorded"),
        lockstep.record(model, None, tmp_path),
    ):
        torch.optim.SGD(make_model().parameters(), lr=0.1).step()


def test_an_optimizer_of_other_tensors_is_recorded_and_warns(tmp_path: Path) -> None:
    model = make_model()
    with lockstep.record(model, own := torch.optim.SGD(model.parameters()), tmp_path / "one"):
        step(model, own)
    model, other = make_model(), torch.optim.SGD(make_model().parameters())
    with (
        pytest.warns(UserWarning, match="those of the optimizer are other tensors"),
        lockstep.record(model, other, tmp_path / "other"),
    ):
        step(model, other)
    outcome = lockstep.compare(tmp_path / "other", tmp_path / "one")
    assert outcome.cause is not None
    assert outcome.cause.kind == "never moved"


class ZeROOptimizer:
    """As DeepSpeed has it: around an optimizer whose parameters are flat pieces."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()


class Partitions(ZeROOptimizer):
    """As ZeRO's stages 1 and 2, on the first of two ranks: of a group it has the first part."""

    def __init__(self, groups: list[list[Any]], sizes: list[int], lr: float) -> None:
        self.bit16_groups = groups
        self.sizes = sizes
        flat = [self.flat(group, size) for group, size in zip(groups, sizes, strict=True)]
        for group, size in zip(groups, sizes, strict=True):
            start = 0
            for each in group:
                own = min(each.numel(), size - start)
                each._hp_mapping = None
                if own > 0:
                    addresses = SimpleNamespace(start=start, numel=own)
                    lp = SimpleNamespace(start=0, numel=own)
                    each._hp_mapping = SimpleNamespace(
                        hp_fragment_address=addresses, lp_fragment_address=lp
                    )
                start += each.numel()
        super().__init__(torch.optim.Adam([{"params": [each]} for each in flat], lr=lr))

    def flat(self, tensors: list[Any], size: int) -> Any:
        return torch.cat([each.detach().flatten() for each in tensors])[:size]

    def step(self) -> None:
        groups = self.optimizer.param_groups
        for group, parameters, size in zip(groups, self.bit16_groups, self.sizes, strict=True):
            partition = group["params"][0]
            partition.grad = self.flat([each.grad for each in parameters], size)
            self.optimizer.param_groups = [group]
            self.optimizer.step()
            partition.grad = None
        self.optimizer.param_groups = groups


def test_partitions_of_zero_are_recorded_as_pieces(tmp_path: Path) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    groups = [[each for each in model.parameters() if each.dim() == dim] for dim in (2, 1)]
    zero = Partitions(groups, [14, 6], lr=0.1)  # of the matrices 12 and 2 elements
    with lockstep.record(model, zero, tmp_path, steps=2):
        for _ in range(3):
            model.zero_grad()
            F.cross_entropy(model(X), Y).backward()  # the model keeps its weights
            zero.step()
    assert "step" not in vars(zero)
    run = Run(tmp_path)
    assert run.num_steps == 2
    values = run.values(1)
    for name, each, size in (("0.weight", model[0].weight, 12), ("1.weight", model[1].weight, 2)):
        expected = each.grad.flatten()[:size].norm().item()
        assert values["gradient", name].size == pytest.approx(expected, rel=1e-6)
    assert values["gradient", "0.weight"].is_complete
    assert not values["gradient", "1.weight"].is_complete  # the rest is on the other rank
    assert ("slot", "1.weight exp_avg") in values
    assert ("slot", "1.bias step") in values
    assert {name for kind, name in values if kind == "parameter"} == {
        *("0.weight", "0.bias", "1.weight", "1.bias")
    }
    assert run.options(0)[0]["0.bias"]["lr"] == 0.1


def test_other_optimizers_of_zero_are_refused(tmp_path: Path) -> None:
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
