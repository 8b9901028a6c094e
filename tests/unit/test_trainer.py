"""The Trainer's own promises: state that lasts, callbacks that reach all ranks, clear errors."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep import errors
from lockstep.train.callbacks.callback import Logs

X = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 3, (50,), generator=torch.Generator().manual_seed(1))
ADAM = partial(torch.optim.Adam, lr=1e-2)


def make_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def make_trainer(devices: int = 2, **options: Any) -> lockstep.Trainer:
    settings: dict[str, Any] = {
        "loss": nn.CrossEntropyLoss(),
        "optimizer": ADAM,
        "strategy": lockstep.MirroredStrategy(devices),
        **options,
    }
    return lockstep.Trainer(settings.pop("model", None) or make_model(), **settings)


def fit(trainer: lockstep.Trainer, **options: Any) -> lockstep.History:
    return trainer.fit((X, Y), **{"batch_size": 16, "verbose": 0, **options})


# --- state that lasts ------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_a_second_fit_goes_on_where_the_first_ended(devices: int) -> None:
    once, twice = make_trainer(devices), make_trainer(devices)
    fit(once, epochs=4)
    fit(twice, epochs=1)
    fit(twice, epochs=3)
    for one, other in zip(once.model.parameters(), twice.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("devices", [1, 3])
def test_the_optimizer_given_holds_the_slots_of_whole_parameters(devices: int) -> None:
    model = make_model()
    optimizer = ADAM(model.parameters())
    trainer = make_trainer(devices, model=model, optimizer=optimizer)
    fit(trainer, epochs=2)
    for parameter in model.parameters():
        slots = optimizer.state[parameter]
        assert slots["exp_avg"].shape == parameter.shape
        assert slots["step"] == 8
    restored = ADAM(make_model().parameters())
    restored.load_state_dict(optimizer.state_dict())


def test_fp64_takes_over_the_slots_of_an_optimizer_that_has_stepped() -> None:
    model = make_model()
    optimizer = ADAM(model.parameters())
    fit(make_trainer(1, model=model, optimizer=optimizer))
    fit(make_trainer(2, model=model, optimizer=optimizer, precision="fp64"))
    assert {slots["exp_avg"].dtype for slots in optimizer.state.values()} == {torch.float64}


def test_the_number_of_devices_may_change_between_fits() -> None:
    model = make_model()
    optimizer = ADAM(model.parameters())
    fit(make_trainer(3, model=model, optimizer=optimizer), shuffle=False)
    fit(make_trainer(2, model=model, optimizer=optimizer), shuffle=False)
    same = make_trainer(1)
    fit(same, epochs=2, shuffle=False)
    for one, other in zip(model.parameters(), same.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_model_changed_between_fits_is_trained_as_it_is() -> None:
    trainer = make_trainer(2, optimizer=partial(torch.optim.SGD, lr=0.1))
    fit(trainer)
    layer = trainer.model.get_submodule("0")
    assert isinstance(layer, nn.Linear)
    layer.requires_grad_(False)
    frozen = layer.weight.clone()
    layer.bias.data = layer.bias.data.clone()  # out of shared memory
    fit(trainer)
    assert torch.equal(layer.weight, frozen)


def test_save_and_load_under_another_strategy(tmp_path: Path) -> None:
    trained = make_trainer(2)
    fit(trained)
    trained.save(tmp_path / "model.safetensors")
    other = make_trainer(1, model=nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
    other.load(tmp_path / "model.safetensors")
    torch.testing.assert_close(other.predict(X), trained.predict(X))


def test_a_saved_parameter_does_not_drag_the_others_along(tmp_path: Path) -> None:
    """Each parameter has a storage of its own, though all lie in one region."""
    trainer = make_trainer(2)
    fit(trainer)
    parameter = next(trainer.model.parameters())
    assert parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()


# --- data ------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 2])
def test_arrays_and_a_dataset_train_alike(devices: int) -> None:
    by_array, by_dataset = make_trainer(devices), make_trainer(devices)
    by_array.fit((X.double().numpy(), Y.numpy()), batch_size=16, verbose=0)
    by_dataset.fit(TensorDataset(X, Y), batch_size=16, verbose=0)
    for one, other in zip(by_array.model.parameters(), by_dataset.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_samples_of_weight_zero_count_for_nothing(devices: int) -> None:
    weight = torch.ones(50)
    weight[::3] = 0
    weighted = make_trainer(devices, precision="fp64", optimizer=partial(torch.optim.SGD, lr=0.1))
    weighted.fit((X, Y, weight), batch_size=50, verbose=0, shuffle=False)
    kept = make_trainer(1, precision="fp64", optimizer=partial(torch.optim.SGD, lr=0.1))
    kept.fit((X[weight > 0], Y[weight > 0]), batch_size=50, verbose=0, shuffle=False)
    for one, other in zip(weighted.model.parameters(), kept.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_batch_of_weight_zero_makes_no_update(devices: int) -> None:
    trainer = make_trainer(devices, optimizer=partial(torch.optim.Adam, lr=0.1, weight_decay=0.1))
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    history = trainer.fit((X, Y, torch.zeros(50)), batch_size=16, verbose=0)
    assert math.isnan(history.history["loss"][0])
    for parameter, old in zip(trainer.model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)


# --- callbacks ------------------------------------------------------------------------


class Calls(lockstep.Callback):
    """Notes every call."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self.calls.append("train_begin")

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self.calls.append(f"epoch_begin {epoch}")

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        self.calls.append(f"batch_begin {batch}")

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        assert logs is not None
        assert math.isfinite(logs["loss"])
        self.calls.append(f"batch_end {batch}")

    def on_test_begin(self, logs: Logs | None = None) -> None:
        self.calls.append("test_begin")

    def on_test_end(self, logs: Logs | None = None) -> None:
        self.calls.append("test_end")

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        assert logs is not None
        assert {"loss", "val_loss"} <= logs.keys()
        self.calls.append(f"epoch_end {epoch}")

    def on_train_end(self, logs: Logs | None = None) -> None:
        self.calls.append("train_end")


@pytest.mark.parametrize("devices", [1, 2])
def test_callbacks_are_called_in_keras_order(devices: int) -> None:
    calls = Calls()
    trainer = make_trainer(devices, callbacks=[calls])
    fit(trainer, batch_size=32, validation_data=(X, Y))
    batches = ["batch_begin 0", "batch_end 0", "batch_begin 1", "batch_end 1"]
    validation = ["test_begin", "test_end"]
    epoch = ["epoch_begin 0", *batches, *validation, "epoch_end 0"]
    assert calls.calls == ["train_begin", *epoch, "train_end"]


class HalveAndPush(lockstep.Callback):
    """Changes the learning rate and a weight, by batches or by epochs."""

    def change(self) -> None:
        assert self.trainer.optimizer is not None
        for group in self.trainer.optimizer.param_groups:
            group["lr"] *= 0.5
        with torch.no_grad():
            next(self.model.parameters()).add_(0.25)


class ByBatch(HalveAndPush):
    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self.change()


class ByEpoch(HalveAndPush):
    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self.change()


class ByReplacing(lockstep.Callback):
    """Takes a parameter out of the shared memory, as ``load_state_dict(assign=True)`` does."""

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        parameter = next(self.model.parameters())
        parameter.data = parameter.data * 0.5


@pytest.mark.parametrize("callback", [ByBatch, ByEpoch, ByReplacing])
def test_what_a_callback_changes_reaches_all_ranks(callback: type[lockstep.Callback]) -> None:
    models = []
    for devices in (1, 2, 3):
        strategy = lockstep.MirroredStrategy(devices, num_shares=3)
        trainer = make_trainer(strategy=strategy, callbacks=[callback()])
        fit(trainer, epochs=3)
        models.append(trainer.model)
    for model in models[1:]:
        for one, other in zip(models[0].parameters(), model.parameters(), strict=True):
            assert torch.equal(one, other)


class StopAt(lockstep.Callback):
    def __init__(self, *, epoch: int | None = None, batch: int | None = None) -> None:
        self.epoch, self.batch = epoch, batch

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self.trainer.stop_training |= epoch == self.epoch


class StopAtBatch(StopAt):
    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self.trainer.stop_training |= batch == self.batch


@pytest.mark.parametrize("devices", [1, 2])
def test_stop_training(devices: int) -> None:
    history = fit(make_trainer(devices, callbacks=[StopAt(epoch=1)]), epochs=5)
    assert history.epoch == [0, 1]
    calls = Calls()
    trainer = make_trainer(devices, callbacks=[calls, StopAtBatch(batch=1)])
    fit(trainer, epochs=3, validation_data=(X, Y))
    assert "batch_end 1" in calls.calls
    assert "batch_begin 2" not in calls.calls
    assert "epoch_begin 1" not in calls.calls


class RaiseAtEpochEnd(lockstep.Callback):
    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        raise ZeroDivisionError("mine")


@pytest.mark.parametrize("devices", [1, 2])
def test_an_exception_of_a_callback_passes_through_and_the_trainer_lives_on(devices: int) -> None:
    trainer = make_trainer(devices, callbacks=[RaiseAtEpochEnd()])
    with pytest.raises(ZeroDivisionError, match="mine"):
        fit(trainer)
    trainer.callbacks.clear()
    assert len(fit(trainer).epoch) == 1


@pytest.mark.parametrize("devices", [1, 2])
def test_metrics_of_training_count_every_sample_once(devices: int) -> None:
    metrics = {"accuracy": torchmetrics.Accuracy(task="multiclass", num_classes=3, average="micro")}
    trainer = make_trainer(devices, metrics=metrics, optimizer=partial(torch.optim.SGD, lr=0.0))
    history = fit(trainer, validation_data=(X, Y))
    with torch.no_grad():
        expected = (make_model()(X).argmax(1) == Y).float().mean().item()
    assert history.history["accuracy"] == pytest.approx([expected])
    assert history.history["val_accuracy"] == pytest.approx([expected])


class Probe(lockstep.Callback):
    """Evaluates and predicts in the middle of training."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self.seen.append(self.trainer.evaluate((X, Y))["loss"])
        assert self.trainer.predict(X).shape == (50, 3)
        assert self.model.training

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        assert logs is not None
        assert self.trainer.evaluate((X, Y))["loss"] == pytest.approx(logs["val_loss"], rel=1e-5)
        with pytest.raises(errors.OptionError, match="fit within fit"):
            self.trainer.fit((X, Y))


@pytest.mark.parametrize("devices", [1, 2])
def test_a_callback_may_evaluate_and_predict(devices: int) -> None:
    metrics = {"accuracy": torchmetrics.Accuracy(task="multiclass", num_classes=3, average="micro")}
    probe = Probe()
    probed = make_trainer(devices, callbacks=[probe], metrics=metrics)
    plain = make_trainer(devices, metrics={"accuracy": metrics["accuracy"].clone()})
    seen, expected = (fit(one, validation_data=(X, Y), epochs=2) for one in (probed, plain))
    assert seen.history == expected.history
    assert len(probe.seen) == 8


def test_scope_gives_the_strategy() -> None:
    with lockstep.MirroredStrategy(2).scope() as strategy:
        trainer = lockstep.Trainer(make_model(), loss=nn.CrossEntropyLoss(), optimizer=ADAM)
    assert trainer.strategy is strategy
    assert trainer.plan.num_replicas == strategy.num_replicas_in_sync == 2


# --- errors ------------------------------------------------------------------------


def bad_lengths() -> None:
    make_trainer().fit((X, Y[:-1]), verbose=0)


def nothing() -> None:
    make_trainer().fit((X[:0], Y[:0]), verbose=0)


class Unshippable(nn.Module):
    """Holds what no other process can have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.handle = (number for number in range(3))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        return output


class Locked(torch.utils.data.Dataset[Any]):
    """A dataset with a lock."""

    def __init__(self) -> None:
        import threading

        self.lock = threading.Lock()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index], Y[index]


class Valueless(nn.Module):
    """On the meta device, and with nothing that would give it values elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 3, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


BEFORE_ANY_PROCESS: dict[str, tuple[Callable[[], object], str, str]] = {
    "batch size": (lambda: fit(make_trainer(), batch_size=0), "OptionError", "batch_size=0"),
    "epochs": (lambda: fit(make_trainer(), epochs=-1), "OptionError", "epochs=-1"),
    "lengths": (bad_lengths, "DataError", "inputs 50, targets 49"),
    "empty": (nothing, "DataError", "0 samples"),
    "precision": (lambda: make_trainer(precision="fp8"), "OptionError", "'fp8'"),
    "nearly a precision": (
        lambda: make_trainer(precision="BF16_mixed"),
        "OptionError",
        "Use 'bf16-mixed'",
    ),
    "no device": (lambda: lockstep.MirroredStrategy(0), "DeviceError", "devices=0"),
    "devices": (lambda: lockstep.MirroredStrategy(10_000), "DeviceError", "devices=10000"),
    "shares": (
        lambda: fit(make_trainer(strategy=lockstep.MirroredStrategy(3, num_shares=2))),
        "OptionError",
        "num_shares=2 with 3 replicas",
    ),
    "no values": (
        lambda: fit(make_trainer(model=Valueless())),
        "ModelError",
        "without either: Valueless",
    ),
    "model": (lambda: fit(make_trainer(model=Unshippable())), "ShippingError", "`handle`"),
    "dataset": (lambda: make_trainer().fit(Locked(), verbose=0), "ShippingError", "`lock`"),
    "loss": (lambda: make_trainer(loss="msee"), "OptionError", "'msee'"),
    "no loss": (lambda: fit(make_trainer(loss=None)), "OptionError", "loss=None"),
    "optimizer": (lambda: make_trainer(optimizer="adum"), "OptionError", "'adum'"),
    "no optimizer": (lambda: fit(make_trainer(optimizer=None)), "OptionError", "None"),
    "metric": (lambda: make_trainer(metrics={"a": len}), "OptionError", "builtin"),
    "callback": (
        lambda: make_trainer(callbacks=[lockstep.Callback]),
        "OptionError",
        "the class Callback",
    ),
    "frozen": (
        lambda: fit(make_trainer(model=make_model().requires_grad_(False))),
        "ModelError",
        "without any",
    ),
    "lazy": (lambda: make_trainer(model=nn.LazyLinear(3)), "ModelError", "weight"),
    "scripted": (lambda: make_trainer(model=scripted()), "ModelError", "Received: 1."),
    "wrapped": (
        lambda: make_trainer(model=nn.DataParallel(make_model())),
        "ModelError",
        "a DataParallel. Pass the model without it: model.module is",
    ),
    "wrapped within": (
        lambda: make_trainer(model=nn.Sequential(nn.DataParallel(nn.Linear(4, 3)))),
        "ModelError",
        "DataParallel at '0'. Pass the model without it: 0.module is",
    ),
    "wrapped, for a plan": (
        lambda: lockstep.MirroredStrategy(2).plan(nn.DataParallel(make_model()), batch_size=8),
        "ModelError",
        "a DataParallel",
    ),
    "double": (lambda: make_trainer(model=make_model().double()), "ModelError", "float64"),
}


def scripted() -> nn.Module:
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        return nn.Sequential(nn.ReLU(), torch.jit.script(nn.Linear(4, 3)))


@pytest.mark.parametrize("name", BEFORE_ANY_PROCESS)
def test_one_clear_error_before_any_process_starts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("lockstep.train.runtime.session.take_team", refuse)
    act, kind, received = BEFORE_ANY_PROCESS[name]
    with pytest.raises(getattr(errors, kind)) as caught:
        act()
    message = str(caught.value)
    assert received in message
    assert "Received:" in message
    assert message.rstrip().endswith(".")


def wrapped_for_torch() -> nn.Module:
    """A model in torch's wrapper, without the process group that making one takes."""
    wrapper: Any = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper.module = nn.Linear(4, 3)
    return wrapper  # type: ignore[no-any-return]


def sharded_by_torch() -> nn.Module:
    """A model as ``fully_shard`` leaves it: of a class that derives from its own."""
    from torch.distributed.fsdp import FSDPModule

    model: Any = nn.Linear(4, 3)
    model.__class__ = type("FSDPLinear", (FSDPModule, nn.Linear), {})
    return model  # type: ignore[no-any-return]


TORCH_DIVIDES = {"DistributedDataParallel": wrapped_for_torch, "FSDPModule": sharded_by_torch}


@pytest.mark.parametrize("is_within", [False, True])
@pytest.mark.parametrize("name", TORCH_DIVIDES)
def test_models_that_torch_divides_are_refused(name: str, is_within: bool) -> None:
    model = TORCH_DIVIDES[name]()
    with pytest.raises(errors.ModelError, match=f"{name}.*Received: .*{name}.*(module|_shard)"):
        make_trainer(model=nn.Sequential(model) if is_within else model)


def matrix_loss(output: Tensor, target: Tensor) -> Tensor:
    return output


def number_loss(output: Tensor, target: Tensor) -> float:
    return 0.5


def detached_loss(output: Tensor, target: Tensor) -> Tensor:
    return output.detach().mean()


def nan_loss(output: Tensor, target: Tensor) -> Tensor:
    return output.mean() * math.nan


AT_THE_STEP = {
    "a matrix": (matrix_loss, errors.LossError, r"shape \(\d+, 3\)"),
    "a number": (number_loss, errors.LossError, "float"),
    "detached": (detached_loss, errors.LossError, r"step 0.*needs no gradient.*detach\(\)"),
    "nan": (nan_loss, errors.NonFiniteLossError, "step 0.*nan"),
}


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("name", AT_THE_STEP)
def test_a_wrong_loss_is_named_at_the_step(name: str, devices: int) -> None:
    loss, error, message = AT_THE_STEP[name]
    trainer = make_trainer(devices, loss=loss)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    with pytest.raises(error, match=message):
        fit(trainer)
    for parameter, old in zip(trainer.model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(errors.OptionError, match=r"batchsize=\. Did you mean 'batch_size'"):
        fit(make_trainer(), batchsize=3)
    with pytest.raises(errors.OptionError, match=r"epoch=\. It has model"):
        make_trainer(epoch=3)


def test_gradient_hooks_are_refused_where_gradients_come_in_shares() -> None:
    trainer = make_trainer(2)
    parameter = next(trainer.model.parameters())
    parameter.register_hook(torch.neg)
    with pytest.raises(errors.ModelError, match=r"0\.weight"):
        fit(trainer)


def test_numpy_predictions_keep_their_order() -> None:
    rows = np.arange(40, dtype=np.float32).reshape(10, 4)
    outputs = make_trainer(2).predict(rows, batch_size=3)
    with torch.no_grad():
        torch.testing.assert_close(outputs, make_model()(torch.from_numpy(rows)))


class Routed(nn.Module):
    """A frozen base; samples whose first feature is positive go through a trainable layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 3).requires_grad_(False)
        self.expert = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.base(x)
        chosen = x[:, 0] > 0
        return (
            output.index_add(0, chosen.nonzero()[:, 0], self.expert(x[chosen]))
            if bool(chosen.any())
            else output
        )


def test_a_share_that_uses_no_trainable_parameter_adds_nothing() -> None:
    inputs = X[:8].clone()
    inputs[:, 0] = torch.tensor([-1.0] * 6 + [1.0] * 2)
    models = []
    for devices in (1, 2, 4):
        torch.manual_seed(0)
        model = Routed()
        trainer = make_trainer(devices, model=model, precision="fp64")
        trainer.fit((inputs, Y[:8]), batch_size=8, shuffle=False, verbose=0)
        models.append(model)
    for model in models[1:]:
        torch.testing.assert_close(
            model.expert.weight, models[0].expert.weight, rtol=1e-12, atol=1e-14
        )


def mean_of_counted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """As people write it: nan * 0 where no target counts."""
    counted = target < 7
    return F.cross_entropy(output[counted], target[counted]) * counted.sum(), counted.sum()


@pytest.mark.parametrize("devices", [1, 2])
def test_a_share_in_which_nothing_counts_is_no_nan(devices: int) -> None:
    target = Y[:8].clone()
    target[4:] = 7
    models, losses = [], []
    for strategy, samples in (
        (lockstep.SingleDeviceStrategy(), 4),
        (lockstep.MirroredStrategy(devices, num_shares=2), 8),
    ):
        trainer = make_trainer(strategy=strategy, loss=mean_of_counted, precision="fp64")
        data = X[:samples], target[:samples]
        history = trainer.fit(data, batch_size=8, epochs=2, shuffle=False, verbose=0)
        models.append(trainer.model)
        losses += [history.history["loss"], [trainer.evaluate(data, batch_size=8)["loss"]]]
    for other, one in zip(models[1].parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-14)
    assert losses[2] == pytest.approx(losses[0], rel=1e-12)
    assert losses[3] == pytest.approx(losses[1], rel=1e-12)


def zero_if_none_counts(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """As people write it: a constant where no target counts."""
    counted = target < 7
    if not counted.any():
        return output.new_zeros(()), counted.sum()
    return mean_of_counted(output, target)


@pytest.mark.parametrize("loss", [mean_of_counted, zero_if_none_counts])
@pytest.mark.parametrize("devices", [1, 2])
def test_the_batch_norm_of_a_share_in_which_nothing_counts_still_meets_the_others(
    devices: int, loss: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
) -> None:
    target = Y.clone()
    target[8:16] = 7  # the second share of the first batch
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = partial(torch.optim.SGD, lr=0.1)
    job = lockstep.Job(model, loss, optimizer, (X, target), batch_size=16)
    strategy = lockstep.MirroredStrategy(devices, num_shares=2, timeout_seconds=20)
    report = lockstep.verify(job, strategy)
    assert report.passed, str(report)


class Assigned(nn.Module):
    """Its scale depends on how often it was called: it assigns its buffers."""

    calls: Tensor
    last: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", None)
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        before = 0.0 if self.last is None else self.last
        self.calls = self.calls + 1
        self.last = self.calls / 2
        output: Tensor = self.linear(x) * (1 + self.calls + before)
        return output


def spectral() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))


@pytest.mark.parametrize("make", [spectral, Assigned])
@pytest.mark.parametrize(("devices", "num_shares"), [(1, 3), (2, 2), (2, 5)])
def test_buffers_change_once_per_step(
    make: Callable[[], nn.Module], devices: int, num_shares: int
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(make(), nn.Tanh(), nn.Linear(3, 3)).double()
    job = lockstep.Job(
        model, nn.CrossEntropyLoss(), partial(torch.optim.SGD, lr=0.1), (X, Y), batch_size=16
    )
    strategy = lockstep.MirroredStrategy(devices, num_shares=num_shares)
    report = lockstep.verify(job, strategy)
    assert report.passed, str(report)


def test_a_buffer_that_is_a_view_of_a_parameter_is_refused() -> None:
    model = nn.Linear(4, 3)
    model.register_buffer("first_row", model.weight.detach()[0])
    with pytest.raises(errors.ModelError, match="first_row"):
        fit(make_trainer(2, model=model))


@dataclass
class Scores:
    """As models return their outputs: the logits, and how they were made."""

    logits: Tensor
    hidden: tuple[Tensor, ...]
    kind: str = "tanh"


class WithScores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()

    def forward(self, x: Tensor) -> Scores:
        return Scores(logits=self.layers(x), hidden=(x * 2,))


@pytest.mark.parametrize("devices", [1, 2])
def test_predict_joins_dataclasses(devices: int) -> None:
    trainer = make_trainer(devices, model=WithScores())
    scores = trainer.predict(X, batch_size=16)
    assert isinstance(scores, Scores)
    torch.testing.assert_close(scores.logits, trainer.model(X).logits)
    assert torch.equal(scores.hidden[0], X * 2)
    assert scores.kind == "tanh"
    assert trainer.predict(X[:0]).logits.shape == (0, 3)


class Summed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum()


def test_predict_refuses_outputs_without_a_row_per_sample() -> None:
    with pytest.raises(errors.ModelError, match=r"one row per sample.*shape \(\)"):
        make_trainer(2, model=Summed(4, 3)).predict(X, batch_size=16)
