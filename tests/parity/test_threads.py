"""Replicas that compute with several threads each, where cores outnumber replicas."""

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.errors import OptionError
from lockstep.strategies.base import Strategy


class Threaded(nn.Module):
    """Notes with how many threads its forward pass runs, in any process."""

    threads: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 3))
        self.register_buffer("threads", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.threads.fill_(torch.get_num_threads())
        outputs: Tensor = self.layers(inputs)
        return outputs


@pytest.mark.parametrize(
    "strategy",
    [lockstep.MirroredStrategy, lockstep.MultiWorkerMirroredStrategy],
)
def test_replicas_with_several_threads_train_the_same(strategy: type[Strategy]) -> None:
    torch.manual_seed(0)
    data = torch.randn(768, 64).double(), torch.randint(3, (768,))
    ours = Threaded().double()
    plain, threads = copy.deepcopy(ours), torch.get_num_threads()
    strategies = lockstep.SingleDeviceStrategy(), strategy(2, threads_per_device=2)
    for model, on in zip((plain, ours), strategies, strict=True):
        trainer = lockstep.Trainer(
            model,
            loss=nn.CrossEntropyLoss(),
            optimizer=partial(torch.optim.Adam, lr=1e-2),
            strategy=on,
            precision="fp64",
        )
        trainer.fit(data, batch_size=256, epochs=2, verbose=0)
    assert "cpu:0, cpu:1 (2 threads each)" in str(trainer.plan)
    assert ours.threads == 2  # on both replicas: buffers that differ are refused
    assert torch.get_num_threads() == threads
    for name, value in plain.layers.state_dict().items():
        torch.testing.assert_close(ours.layers.state_dict()[name], value, rtol=1e-12, atol=1e-13)


def test_threads_are_a_number() -> None:
    for number in (0, 1.5, "two"):
        with pytest.raises(OptionError, match="`threads_per_device` must be an integer"):
            lockstep.MirroredStrategy(2, threads_per_device=number)  # type: ignore[arg-type]
    crowded = lockstep.MirroredStrategy(2, threads_per_device=1000)
    (note,) = crowded.plan(nn.Linear(2, 2), batch_size=8).notes
    assert note.startswith("2 replicas of 1000 threads share ")
