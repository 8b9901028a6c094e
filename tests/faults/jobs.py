"""Small training jobs in this process, whose models misbehave on a given rank and step."""

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import lockstep

NUM_SAMPLES = 24
BATCH_SIZE = 8
STEPS_PER_EPOCH = 3

Act = Callable[[], None]


class Net(nn.Module):
    """Calls ``act`` in forward, from the given step on, on rank 0 or on the others.

    Each rank has one share, so a forward is a step.
    """

    def __init__(self, act: Act | None = None, *, step: int = 0, on: str = "helpers") -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 3)
        self.act, self.step, self.on = act, step, on
        self.script = os.getpid()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        is_helper = os.getpid() != self.script
        here = self.on == "all" or is_helper == (self.on == "helpers")
        if self.act is not None and here and self.calls > self.step:
            self.act()
        return self.second(torch.relu(self.first(x)))  # type: ignore[no-any-return]


def make_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_SAMPLES, 16, generator=generator)
    return inputs, torch.randint(0, 3, (NUM_SAMPLES,), generator=generator)


def make_stages() -> nn.Module:
    """A model that can be cut, with as many inputs and outputs as ``Net``."""
    layers = (nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 3))
    return nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in layers))


def make_trainer(
    devices: int,
    act: Act | None = None,
    *,
    step: int = 0,
    on: str = "helpers",
    loss: Any = None,
    callbacks: tuple[lockstep.Callback, ...] = (),
    timeout_seconds: float = 60.0,
    engine: str | None = None,
    in_stages: bool = False,
    strategy: Any = None,
    kind: type[Net] = Net,
) -> lockstep.Trainer:
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(0)
        model = make_stages() if in_stages else kind(act, step=step, on=on)
    make = lockstep.PipelineStrategy if in_stages else lockstep.MirroredStrategy
    return lockstep.Trainer(
        model,
        loss=loss or nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=1e-3),
        strategy=strategy or make(devices, timeout_seconds=timeout_seconds, engine=engine),
        callbacks=callbacks,
    )


def fit(trainer: lockstep.Trainer, epochs: int = 1, **options: Any) -> lockstep.History:
    return trainer.fit(make_data(), epochs=epochs, batch_size=BATCH_SIZE, verbose=0, **options)


def warm_up(devices: int) -> None:
    """Start helpers, and have them import what they need: the next trainer's are those.

    A test with a short time-out begins so, since the first call to a helper may take longer.
    """
    trainer = make_trainer(devices)
    fit(trainer)
    trainer.close()


def model_of(trainer: lockstep.Trainer) -> Net:
    assert isinstance(trainer.model, Net)
    return trainer.model


def helpers_of(trainer: Any) -> list[int]:
    """Process ids, by rank from 1."""
    team = trainer._runner.session._team
    assert team is not None
    return list(team.pids())


def template_of(pid: int) -> int:
    """The process that a helper was forked from."""
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def sleep_forever() -> None:
    time.sleep(1000)
