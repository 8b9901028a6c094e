"""What callbacks change between epochs, beyond values, is trained with on all ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep import errors
from lockstep.callbacks import LambdaCallback
from lockstep.train.callbacks.callback import Logs
from lockstep.train.callbacks.change_detection import fingerprint
from lockstep.train.callbacks.state_values import changed_values, copied_values
from tests.thorough import core_of

X = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 3, (50,), generator=torch.Generator().manual_seed(1))
DATA = (X, Y)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.5)
        self.scale = 1.0
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.dropout(self.norm(self.first(x))).tanh() * self.scale)
        return output


def frozen_norm() -> Model:
    """Nothing draws, or sees microbatches."""
    torch.manual_seed(5)
    model = Model()
    model.dropout.p = 0.0
    model.norm.eval()
    return model


class Between(lockstep.Callback):
    """Does something to the model and the optimizer before epoch 1, or after epoch 0."""

    def __init__(self, act: Callable[[Model, torch.optim.Optimizer], None], *, after: bool) -> None:
        self.act = act
        self.after = after
        self.calls: list[str] = []

    def do(self) -> None:
        assert isinstance(self.model, Model)
        assert self.trainer.optimizer is not None
        self.act(self.model, self.trainer.optimizer)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self.calls.append(f"begin {epoch}")
        if epoch == 1 and not self.after:
            self.do()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self.calls.append(f"end {epoch}")
        if epoch == 0 and self.after:
            self.do()


def freeze(model: Model, optimizer: torch.optim.Optimizer) -> None:
    model.first.requires_grad_(False)


def thaw(model: Model, optimizer: torch.optim.Optimizer) -> None:
    model.last.weight.requires_grad_(not model.last.weight.requires_grad)


def stop_dropping(model: Model, optimizer: torch.optim.Optimizer) -> None:
    model.dropout.p = 0.0


def rescale(model: Model, optimizer: torch.optim.Optimizer) -> None:
    model.scale = 0.5


def freeze_norm(model: Model, optimizer: torch.optim.Optimizer) -> None:
    model.norm.eval()


def forget(model: Model, optimizer: torch.optim.Optimizer) -> None:
    assert len(optimizer.state) == len(list(model.parameters()))
    optimizer.state.clear()


def double_momentum(model: Model, optimizer: torch.optim.Optimizer) -> None:
    for slots in optimizer.state.values():
        slots["momentum_buffer"].mul_(2)


def regroup(model: Model, optimizer: torch.optim.Optimizer) -> None:
    moved = optimizer.param_groups[0]["params"].pop()
    optimizer.add_param_group({"params": [moved], "lr": 0.001})


ACTS = [freeze, thaw, stop_dropping, rescale, freeze_norm, forget, double_momentum, regroup]


def train(
    callback: lockstep.Callback, devices: int, epochs: int = 3
) -> tuple[Model, lockstep.History]:
    torch.manual_seed(5)
    model = Model()
    trainer = lockstep.Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        strategy=lockstep.MirroredStrategy(devices, num_shares=2),
        callbacks=[callback],
    )
    history = trainer.fit(DATA, epochs=epochs, batch_size=16, verbose=0)
    fit_on = trainer.fit(DATA, batch_size=16, verbose=0)  # counters are right, too
    assert fit_on.epoch == [0]
    return model, history


@pytest.mark.parametrize("after", core_of([False, True], [True], []))
@pytest.mark.parametrize("act", core_of(ACTS, [freeze, stop_dropping, forget, regroup]))
def test_what_is_changed_between_epochs_reaches_all_ranks(
    act: Callable[[Model, torch.optim.Optimizer], None], after: bool
) -> None:
    outcomes = []
    for devices in (1, 2):
        callback = Between(act, after=after)
        outcomes.append((*train(callback, devices), callback.calls))
    (one, history, calls), (two, other_history, other_calls) = outcomes
    assert history.history == other_history.history
    assert calls == other_calls
    assert calls[:6] == ["begin 0", "end 0", "begin 1", "end 1", "begin 2", "end 2"]
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name]), name


@pytest.mark.parametrize("act", [forget, rescale, double_momentum])
@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        (lockstep.SingleDeviceStrategy(), "bf16"),
        (lockstep.PipelineStrategy(1, microbatches=2), "fp64"),
    ],
    ids=["master weights", "one stage"],
)
def test_what_is_changed_between_epochs_reaches_a_clone_on_one_rank(
    act: Callable[[Model, torch.optim.Optimizer], None], strategy: lockstep.Strategy, precision: Any
) -> None:
    """As if each epoch were a call of its own."""

    def fit(epochs: int, callback: lockstep.Callback) -> lockstep.Trainer:
        trainer = lockstep.Trainer(
            frozen_norm(),
            loss=nn.CrossEntropyLoss(),
            optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
            strategy=strategy,
            precision=precision,
            callbacks=[callback],
        )
        trainer.fit(DATA, epochs=epochs, batch_size=25, shuffle=False, verbose=0)
        return trainer

    changed = fit(2, Between(act, after=True))
    by_call = fit(1, lockstep.Callback())
    assert isinstance(by_call.model, Model)
    assert by_call.optimizer is not None
    act(by_call.model, by_call.optimizer)
    by_call.fit(DATA, batch_size=25, shuffle=False, verbose=0)
    for name, value in by_call.model.state_dict().items():
        assert torch.equal(changed.model.state_dict()[name], value), name


@pytest.mark.thorough
@pytest.mark.parametrize("act", ACTS)
def test_the_change_matters(act: Callable[[Model, torch.optim.Optimizer], None]) -> None:
    """Otherwise the test above would pass for a Trainer that ignores it."""
    changed, _ = train(Between(act, after=True), 1)
    unchanged, _ = train(lockstep.Callback(), 1)
    assert any(
        not torch.equal(one, other)
        for one, other in zip(changed.parameters(), unchanged.parameters(), strict=True)
    )


class FreezeInBatch(lockstep.Callback):
    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        assert isinstance(self.model, Model)
        self.model.first.requires_grad_(False)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_change_in_the_midst_of_an_epoch_is_refused(devices: int) -> None:
    with pytest.raises(errors.OptionError, match="on_epoch_begin"):
        train(FreezeInBatch(), devices)


class ScaleInBatch(lockstep.Callback):
    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        assert isinstance(self.model, Model)
        self.model.scale = 1.0 + batch


def test_an_attribute_that_other_ranks_have_cannot_change_in_the_midst_of_an_epoch() -> None:
    train(ScaleInBatch(), 1)
    with pytest.raises(errors.OptionError, match=r"a change of `scale` of the model"):
        train(ScaleInBatch(), 2)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("mask", torch.ones(3))
        self.mask: Tensor

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x) * self.mask
        return output


@pytest.mark.parametrize("method", ["on_epoch_end", "on_train_batch_begin", "on_train_batch_end"])
@pytest.mark.parametrize(
    "write", [lambda mask: mask.data[1:].fill_(0.5), lambda mask: mask.numpy()[1:].fill(0.5)]
)
def test_buffers_written_past_torch_reach_all_ranks(
    write: Callable[[Tensor], object], method: str
) -> None:
    losses = []
    for devices in (1, 2):
        torch.manual_seed(5)
        model = Masked()
        callback = LambdaCallback(**{method: lambda *_, mask=model.mask: write(mask)})
        trainer = lockstep.Trainer(
            model,
            loss=nn.CrossEntropyLoss(),
            optimizer=partial(torch.optim.SGD, lr=0.1),
            strategy=lockstep.MirroredStrategy(devices, num_shares=2),
            callbacks=[callback],
        )
        losses.append(trainer.fit(DATA, epochs=2, batch_size=16, verbose=0).history["loss"])
    assert losses[0] == losses[1]


def test_values_are_compared_by_their_bits() -> None:
    model = nn.Module()
    for name in ("rest", "nan", "sign"):
        model.register_buffer(name, torch.tensor([0.0, torch.nan]))
    known = copied_values(model, with_parameters=False)
    assert changed_values(known, model, with_parameters=False) == {}
    for name, value in (("nan", 1.0), ("sign", -0.0)):
        model.get_buffer(name).data[int(name == "nan")] = value
    assert set(changed_values(known, model, with_parameters=False)) == {"nan", "sign"}


def test_frozen_parameters_are_not_stepped_on_old_gradients() -> None:
    torch.manual_seed(5)
    model = Model()
    trainer = lockstep.Trainer(
        model, loss=nn.CrossEntropyLoss(), optimizer=partial(torch.optim.SGD, lr=0.1)
    )
    trainer.fit(DATA, batch_size=16, verbose=0)
    model.first.requires_grad_(False)
    frozen = model.first.weight.clone()
    trainer.fit(DATA, batch_size=16, verbose=0)
    assert torch.equal(model.first.weight, frozen)


def test_settings_of_torch_reach_all_ranks() -> None:
    class Looking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            deterministic = torch.are_deterministic_algorithms_enabled()
            seen = torch.ones(1).element_size() + 10 * deterministic
            return x[:, :1] * 0 + seen

    outputs = []
    for devices in (1, 2):
        trainer = lockstep.Trainer(Looking(), strategy=lockstep.MirroredStrategy(devices))
        torch.use_deterministic_algorithms(True)
        torch.set_default_dtype(torch.bfloat16)
        try:
            outputs.append(trainer.predict(torch.zeros(6, 1)))
        finally:
            torch.use_deterministic_algorithms(False)
            torch.set_default_dtype(torch.float32)
    assert torch.equal(outputs[0], outputs[1])
    assert bool((outputs[0] == 12).all())


class Holding(nn.Module):
    """What a callback may change in it lies in objects of many kinds."""

    rate = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.sizes = [1, 2]
        self.options = {"rates": {"low": 0.1}}
        self.held = [nn.Linear(2, 2)]
        self.layer = nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(()))


def hook(module: nn.Module, inputs: Any) -> None:
    """Do nothing."""


CHANGES: dict[str, Callable[[Any], object]] = {
    "setting": lambda model: setattr(model, "scale", 2.0),
    "new attribute": lambda model: setattr(model, "more", 1),
    "list": lambda model: model.sizes.append(3),
    "dict within": lambda model: model.options["rates"].update(low=0.2),
    "module in a list": lambda model: setattr(model.held[0], "in_features", 3),
    "frozen": lambda model: model.layer.requires_grad_(False),
    "mode": lambda model: model.layer.eval(),
    "hook": lambda model: model.layer.register_forward_pre_hook(hook),
    "layer": lambda model: setattr(model, "layer", nn.Linear(2, 2)),
    "buffer's shape": lambda model: setattr(model, "count", torch.zeros(2)),
    "buffer": lambda model: model.register_buffer("other", torch.zeros(())),
    "class": lambda model: setattr(type(model), "rate", 0.1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_fingerprint_shows_a_change(change: str) -> None:
    kind = type("Holding", (Holding,), {"__module__": "__main__"})  # it goes by value
    model = kind()
    plan = lockstep.MirroredStrategy(2).plan(model, batch_size=4)
    before = fingerprint(model, None, plan)
    model.count.add_(1)
    model.layer.weight.data.add_(1)
    assert fingerprint(model, None, plan) == before  # values are sent anyway
    CHANGES[change](model)
    assert fingerprint(model, None, plan) != before
