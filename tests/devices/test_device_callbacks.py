"""What callbacks change on accelerators comes to all ranks; what would be lost is refused."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import OptionError
from lockstep.strategies.base import Strategy
from tests.devices.found import ranks_on_devices
from tests.thorough import core_of

X = torch.randn(25, 16, generator=torch.Generator().manual_seed(1))
Y = torch.arange(25) % 3

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "mirrored": lambda: lockstep.MirroredStrategy(ranks_on_devices(2), engine="gloo"),
    "sharded": lambda: lockstep.FullyShardedStrategy(ranks_on_devices(2), engine="gloo"),
    "tensor": lambda: lockstep.TensorParallelStrategy(devices=ranks_on_devices(2), engine="gloo"),
    "pipeline": lambda: lockstep.PipelineStrategy(
        2, microbatches=4, devices=ranks_on_devices(2), engine="gloo"
    ),
    "offloaded": lambda: lockstep.FullyShardedStrategy(
        ranks_on_devices(2), offload="parameters", engine="gloo"
    ),
    "gloo between cores": lambda: lockstep.MirroredStrategy(["cpu"] * 2, engine="gloo"),
}


def make_trainer(strategy: Strategy, *callbacks: lockstep.Callback) -> lockstep.Trainer:
    torch.manual_seed(0)
    return lockstep.Trainer(
        nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3)),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=0.01),
        strategy=strategy,
        callbacks=list(callbacks),
        precision="fp64",
        seed=3,
    )


def halve_weight(trainer: Any) -> None:
    weight = trainer.model[2].weight
    weight.data = weight.data / 2


def halve_weight_on_the_host(trainer: Any) -> None:
    weight = trainer.model[2].weight
    weight.data = weight.detach().cpu() / 2


def clear_averages(trainer: Any) -> None:
    for slots in trainer.optimizer.state.values():
        slots["exp_avg"].zero_()


def clear_data_of_averages(trainer: Any) -> None:
    for slots in trainer.optimizer.state.values():
        slots["exp_avg"].data.zero_()


def set_gradients(trainer: Any) -> None:
    for parameter in trainer.model.parameters():
        parameter.grad = torch.ones_like(parameter)


CHANGES = (
    halve_weight,
    halve_weight_on_the_host,
    clear_averages,
    clear_data_of_averages,
    set_gradients,
)


class AtEpochs(lockstep.Callback):
    """Changes something at the end of every epoch, the last one included."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        self._change = change

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        self._change(self.trainer)


def trained(strategy: Strategy, change: Callable[[Any], None]) -> dict[str, torch.Tensor]:
    trainer = make_trainer(strategy, AtEpochs(change))
    for _ in range(2):
        trainer.fit((X, Y), batch_size=8, epochs=2, verbose=0)
    predicted = trainer.predict(X, batch_size=7)
    return {"predictions": predicted.cpu()} | {
        name: value.cpu() for name, value in trainer.model.state_dict().items()
    }


@pytest.mark.parametrize(
    ("name", "change"),
    core_of(
        [(name, change) for name in STRATEGIES for change in CHANGES],
        [("pipeline", halve_weight), ("sharded", clear_averages)],
        [("mirrored", clear_data_of_averages), ("offloaded", set_gradients)],
    ),
)
def test_what_a_callback_changes_comes_to_all_ranks(
    name: str, change: Callable[[Any], None]
) -> None:
    found = trained(STRATEGIES[name](), change)
    for key, value in trained(lockstep.SingleDeviceStrategy("cpu"), change).items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=1e-10)


class InEpochs(AtEpochs):
    """Changes something after the second step of each epoch."""

    def takes_state(self, batch: int) -> bool:
        return batch == 1

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if batch == 1:
            self._change(self.trainer)

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        pass


class AtValidation(AtEpochs):
    """Changes something before every validation."""

    def on_test_begin(self, logs: object = None) -> None:
        self._change(self.trainer)

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        pass


@pytest.mark.parametrize(
    ("name", "change", "kind"),
    core_of(
        [
            (name, change, kind)
            for name in STRATEGIES
            if name != "offloaded"
            for change in (clear_averages, clear_data_of_averages)
            for kind in (InEpochs, AtValidation)
        ],
        [("mirrored", clear_averages, InEpochs)],
        [("gloo between cores", clear_data_of_averages, AtValidation)],
    ),
)
def test_slots_that_other_ranks_would_not_see_are_refused_within_an_epoch(
    name: str, change: Callable[[Any], None], kind: type[AtEpochs]
) -> None:
    trainer = make_trainer(STRATEGIES[name](), kind(change))
    with pytest.raises(OptionError, match="may read the optimizer's slots, not change them"):
        trainer.fit((X, Y), batch_size=8, epochs=2, validation_data=(X, Y), verbose=0)


def test_in_shared_memory_ranks_see_them() -> None:
    found = []
    for strategy in (lockstep.SingleDeviceStrategy("cpu"), lockstep.MirroredStrategy(["cpu"] * 2)):
        trainer = make_trainer(strategy, InEpochs(clear_averages))
        trainer.fit((X, Y), batch_size=8, epochs=2, verbose=0)
        found.append([one.detach() for one in trainer.model.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-10)
