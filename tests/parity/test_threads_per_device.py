"""Ranks that compute with several threads each, where cores outnumber them."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.errors import OptionError
from lockstep.strategies.base import Strategy


class Noting(nn.Module):
    """Notes with how many threads it runs, in any process."""

    threads: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("threads", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and not inputs.isnan().any():  # stages run it as it is, untraced
            self.threads.fill_(torch.get_num_threads())
        return inputs


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(64, 256), nn.ReLU(), Noting(), nn.Linear(256, 3)
    return nn.Sequential(*layers).double()


STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "mirrored": lockstep.MirroredStrategy,
    "hosts": lockstep.MultiWorkerMirroredStrategy,
    "sharded": lockstep.FullyShardedStrategy,
    "pipeline": lockstep.PipelineStrategy,
    "hybrid": partial(lockstep.HybridStrategy, 2),
    "hybrid, tensor": partial(lockstep.HybridStrategy, 1, tensor=2),
}


@pytest.mark.parametrize(
    "name",
    [
        one if one in ("mirrored", "pipeline") else pytest.param(one, marks=pytest.mark.exhaustive)
        for one in STRATEGIES
    ],
)
def test_ranks_with_several_threads_train_the_same(name: str) -> None:
    data = torch.randn(768, 64).double(), torch.randint(3, (768,))
    plain, ours, threads = make_model(), make_model(), torch.get_num_threads()
    given = () if name == "hybrid, tensor" else (2,)
    strategies = lockstep.SingleDeviceStrategy(), STRATEGIES[name](*given, threads_per_device=2)
    for model, on in zip((plain, ours), strategies, strict=True):
        trainer = lockstep.Trainer(
            model,
            loss=nn.CrossEntropyLoss(),
            optimizer=partial(torch.optim.Adam, lr=1e-2),
            strategy=on,
            precision="fp64",
        )
        trainer.fit(data, batch_size=256, epochs=2, verbose=0)
    assert "(2 threads each)" in str(trainer.plan)
    found, wanted = ours.state_dict(), plain.state_dict()
    assert found.pop("2.threads") == 2  # on all replicas: buffers that differ are refused
    assert torch.get_num_threads() == threads == wanted.pop("2.threads")
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-12, atol=1e-13)


def test_threads_are_a_number() -> None:
    for number in (0, 1.5, "two"):
        with pytest.raises(OptionError, match="`threads_per_device` must be an integer"):
            lockstep.MirroredStrategy(2, threads_per_device=number)  # type: ignore[arg-type]
    crowded = lockstep.MirroredStrategy(2, threads_per_device=1000)
    (note,) = crowded.plan(nn.Linear(2, 2), batch_size=8).notes
    assert note.startswith("2 processes of 1000 threads share ")
