"""Replicas that train apart: held to plain loops that simulate them, one after the other.

``lockstep.verify`` compares every step of every replica with such a simulation; there all ranks
meet after each step to be looked at. The loop written here sees what they come to without that.
"""

import itertools
import math
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.errors import NonFiniteLossError, OptionError
from tests.thorough import core_of
from tests.zoo import IGNORED, Case, case, make_job

DILOCO, PLAIN = lockstep.Nesterov(), lockstep.Nesterov(lr=0.5, momentum=0)

STRATEGIES = {
    "every-3-on-2": lockstep.LocalSGDStrategy(3, 2),
    "epoch-on-3": lockstep.LocalSGDStrategy("epoch", 3),
    "every-1-optimizer-on-3": lockstep.LocalSGDStrategy(1, 3, average_optimizer=True),
    "diloco-on-2": lockstep.LocalSGDStrategy(2, 2, outer=DILOCO, average_optimizer=True),
    "plain-outer-on-3": lockstep.LocalSGDStrategy(
        2, 3, outer=lockstep.Nesterov(lr=0.5, momentum=0)
    ),
}
MODELS = ("mlp", "cnn_batch_norm", "cnn_dropout", "gpt_tied")


def local_case(name: str) -> Case:
    """A case whose batches leave no replica a single sample, where BatchNorm sees a replica's."""
    one = case(name)
    if "batch_norm" not in name:
        return one
    assert isinstance(one.inputs, Tensor)
    return replace(one, inputs=one.inputs[:46], targets=one.targets[:46])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", core_of(MODELS, MODELS[1:2]))
def test_every_step_equals_simulated_replicas(model: str, strategy: str) -> None:
    report = lockstep.verify(make_job(local_case(model)), STRATEGIES[strategy], steps=8)
    assert report.passed, str(report)
    assert "simulates" in report.title
    assert "the result is not that of one device" in str(report)


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("model", ["mlp", "gpt_tied", "lstm"])
def test_averaging_every_step_of_plain_sgd_is_synchronous(model: str, devices: int) -> None:
    one = replace(case(model), optimizer=partial(torch.optim.SGD, lr=0.1, weight_decay=1e-2))
    report = lockstep.verify(make_job(one), lockstep.LocalSGDStrategy(1, devices), steps=5)
    assert report.passed, str(report)
    assert "simulates" not in report.title
    assert not report.notes


# --- the loop -------------------------------------------------------------------------------------


def simulate(
    one: Case, num_replicas: int, every: int | str, epochs: int
) -> tuple[Any, list[float]]:
    """What the replicas have after training, and the loss of every epoch."""
    assert isinstance(one.inputs, Tensor)
    models = [one.make_model().double() for _ in range(num_replicas)]
    optimizers = [one.optimizer(model.parameters()) for model in models]
    losses: list[float] = []
    weights = [0.0] * num_replicas

    @torch.no_grad()
    def average() -> None:
        for tensors in zip(*([*m.parameters(), *m.buffers()] for m in models), strict=True):
            if tensors[0].is_floating_point():
                mean = sum(w / sum(weights) * t for w, t in zip(weights, tensors, strict=True))
                for tensor in tensors:
                    tensor.copy_(mean)
        weights[:] = [0.0] * num_replicas

    for _ in range(epochs):
        total = weight = 0.0
        for step, start in enumerate(range(0, len(one.inputs), one.batch_size), 1):
            rows = range(start, min(start + one.batch_size, len(one.inputs)))
            for replica, part in enumerate(np.array_split(rows, num_replicas)):
                if not len(part):
                    continue
                inputs, targets = one.inputs[part], one.targets[part]
                optimizers[replica].zero_grad()
                loss, count = one.loss(models[replica](inputs), targets), len(part)
                if isinstance(loss, tuple):
                    count = int((targets != IGNORED).sum())
                    loss = loss[0] / count
                loss.backward()
                optimizers[replica].step()
                weights[replica] += count
                total, weight = total + count * loss.item(), weight + count
            if isinstance(every, int) and step % every == 0:
                average()
        if any(weights):
            average()
        losses.append(total / weight)
    return models[0], losses


def local_trainer(one: Case, strategy: Any, **options: Any) -> lockstep.Trainer:
    return lockstep.Trainer(
        one.make_model().double(),
        loss=one.loss,
        optimizer=one.optimizer,
        strategy=strategy,
        precision="fp64",
        **options,
    )


@pytest.mark.parametrize(
    ("model", "devices", "every"),
    [("mlp", 3, 2), ("cnn_batch_norm", 2, 3), ("gpt_tied", 2, "epoch")],
)
def test_training_without_meeting_equals_a_plain_loop(model: str, devices: int, every: Any) -> None:
    one = local_case(model)
    trainer = local_trainer(one, lockstep.LocalSGDStrategy(every, devices))
    history: Any = trainer.fit(
        (one.inputs, one.targets),
        epochs=2,
        batch_size=one.batch_size,
        shuffle=False,
        validation_data=(one.inputs, one.targets),
        verbose=0,
    ).history
    expected, losses = simulate(one, devices, every, epochs=2)
    torch.testing.assert_close(
        trainer.model.state_dict(), expected.state_dict(), rtol=1e-12, atol=1e-12
    )
    assert history["loss"] == pytest.approx(losses, rel=1e-12)
    val_loss = trainer.evaluate((one.inputs, one.targets), batch_size=one.batch_size)["loss"]
    assert history["val_loss"][-1] == pytest.approx(val_loss, rel=1e-12)


# --- around the steps -----------------------------------------------------------------------------


class _Callback(lockstep.Callback):
    """Changes the learning rate after every step, and ends training after some."""

    def __init__(self) -> None:
        self.steps = itertools.count(1)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        for group in self.trainer.optimizer.param_groups:
            group["lr"] *= 0.9
        self.trainer.stop_training = next(self.steps) == 7


def fit(trainer: lockstep.Trainer, one: Case, epochs: int = 2, **options: Any) -> Any:
    return trainer.fit(
        (one.inputs, one.targets), epochs=epochs, batch_size=one.batch_size, verbose=0, **options
    ).history


def test_a_second_fit_and_a_loaded_state_go_on() -> None:
    one = case("mlp")
    assert isinstance(one.inputs, Tensor)
    one = replace(one, inputs=one.inputs[:52], targets=one.targets[:52])  # equal counts of steps
    make = partial(local_trainer, one, STRATEGIES["diloco-on-2"])
    whole, halves, loaded = make(), make(), make()
    fit(whole, one, 4)
    fit(halves, one)
    state = halves.state_dict()
    fit(halves, one)
    loaded.load_state_dict(state)
    fit(loaded, one)
    expected = whole.model.state_dict()
    torch.testing.assert_close(halves.model.state_dict(), expected, rtol=0, atol=0)
    torch.testing.assert_close(loaded.model.state_dict(), expected, rtol=0, atol=0)


def test_a_stream_and_callbacks_at_every_step() -> None:
    one = case("mlp")
    assert isinstance(one.inputs, Tensor)
    make = partial(local_trainer, one, STRATEGIES["every-3-on-2"])
    loader = DataLoader(TensorDataset(one.inputs, one.targets), batch_size=one.batch_size)
    read = make().fit(loader, epochs=2, verbose=0).history
    assert read["loss"] == fit(make(), one, shuffle=False)["loss"]
    callback = _Callback()
    trainer = make(callbacks=[callback])
    fit(trainer, one, 4)
    assert next(callback.steps) == 8
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.9**7)


def test_accumulation_clipping_and_skipped_steps() -> None:
    one = case("mlp")
    assert isinstance(one.inputs, Tensor)
    strategy = STRATEGIES["every-3-on-2"]
    plain, parts = (local_trainer(one, strategy, clip_norm=0.5, accumulate=n) for n in (1, 2))
    losses = [fit(trainer, one)["loss"] for trainer in (plain, parts)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    bad = one.inputs.clone()
    bad[12] = math.nan  # the last sample of the first batch: the second replica's
    broken = replace(one, inputs=bad)
    trainer = local_trainer(one, strategy, on_nonfinite="skip")
    assert fit(trainer, broken, shuffle=False)["skipped_steps"] == [1, 1]
    with pytest.raises(NonFiniteLossError) as caught:
        fit(local_trainer(one, strategy), broken, shuffle=False)
    notes = "\n".join(caught.value.__notes__)
    assert "replica 1's part of the batch: samples 7 to 12" in notes
    assert "those of the first replica" in notes


class _Interrupting(nn.Module):
    """Presses Ctrl-C on the first replica, in the midst of an epoch that nothing else ends."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 5)
        self.calls = itertools.count(1)
        self.presses = True

    def forward(self, inputs: Tensor) -> Tensor:
        if next(self.calls) == 5 and self.presses:
            signal.raise_signal(signal.SIGINT)
        logits: Tensor = self.layer(inputs)
        return logits

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "presses": False}


@pytest.mark.parametrize("every", core_of([3, "epoch"], [3]))
@pytest.mark.parametrize("replicas", [{"devices": 3}, {"devices": 4, "stages": 2}], ids=str)
def test_ctrl_c_ends_an_epoch_with_an_average(every: Any, replicas: dict[str, Any]) -> None:
    one = case("mlp")
    assert isinstance(one.inputs, Tensor)
    data = one.inputs.float().repeat(50, 1), one.targets.repeat(50)
    model = _Interrupting()
    trainer = lockstep.Trainer(
        model,
        loss=one.loss,
        optimizer=torch.optim.Adam,
        strategy=lockstep.LocalSGDStrategy(every, **replicas),
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(data, batch_size=12, epochs=50, verbose=0)
    assert math.isfinite(trainer.evaluate(data)["loss"])


# --- what is refused ------------------------------------------------------------------------------


class _Own(torch.optim.SGD):
    """An optimizer that may do anything."""


@pytest.mark.parametrize(
    ("options", "strategy", "message"),
    [
        ({"average": lockstep.EMA()}, {}, "no common moving average"),
        ({"precision": "bf16"}, {}, "bf16-mixed"),
        (
            {
                "schedule": lockstep.Schedule(
                    partial(torch.optim.lr_scheduler.StepLR, step_size=1), every="step"
                )
            },
            {},
            "every='epoch'",
        ),
        ({"optimizer": partial(_Own, lr=0.1)}, {}, "must copy the optimizer"),
        (
            {"optimizer": torch.optim.Adafactor},
            {"average_optimizer": True},
            "the parameters' shapes",
        ),
    ],
)
def test_what_replicas_cannot_do_is_refused(
    options: dict[str, Any], strategy: dict[str, Any], message: str
) -> None:
    one = case("mlp")
    trainer = lockstep.Trainer(
        one.make_model(),
        **{"loss": one.loss, "optimizer": one.optimizer, **options},
        strategy=lockstep.LocalSGDStrategy(3, 2, **strategy),
    )
    with pytest.raises(OptionError, match=message):
        fit(trainer, one)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lockstep.LocalSGDStrategy(0), "every=0"),
        (lambda: lockstep.LocalSGDStrategy("step"), "every='step'"),  # type: ignore[arg-type]
        (lambda: lockstep.LocalSGDStrategy(2, outer="sgd"), "outer='sgd'"),  # type: ignore[arg-type]
        (lambda: lockstep.LocalSGDStrategy(2, 2, engine="gloo"), "is for replicas on accelerators"),
        (lambda: lockstep.LocalSGDStrategy(2, ["cuda:0", "cuda:1"], stages=2), "stages=2"),
        (
            lambda: lockstep.LocalSGDStrategy(2, ["cuda:0"], compression="bf16"),
            "compression='bf16'",
        ),
        (lambda: lockstep.Nesterov(lr=0), "lr=0"),
        (lambda: lockstep.Nesterov(momentum=1), "momentum=1"),
    ],
)
def test_wrong_arguments(make: Callable[[], object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make()
