"""BatchNorm in all the ways it is used, with one share per replica and with several."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lockstep
from tests.thorough import core_of

INPUTS = torch.randn(44, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TARGETS = torch.randint(0, 3, (44,), generator=torch.Generator().manual_seed(1))


class Activated(nn.BatchNorm1d):
    """Does more than its base, as timm's BatchNormAct2d."""

    def forward(self, input: Tensor) -> Tensor:
        return F.relu(super().forward(input))


class Net(nn.Module):
    """Linear, then what ``use`` does with a norm, then linear."""

    def __init__(self, norm: nn.Module, use: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = norm
        self.last = nn.Linear(8, 3)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.use(self.norm, self.first(x)).tanh())
        return output


class Counting(nn.Module):
    """Its output depends on how often it was called, which a buffer counts."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        output: Tensor = self.norm(x * (1 + self.calls.clone()))
        self.calls.add_(1)
        return output


def plainly(norm: nn.Module, x: Tensor) -> Tensor:
    output: Tensor = norm(x)
    return output


def by_keyword(norm: nn.Module, x: Tensor) -> Tensor:
    output: Tensor = norm(input=x)
    return output


def by_base(norm: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(norm, nn.BatchNorm1d)
    return nn.BatchNorm1d.forward(norm, x)


def recomputed(norm: nn.Module, x: Tensor, *, reentrant: bool) -> Tensor:
    output: Any = checkpoint(norm, x, use_reentrant=reentrant)
    assert isinstance(output, Tensor)
    return output


NETS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: Net(nn.BatchNorm1d(8), plainly),
    "no affine": lambda: Net(nn.BatchNorm1d(8, affine=False), plainly),
    "no tracking": lambda: Net(nn.BatchNorm1d(8, track_running_stats=False), plainly),
    "plain average": lambda: Net(nn.BatchNorm1d(8, momentum=None), plainly),
    "sync": lambda: Net(nn.SyncBatchNorm(8), plainly),
    "frozen": lambda: Net(nn.BatchNorm1d(8).eval(), plainly),
    "subclass": lambda: Net(Activated(8), plainly),
    "keyword": lambda: Net(nn.BatchNorm1d(8), by_keyword),
    "base": lambda: Net(nn.BatchNorm1d(8), by_base),
    "checkpoint": lambda: Net(nn.BatchNorm1d(8), partial(recomputed, reentrant=False)),
    "reentrant": lambda: Net(nn.BatchNorm1d(8), partial(recomputed, reentrant=True)),
    "two": lambda: Net(nn.Sequential(nn.BatchNorm1d(8), nn.ReLU(), nn.BatchNorm1d(8)), plainly),
    "counting": lambda: Net(Counting(), plainly),
    "spectral": lambda: Net(
        nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
            nn.BatchNorm1d(8),
            nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
        ),
        plainly,
    ),
}


@pytest.mark.parametrize(("devices", "num_shares"), core_of([(2, 2), (1, 3), (2, 5)], [(2, 5)], []))
@pytest.mark.parametrize("name", NETS)
def test_batch_norm_sees_the_whole_batch(name: str, devices: int, num_shares: int) -> None:
    torch.manual_seed(0)
    job = lockstep.Job(
        NETS[name](),
        nn.CrossEntropyLoss(),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        (INPUTS, TARGETS),
        batch_size=13,
    )
    report = lockstep.verify(job, lockstep.MirroredStrategy(devices, num_shares=num_shares))
    assert report.passed, str(report)


def test_gradients_of_several_checkpoints_add_up() -> None:
    torch.manual_seed(0)
    job = lockstep.Job(
        Twice(), nn.CrossEntropyLoss(), partial(torch.optim.SGD, lr=0.1), (INPUTS, TARGETS), 13
    )
    report = lockstep.verify(job, lockstep.MirroredStrategy(2, num_shares=5))
    assert report.passed, str(report)


class Twice(nn.Module):
    """One layer in two reentrant checkpoints: its gradient comes in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.shared = nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Any = self.norm(x)
        for _ in range(2):
            hidden = checkpoint(self.shared, hidden, use_reentrant=True)
            hidden = hidden.tanh()
        output: Tensor = self.last(hidden)
        return output


def test_twice_through_a_gradient_says_what_does_not_work() -> None:
    job = lockstep.Job(
        Net(nn.BatchNorm1d(8), penalised),
        nn.CrossEntropyLoss(),
        partial(torch.optim.SGD, lr=0.1),
        (INPUTS, TARGETS),
        13,
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        lockstep.verify(job, lockstep.MirroredStrategy(1, num_shares=2))


def penalised(norm: nn.Module, x: Tensor) -> Tensor:
    normed: Tensor = norm(x)
    (gradient,) = torch.autograd.grad(normed.pow(2).sum(), x, create_graph=True)
    return normed + gradient
