"""The optimizer's slots in shared memory: its own, the same before and after every fit."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import lockstep
from lockstep.errors import NonFiniteLossError

INPUTS = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
TARGETS = INPUTS.sum(1, keepdim=True)


def make_model() -> nn.Module:
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 1))


def make_trainer(
    optimizer: Any, model: nn.Module | None = None, devices: int = 2, loss: Any = None
) -> lockstep.Trainer:
    return lockstep.Trainer(
        model or make_model(),
        loss=loss or nn.MSELoss(),
        optimizer=optimizer,
        strategy=lockstep.MirroredStrategy(devices, num_shares=2),
    )


def fit(trainer: lockstep.Trainer, epochs: int = 2) -> None:
    trainer.fit((INPUTS, TARGETS), epochs=epochs, batch_size=10, verbose=0)


def slots_of(trainer: lockstep.Trainer) -> list[dict[str, Tensor]]:
    assert trainer.optimizer is not None
    state = trainer.optimizer.state_dict()["state"]
    return [
        {name: torch.as_tensor(value).clone() for name, value in slots.items()}
        for _, slots in sorted(state.items())
    ]


def assert_same(left: list[dict[str, Tensor]], right: list[dict[str, Tensor]]) -> None:
    assert len(left) == len(right)
    for ours, theirs in zip(left, right, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-7)


OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.01),
    "momentum": lambda p: optim.SGD(p, lr=0.01, momentum=0.9, dampening=0.1),
    "adam": lambda p: optim.Adam(p, lr=0.01, amsgrad=True),
    "fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1),
    "rprop": lambda p: optim.Rprop(p, lr=0.01),
    "nadam": lambda p: optim.NAdam(p, lr=0.01),
    "asgd": lambda p: optim.ASGD(p, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_fits_leave_the_slots_of_one_rank(name: str) -> None:
    found = []
    for devices in (1, 2):
        trainer = make_trainer(OPTIMIZERS[name], devices=devices)
        fit(trainer)
        fit(trainer)
        found.append(slots_of(trainer))
    assert_same(*found)


def test_slots_that_are_loaded_between_two_fits_count() -> None:
    trainer, other = make_trainer(OPTIMIZERS["adam"]), make_trainer(OPTIMIZERS["adam"])
    fit(trainer)
    assert trainer.optimizer is not None
    assert other.optimizer is not None
    other.model.load_state_dict(trainer.model.state_dict())
    other.optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))
    ran, trained = other._runner, trainer._runner
    ran.steps_trained, ran.epochs_trained = trained.steps_trained, trained.epochs_trained
    fit(trainer)
    fit(other)
    assert_same(slots_of(trainer), slots_of(other))


def test_each_optimizer_of_a_trainer_keeps_its_own_slots() -> None:
    model = make_model()
    first, second = (OPTIMIZERS["adam"](model.parameters()) for _ in range(2))
    trainer = make_trainer(first, model)
    fit(trainer)
    before = slots_of(trainer)
    trainer.optimizer = second
    fit(trainer)
    trainer.optimizer = first
    assert_same(slots_of(trainer), before)


def test_slots_swapped_between_parameters_are_swapped() -> None:
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    model = nn.Sequential(first, second, nn.Linear(6, 1))
    trainer = make_trainer(OPTIMIZERS["momentum"], model)
    fit(trainer)
    optimizer = trainer.optimizer
    assert optimizer is not None
    left, right = first.weight, second.weight
    kept = [optimizer.state[one]["momentum_buffer"].clone() for one in (left, right)]
    optimizer.state[left], optimizer.state[right] = optimizer.state[right], optimizer.state[left]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        group["momentum"] = 1.0
        group["dampening"] = 1.0
    fit(trainer, epochs=1)  # changes nothing
    assert torch.equal(optimizer.state[left]["momentum_buffer"], kept[1])
    assert torch.equal(optimizer.state[right]["momentum_buffer"], kept[0])


def test_a_slot_that_is_none_is_made_anew() -> None:
    trainer = make_trainer(OPTIMIZERS["momentum"])
    assert trainer.optimizer is not None
    for parameter in trainer.model.parameters():
        trainer.optimizer.state[parameter]["momentum_buffer"] = None
    fit(trainer)
    fresh = make_trainer(OPTIMIZERS["momentum"])
    fit(fresh)
    assert_same(slots_of(trainer), slots_of(fresh))


def test_parameters_that_left_the_model_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 1))
    trainer = make_trainer(OPTIMIZERS["adam"], model)
    assert trainer.optimizer is not None
    head = nn.Linear(40, 1)
    model[2] = head
    trainer.optimizer.add_param_group({"params": list(head.parameters())})
    fit(trainer)
    assert len(slots_of(trainer)) == 4


class Bomb(nn.Module):
    """A loss that is not finite at its n-th call in a process."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls -= 1
        return (output - target).square().mean() * (float("nan") if self.calls < 0 else 1.0)


def test_after_a_failure_the_optimizer_is_as_old_as_the_weights() -> None:
    trainer = make_trainer(OPTIMIZERS["fused"], loss=Bomb(6))
    with pytest.raises(NonFiniteLossError) as caught:
        fit(trainer)
    *_, note = caught.value.__notes__
    assert note == "The weights and the optimizer are complete, as they were after step 5."
    reference = make_trainer(OPTIMIZERS["fused"])

    class Stop(lockstep.Callback):
        left = 6

        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            self.left -= 1
            self.trainer.stop_training = self.left == 0

    reference.callbacks = [Stop()]
    fit(reference)
    assert_same(slots_of(trainer), slots_of(reference))
    assert all(int(slots["step"]) == 6 for slots in slots_of(trainer))


class Own(optim.SGD):
    """Nothing is known of it, so rank 0 alone steps."""


def test_a_rank_without_pieces_and_a_loss_with_weights() -> None:
    def weighted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        counted = (target > 0).float()
        return ((output - target).square() * counted).sum(), counted.sum()

    states = []
    for devices in (1, 2):
        trainer = make_trainer(lambda p: Own(p, lr=0.01), devices=devices, loss=weighted)
        fit(trainer)
        states.append([one.detach().clone() for one in trainer.model.parameters()])
    for left, right in zip(*states, strict=True):
        assert torch.equal(left, right)


class Linear(nn.Module):
    """A layer of the user's that has the name of torch's, and a weight of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 6, 40))

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs @ self.weight).mean((0, 2))[:, None]


def test_a_layer_that_is_only_called_linear() -> None:
    strategy = lockstep.MirroredStrategy(2)
    plan = strategy.plan(nn.Sequential(Linear()), batch_size=4)
    assert [layer.row_limit for layer in plan.layers] == [0]
