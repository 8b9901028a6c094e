"""Reentrant checkpoints, which allow ``backward`` and not ``autograd.grad``, in pipelines."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import lockstep
from lockstep.capture.seeding import gradients_of
from tests.thorough import core_of

# Of torch's, where a model is run without gradients.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")

STRATEGIES = {
    "1f1b": lockstep.PipelineStrategy(2, microbatches=3),
    "gpipe-again": lockstep.PipelineStrategy(2, None, 2, "gpipe", recompute=True),
    "zb-h2": lockstep.PipelineStrategy(2, None, 4, "zb-h2"),
    "3-zb-h1-gloo": lockstep.PipelineStrategy(3, None, 4, "zb-h1", engine="gloo"),
    "interleaved": lockstep.PipelineStrategy(2, None, 4, "interleaved"),
    "data-2-pipe-2": lockstep.HybridStrategy(2, 2, microbatches=2),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(6, 40), nn.Linear(40, 6)
        self.narrow.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.changed, x, use_reentrant=True)
        return x + output

    def changed(self, x: Tensor) -> Tensor:
        output: Tensor = self.narrow(torch.tanh(self.wide(x)))
        return output


class Net(nn.Module):
    """Blocks, then a sequence in segments."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(5, 6), nn.Sequential(Block(), Block())
        layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)]
        self.tail, self.last = nn.Sequential(*layers), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.first(x))
        output: Tensor = self.last(checkpoint_sequential(self.tail, 2, x, use_reentrant=True))
        return output


@pytest.mark.parametrize("name", core_of(list(STRATEGIES), ["1f1b", "zb-h2"]))
def test_training_equals_one_device(name: str) -> None:
    torch.manual_seed(0)
    data = torch.randn(40, 5), torch.randint(3, (40,))
    optimizer = partial(torch.optim.SGD, lr=0.1)
    job = lockstep.Job(Net(), nn.CrossEntropyLoss(), optimizer, data, batch_size=8)
    report = lockstep.verify(job, STRATEGIES[name], steps=3)
    assert report.passed, str(report)


def test_nothing_is_left_of_measuring() -> None:
    """Gradients are as before, and nobody who waits for one is called."""
    net, x = Net().double(), torch.randn(4, 5, dtype=torch.float64)
    parameters = [one for one in net.parameters() if one.requires_grad]
    net(x).sum().backward()
    wanted = [one.grad for one in parameters]
    before = [torch.ones_like(one) for one in parameters]
    called: list[Tensor] = []
    for one, gradient in zip(parameters, before, strict=True):
        one.grad = gradient
        one.register_post_accumulate_grad_hook(called.append)
    hidden = net.first(x)
    tail = checkpoint_sequential(net.tail, 2, net.blocks(hidden), use_reentrant=True)
    found = gradients_of([net.last(tail).sum()], [hidden, *parameters], [*net.parameters()])
    assert found[0] is not None
    torch.testing.assert_close(found[0].sum(0), wanted[1])
    torch.testing.assert_close(found[1:], wanted)
    assert all(one.grad is kept for one, kept in zip(parameters, before, strict=True))
    assert not called
    net(x).sum().backward()
    assert len(called) == len(parameters), "they wait as before"
