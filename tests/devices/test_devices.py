"""A model's way to its device and back, data that is there already, and ranks that die."""

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import DeviceError, OptionError, WorkerError
from tests.devices.found import ACCELERATORS, KIND, ranks_on_devices
from tests.faults.jobs import helpers_of

X = torch.randn(24, 16, generator=torch.Generator().manual_seed(1))
Y = torch.arange(24) % 3


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 3))


def make_trainer(strategy: Any, model: nn.Module | None = None, **options: Any) -> lockstep.Trainer:
    return lockstep.Trainer(
        make_model() if model is None else model,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=0.01),
        strategy=strategy,
        **options,
    )


def trained(strategy: Any, *, on_device: bool = False, **options: Any) -> dict[str, torch.Tensor]:
    model = make_model()
    x, y = (one.to(ACCELERATORS[0]) if on_device else one for one in (X, Y))
    if on_device:
        model.to(ACCELERATORS[0])
    trainer = make_trainer(strategy, model, precision="fp64", **options)
    trainer.fit((x, y), batch_size=8, epochs=2, verbose=0)
    return {name: value.cpu() for name, value in trainer.model.state_dict().items()}


def two() -> lockstep.MirroredStrategy:
    return lockstep.MirroredStrategy(ranks_on_devices(2), engine="gloo")


@pytest.mark.parametrize("strategy", [lambda: None, two], ids=["no strategy", "two ranks"])
def test_model_and_data_may_be_on_the_device_already(strategy: Callable[[], Any]) -> None:
    expected = trained(lockstep.SingleDeviceStrategy("cpu"))
    found = trained(strategy(), on_device=True)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-12)


def test_a_model_is_moved_and_stays() -> None:
    model = make_model()
    first = model[0].weight
    trainer = make_trainer(two(), model)
    trainer.fit((X, Y), batch_size=8, verbose=0)
    assert model[0].weight is first
    assert str(first.device) == ACCELERATORS[0]
    assert trainer.plan.devices == tuple(ranks_on_devices(2))
    assert ACCELERATORS[0] in str(trainer.plan)
    assert trainer.evaluate((X, Y))["loss"] > 0
    assert len(trainer.predict(X)) == len(X)
    moments = trainer.optimizer.state[first]["exp_avg"]
    assert str(moments.device) == ACCELERATORS[0]
    assert bool(moments.any())


def test_a_second_fit_and_a_state_go_on() -> None:
    once, twice = make_trainer(two(), precision="fp64"), make_trainer(two(), precision="fp64")
    once.fit((X, Y), batch_size=8, epochs=2, verbose=0)
    twice.fit((X, Y), batch_size=8, verbose=0)
    state = twice.state_dict()
    twice.fit((X, Y), batch_size=8, verbose=0)
    again = make_trainer(two(), precision="fp64")
    again.load_state_dict(state)
    again.fit((X, Y), batch_size=8, verbose=0)
    for trainer in (twice, again):
        for name, value in once.model.state_dict().items():
            assert torch.equal(value, trainer.model.state_dict()[name])


def test_dropout_draws_from_the_devices_own_stream() -> None:
    """And leaves it, and the host's, where they were."""
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.Linear(32, 3))
    torch.get_device_module(KIND).manual_seed(5)
    before = torch.rand(3, device=ACCELERATORS[0])
    torch.get_device_module(KIND).manual_seed(5)
    make_trainer(two(), model).fit((X, Y), batch_size=8, verbose=0)
    assert torch.equal(torch.rand(3, device=ACCELERATORS[0]), before)


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(DeviceError, match=rf"accelerators are: {ACCELERATORS[0]}.*{KIND}:63"):
        lockstep.MirroredStrategy([f"{KIND}:63"])


def test_a_device_is_not_taken_twice_without_leave() -> None:
    with pytest.raises(DeviceError, match=rf"can have one rank.*'{ACCELERATORS[0]}' 2 times"):
        lockstep.MirroredStrategy([ACCELERATORS[0]] * 2)


def test_more_than_there_are_is_refused() -> None:
    with pytest.raises(DeviceError, match=rf"This host has {len(ACCELERATORS)} of {KIND}"):
        lockstep.MirroredStrategy(len(ACCELERATORS) + 1)


class _Killer(lockstep.Callback):
    """Kills a helper a little after the first epoch."""

    killed_at = 0.0

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        if epoch == 0:
            threading.Timer(0.05, self._kill).start()

    def _kill(self) -> None:
        self.killed_at = time.monotonic()
        os.kill(helpers_of(self.trainer)[0], signal.SIGKILL)


@pytest.mark.parametrize("stages", [False, True], ids=["mirrored", "pipeline"])
def test_a_rank_that_dies_is_named_soon(stages: bool) -> None:
    devices, killer = ranks_on_devices(2), _Killer()
    strategy = (
        lockstep.PipelineStrategy(2, microbatches=2, devices=devices, engine="gloo")
        if stages
        else lockstep.MirroredStrategy(devices, engine="gloo")
    )
    trainer = make_trainer(strategy, callbacks=[killer])
    with pytest.raises(WorkerError, match=r"^Rank 1 .*SIGKILL"):
        trainer.fit((X, Y), batch_size=8, epochs=10**6, verbose=0)
    assert time.monotonic() - killer.killed_at < 5
    assert {str(value.device) for value in trainer.model.parameters()} == {ACCELERATORS[0]}
    trainer.callbacks.clear()
    trainer.fit((X, Y), batch_size=8, verbose=0)


def test_out_of_memory_says_rank_device_and_what_was_held() -> None:
    """On the helper's rank, which alone asks for more than any device has."""
    trainer = make_trainer(two(), _Greedy())
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.fit((X, Y), batch_size=8, epochs=9, verbose=0)
    notes = " ".join(caught.value.__notes__)
    assert f"Rank 1 had no memory left on {ranks_on_devices(2)[1]}" in notes
    assert "KiB of parameters" in notes
    assert "slots of the optimizer" in notes


class _Looking(lockstep.Callback):
    """Evaluates between two steps."""

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self.trainer.evaluate((X, Y))


def test_a_callback_may_evaluate_where_the_whole_model_is() -> None:
    make_trainer(two(), callbacks=[_Looking()]).fit((X, Y), batch_size=8, verbose=0)
    stages = lockstep.PipelineStrategy(
        2, microbatches=2, devices=ranks_on_devices(2), engine="gloo"
    )
    with pytest.raises(OptionError, match="not all of the model"):
        make_trainer(stages, callbacks=[_Looking()]).fit((X, Y), batch_size=8, verbose=0)


class _Greedy(nn.Module):
    """Wants a petabyte, in the second step, where it is not in the script's process."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.script, self.calls = nn.Linear(16, 64), os.getpid(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and torch.is_grad_enabled():
            self.calls += 1
        if self.calls > 6 and os.getpid() != self.script:
            torch.empty(1 << 50, dtype=torch.uint8, device=x.device)
        found: torch.Tensor = self.layer(x)
        return found
