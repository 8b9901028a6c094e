"""``lockstep.verify`` says where a difference begins and why, and what rounding can do."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep
from lockstep.cli.main import main
from lockstep.errors import OptionError
from lockstep.proof.report import Report

ONE = lockstep.MirroredStrategy(devices=1, num_shares=2)
SGD = partial(torch.optim.SGD, lr=0.1)
X = torch.linspace(-2, 2, 21 * 6).reshape(21, 6).sin()
Y = torch.arange(21) % 3


class Counting(nn.Module):
    """Does something else from its seventh call on: the plain loop has fewer calls."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def factor(self) -> float:
        self.num_calls += 1
        return 1 + 1e-8 * (self.num_calls > 6)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor()


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class Backwards(Counting):
    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = Scaled.apply(x, self.factor())  # type: ignore[no-untyped-call]
        return scaled


class Rounded(nn.Module):
    """Computes in less than it is asked to, and makes sums of it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.dtype), self.layer.weight.to(self.dtype)).to(x.dtype)


class Net(nn.Module):
    def __init__(self, middle: nn.Module | None = None, between: Counting | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(6, 8)
        self.middle = nn.Tanh() if middle is None else middle
        self.last = nn.Linear(8, 3)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        factor = 1.0 if self.between is None else self.between.factor()
        found: Tensor = self.last(self.middle(self.first(x)) * factor)
        return found


class CountingLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counting = Counting()

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        values = F.cross_entropy(output, target, reduction="none")
        return values * self.counting.factor()


def job(model: nn.Module, loss: Any = None, **changes: Any) -> lockstep.Job:
    parts = {"optimizer": SGD, "data": (X, Y), "batch_size": 5, **changes}
    return lockstep.Job(model, nn.CrossEntropyLoss() if loss is None else loss, **parts)


CAUSES: dict[str, tuple[Callable[[], lockstep.Job], str, str | None]] = {
    "a module": (lambda: job(Net(Counting())), "forward", "middle"),
    "code between modules": (lambda: job(Net(between=Counting())), "code", "last"),
    "a backward pass": (lambda: job(Net(Backwards())), "backward", "first"),
    "the loss": (lambda: job(Net(), CountingLoss()), "loss", None),
}


@pytest.mark.parametrize("name", CAUSES)
def test_a_cause_is_named(name: str) -> None:
    make, kind, module = CAUSES[name]
    report = lockstep.verify(make(), ONE)
    assert not report.passed
    assert report.cause is not None
    assert (report.cause.kind, report.cause.module, report.cause.step) == (kind, module, 3)
    assert report.conditioning is not None
    assert report.conditioning.module is None


SALT = iter(range(1, 1_000_000))


class Drifting(nn.Module):
    """Each run of a process is another."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + 1e-4 / next(SALT))


def test_what_differs_from_run_to_run_is_said() -> None:
    report = lockstep.verify(job(Net(Drifting())), ONE, steps=2, bits=True)
    verdict = {one.name: one for one in report.bits}["run to run"]
    assert not report.passed
    assert not verdict.is_same
    assert verdict.text == "what 'middle' returns, rank 0, step 0"
    assert "Bits, run to run: other bits, first in what 'middle' returns" in str(report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_computes_in_less_is_held_to_what_rounding_can_do(dtype: torch.dtype) -> None:
    data = torch.randn(21, 6, generator=torch.Generator().manual_seed(0)), Y
    report = lockstep.verify(job(Net(Rounded(dtype)), data=data), ONE, steps=3)
    assert report.passed, report
    assert report.conditioning is not None
    assert (report.conditioning.dtype, report.conditioning.module) == (dtype, "middle")
    assert report.kinds[1].worst.relative > 1e-12
    assert 1e-12 < report.tolerance < 100 * torch.finfo(dtype).eps
    assert "which is what rounding can do here" in " ".join(str(report).split())


def test_rounding_excuses_no_fault() -> None:
    wrong = nn.Sequential(Rounded(torch.float32), Counting())
    wrong[1].factor = lambda: 1 + 1e-3 * (next(SALT) % 2)  # type: ignore[assignment]
    report = lockstep.verify(job(Net(wrong)), ONE, steps=2)
    assert not report.passed


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, 21, 5):
        yield X[start : start + 5], Y[start : start + 5]


def own_step(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


OTHER_JOBS: dict[str, Callable[[], lockstep.Job]] = {
    "a stream": lambda: job(Net(), data=batches),
    "a step of one's own": lambda: lockstep.Job(Net(), None, SGD, (X, Y), 5, train_step=own_step),
}


@pytest.mark.parametrize("name", OTHER_JOBS)
def test_streams_and_steps_of_ones_own(name: str) -> None:
    report = lockstep.verify(OTHER_JOBS[name](), ONE, steps=7)
    assert report.passed, report
    assert report.kinds[0].count == 7


def test_a_stream_that_ends_is_a_difference() -> None:
    report = lockstep.verify(job(Net(), data=batches()), ONE, steps=9)
    assert str(report.first_difference) == "loss, step 5: 5 steps were made instead of 9"


def test_a_job_has_a_loss_or_a_step() -> None:
    with pytest.raises(OptionError, match=r"either a loss or a train_step\. Received: both"):
        lockstep.Job(Net(), F.cross_entropy, SGD, (X, Y), train_step=own_step)
    with pytest.raises(OptionError, match="one function"):
        lockstep.Job(Net(), None, SGD, (X, Y), train_step={"a": own_step})


STRATEGIES = {
    "mirrored": lockstep.MirroredStrategy(devices=2),
    "pipeline": lockstep.PipelineStrategy(cuts=["last"], microbatches=2),
}


@pytest.mark.parametrize("name", [pytest.param("mirrored", marks=pytest.mark.thorough), "pipeline"])
def test_one_unit_in_the_last_place_is_named(name: str) -> None:
    report = lockstep.verify(job(Net()), STRATEGIES[name], steps=2, bits=True, self_test=True)
    assert report.passed, report
    found = {one.name: one.is_same for one in report.bits}
    planted = [place for place in found if place.startswith("planted in ")]
    assert len(planted) == 2
    assert all(found[place] and place.endswith("rank 1, step 1") for place in planted)
    assert found["run to run"]
    assert found.get("one device, 2 shares", True)
    assert report.bits[-3].name == "one device"
    assert report.bits[-3].passed


def test_a_report_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "verify_json_job.py"
    path.write_text(
        "from tests.parity.test_verify_causes import CAUSES\nmake_job = CAUSES['a module'][0]\n"
    )
    assert main(["verify", f"{path}:make_job", "--devices", "1", "--shares", "2", "--json"]) == 1
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (shown["version"], shown["passed"], shown["status"]) == (1, False, 1)
    assert shown["first_difference"]["kind"] == "loss"
    assert shown["cause"]["module"] == "middle"
    assert {one["kind"] for one in shown["kinds"]} == {"loss", "gradient", "parameter"}
    assert shown["conditioning"]["dtype"] == "float64"
    assert shown.keys() == Report.__annotations__.keys() - {"differences"} | {
        "version",
        "passed",
        "status",
        "tolerance",
        "num_differences",
        "first_difference",
    }
