"""Models that use parts of torch which few models use: as in a plain loop, under each technique."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.errors import OptionError
from lockstep.strategies.base import Strategy
from tests.thorough import core_of

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "mirrored 2": lambda: lockstep.MirroredStrategy(2),
    "sharded 2": lambda: lockstep.FullyShardedStrategy(2, engine="gloo"),
    "tensor 2": lambda: lockstep.TensorParallelStrategy(2),
    "tensor 2, gloo": lambda: lockstep.TensorParallelStrategy(2, engine="gloo"),
    "pipeline 2": lambda: lockstep.PipelineStrategy(2, microbatches=2),
    "data 2, pipe 2": lambda: lockstep.HybridStrategy(2, 2, microbatches=2),
}


def _squashed(x: Tensor, factor: float) -> Tensor:
    return torch.tanh(x) * factor


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    squashed = torch.jit.script(_squashed)


class Scripted(nn.Module):
    """Calls a function of TorchScript, which rounds otherwise after its first calls."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.c(squashed(self.b(squashed(self.a(x), 1.5)), 0.7))
        return output


class Nested(nn.Module):
    """Packs sequences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(2, 5), nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        lengths = 1 + (x[:, :2] > 0).sum(1)
        parts = [row.view(3, 2)[:length] for row, length in zip(x, lengths.tolist(), strict=True)]
        packed = torch.nested.nested_tensor(parts, layout=torch.jagged)
        means = [one.mean(0) for one in torch.tanh(self.a(packed)).unbind()]
        output: Tensor = self.c(torch.tanh(self.b(torch.stack(means))))
        return output


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8, dtype=torch.complex128)
        self.b, self.c = nn.Linear(16, 8), nn.Linear(8, 3)
        self.phases: Tensor
        self.register_buffer(
            "phases", torch.polar(torch.ones(8), torch.arange(8.0)).to(torch.complex128)
        )

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.view_as_real(self.a(x.to(torch.complex128)) * self.phases).flatten(1)
        output: Tensor = self.c(torch.tanh(self.b(turned)))
        return output


class Again(Scripted):
    """Computes a layer again in backward, from what another has made."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.a(x))
        hidden = checkpoint(lambda given: torch.tanh(self.b(given)), hidden, use_reentrant=False)
        output: Tensor = self.c(hidden)
        return output


class TransposeOf(nn.Module):
    """The weight of a layer that is no module of this one."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.hidden = [layer]

    def forward(self, weight: Tensor) -> Tensor:
        return self.hidden[0].weight.t() + 0 * weight


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 3)
        parametrize.register_parametrization(self.b, "weight", TransposeOf(self.a))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))
        return output


MODELS: dict[str, Callable[[], nn.Module]] = {
    "TorchScript": Scripted,
    "nested": Nested,
    "complex": Complex,
    "tied": Tied,
    "computed again": Again,
}


@pytest.mark.parametrize(
    ("model", "strategy"),
    core_of(
        [(model, strategy) for model in MODELS for strategy in STRATEGIES],
        [("TorchScript", "mirrored 2")],
        [
            *(("TorchScript", "tensor 2"), ("TorchScript", "pipeline 2"), ("nested", "tensor 2")),
            *(
                ("complex", "pipeline 2"),
                ("tied", "data 2, pipe 2"),
                ("computed again", "tensor 2"),
            ),
        ],
    ),
)
def test_training_equals_one_device(model: str, strategy: str) -> None:
    report = lockstep.verify(job_of(MODELS[model]()), STRATEGIES[strategy](), steps=4)
    assert report.passed, str(report)


def job_of(model: nn.Module) -> lockstep.Job:
    torch.manual_seed(5)
    x = torch.randn(22, 6)
    return lockstep.Job(model, nn.CrossEntropyLoss(), torch.optim.Adam, (x, x.argmax(1) % 3), 9)


def test_a_layer_is_not_cut_off_from_a_weight_that_it_uses() -> None:
    with pytest.raises(OptionError, match=r"calls 'b', which uses 'a\.weight'"):
        lockstep.verify(job_of(Tied()), lockstep.PipelineStrategy(cuts=["b"]))
