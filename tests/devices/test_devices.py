"""A model's way to its device and back, data that is there already, and ranks that die."""

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn

import lockstep
from lockstep.data.map_style import sent_order
from lockstep.errors import DeviceError, OptionError, WorkerError
from lockstep.parallel.storage.device_memory import noting_shortage
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


def test_the_order_of_samples_on_a_device_is_sent_once_an_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    orders: list[torch.Tensor] = []

    def noted(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        orders.append(tensor)
        return tensor.to(device)

    monkeypatch.setattr(sent_order, "sent", noted)
    trained(None, on_device=True)
    assert [one.sort().values.tolist() for one in orders] == [[*range(len(X))]] * 2


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


def test_means_of_a_loop_stay_on_the_device() -> None:
    value = torch.tensor([1.0, 2.0], device=ACCELERATORS[0])
    assert str(lockstep.all_mean(value).device) == ACCELERATORS[0]


def test_a_model_on_two_devices_has_no_loop() -> None:
    model = make_model()
    model[0].to(ACCELERATORS[0])
    with pytest.raises(DeviceError, match=f"2.bias on cpu, .*0.bias on {ACCELERATORS[0]}|one dev"):
        lockstep.CrossReplicaOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)


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


class Wide(nn.Sequential):
    """With weights that are large enough for gradients from factors."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(16, 2048), nn.Tanh(), nn.Linear(2048, 3))


def stages() -> lockstep.PipelineStrategy:
    return lockstep.PipelineStrategy(2, microbatches=2, devices=ranks_on_devices(2), engine="gloo")


@pytest.mark.parametrize("strategy", [two, stages], ids=["mirrored", "pipeline"])
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "fp16-mixed"])
def test_large_layers_train_in_every_precision(strategy: Callable[[], Any], precision: str) -> None:
    losses = [
        make_trainer(one, Wide(), precision=precision)
        .fit((X, Y), batch_size=8, epochs=3, verbose=0)
        .history["loss"]
        for one in (strategy(), lockstep.SingleDeviceStrategy(ACCELERATORS[0]))
    ]
    tolerance = 1e-4 if precision == "fp32" else 2e-2
    assert losses[0] == pytest.approx(losses[1], rel=tolerance)


class Scaled(nn.Module):
    """With a buffer: where it is has to do with what the model is traced as."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = Wide()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x * self.scale)
        return found


def test_a_pipeline_evaluates_and_goes_on_after_a_fit() -> None:
    """By then the model is on a device, and the samples that it is planned with are not."""

    def values(strategy: Any) -> tuple[dict[str, Any], torch.Tensor, list[float]]:
        trainer = make_trainer(strategy, Scaled(), precision="fp64")
        trainer.fit((X, Y), batch_size=8, verbose=0)
        evaluated = trainer.evaluate((X, Y), batch_size=8)
        predicted = trainer.predict(X, batch_size=8)
        again = trainer.fit((X, Y), batch_size=8, verbose=0)
        return dict(evaluated), predicted.cpu(), again.history["loss"]

    expected, found = values(lockstep.SingleDeviceStrategy("cpu")), values(stages())
    assert found[0] == pytest.approx(expected[0], rel=1e-9)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-9, atol=1e-11)
    assert found[2] == pytest.approx(expected[2], rel=1e-9)


OVER_THEIR_OWN: dict[str, Callable[[], Any]] = {
    "mirrored": lambda: lockstep.MirroredStrategy(ACCELERATORS[:2]),
    "pipeline": lambda: lockstep.PipelineStrategy(2, microbatches=2, devices=ACCELERATORS[:2]),
}


@pytest.mark.skipif(len(ACCELERATORS) < 2, reason="each rank needs a device of its own")
@pytest.mark.parametrize("name", OVER_THEIR_OWN)
def test_devices_meet_over_their_own_backend(name: str) -> None:
    """Taken where no engine is named. Kinds for which torch has none meet over gloo."""
    found = trained(OVER_THEIR_OWN[name]())
    for key, value in trained(lockstep.SingleDeviceStrategy("cpu")).items():
        torch.testing.assert_close(found[key], value, rtol=1e-11, atol=1e-12)


class _Confidence(torchmetrics.MeanMetric):
    """The mean of the largest score."""

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:  # type: ignore[override]
        super().update(output.max(1).values)


def test_metrics_follow_to_the_device() -> None:
    def values(strategy: Any) -> dict[str, Any]:
        metrics = {
            "accuracy": torchmetrics.Accuracy(task="multiclass", num_classes=3),
            "confidence": _Confidence(),
        }
        trainer = make_trainer(strategy, precision="fp64", metrics=metrics)
        trainer.fit((X, Y), batch_size=8, epochs=2, verbose=0)
        return dict(trainer.evaluate((X, Y)))

    expected = values(lockstep.SingleDeviceStrategy("cpu"))
    assert values(two()) == pytest.approx(expected, rel=1e-6)


STEPS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused": partial(torch.optim.Adam, lr=0.01, fused=True),
    "capturable": partial(torch.optim.AdamW, lr=0.01, capturable=True),
    "fused, with slots from the start": partial(torch.optim.Adagrad, lr=0.01, fused=True),
    "Adafactor": torch.optim.Adafactor,
    "NAdam": torch.optim.NAdam,
    "ASGD": torch.optim.ASGD,
}


def refusal(name: str) -> str:
    """Why torch itself does not step so on this device."""
    parameter = nn.Parameter(torch.ones(3, device=ACCELERATORS[0]))
    parameter.grad = torch.ones_like(parameter)
    try:
        STEPS[name]([parameter]).step()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", STEPS)
def test_optimizers_go_on_from_a_file(name: str, tmp_path: Path) -> None:
    """After another call, and in another Trainer, with every way to step."""
    if reason := refusal(name):
        pytest.skip(reason)

    def make() -> lockstep.Trainer:
        return lockstep.Trainer(
            make_model(), loss=nn.CrossEntropyLoss(), optimizer=STEPS[name], strategy=two()
        )

    once, twice, again = make(), make(), make()
    once.fit((X, Y), batch_size=8, epochs=2, verbose=0)
    twice.fit((X, Y), batch_size=8, verbose=0)
    torch.save(twice.state_dict(), tmp_path / "state")
    twice.fit((X, Y), batch_size=8, verbose=0)
    again.load_state_dict(torch.load(tmp_path / "state", map_location="cpu", weights_only=True))
    again.fit((X, Y), batch_size=8, verbose=0)
    for trainer in (twice, again):
        for key, value in once.model.state_dict().items():
            torch.testing.assert_close(trainer.model.state_dict()[key], value)


def test_muon_goes_on() -> None:
    def make() -> lockstep.Trainer:
        model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 3, bias=False))
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.1)
        return lockstep.Trainer(
            model, loss=nn.CrossEntropyLoss(), optimizer=torch.optim.Muon, strategy=two()
        )

    once, twice = make(), make()
    once.fit((X, Y), batch_size=8, epochs=2, verbose=0)
    for _ in range(2):
        twice.fit((X, Y), batch_size=8, verbose=0)
    for key, value in once.model.state_dict().items():
        torch.testing.assert_close(twice.model.state_dict()[key], value)


@pytest.mark.skipif(len(ACCELERATORS) < 2, reason="one device is always the first")
@pytest.mark.parametrize(("shares", "accumulate"), [(3, 1), (None, 2)])
def test_shares_with_batch_statistics_run_on_a_device_that_is_not_the_first(
    shares: int | None, accumulate: int
) -> None:
    def values(device: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Linear(32, 3)
        )
        strategy = lockstep.MirroredStrategy([device], num_shares=shares)
        trainer = make_trainer(strategy, model, precision="fp64", seed=3, accumulate=accumulate)
        trainer.fit((X, Y), batch_size=8, epochs=2, verbose=0)
        return {name: value.cpu() for name, value in model.state_dict().items()}

    expected, found = values(ACCELERATORS[0]), values(ACCELERATORS[1])
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


def test_no_memory_for_the_slots_names_the_device() -> None:
    with (
        pytest.raises(torch.OutOfMemoryError) as caught,
        noting_shortage(torch.device(ACCELERATORS[0])),
    ):
        torch.empty(1 << 50, dtype=torch.uint8, device=ACCELERATORS[0])
    assert f"{ACCELERATORS[0]} ran out of memory" in " ".join(caught.value.__notes__)


def test_a_fit_on_the_last_device_leaves_the_script_on_the_first() -> None:
    torch.accelerator.set_device_index(0)
    torch.zeros(1, device=ACCELERATORS[0])  # it is in use
    strategy = lockstep.MirroredStrategy([ACCELERATORS[-1]])
    make_trainer(strategy).fit((X, Y), batch_size=8, verbose=0)
    assert torch.accelerator.current_device_index() == 0


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
    with pytest.raises(
        DeviceError, match=rf"This host has {len(ACCELERATORS)} devices of kind {KIND}"
    ):
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
    assert time.monotonic() - killer.killed_at < 30  # on a busy machine; else a moment
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
    with pytest.raises(OptionError, match="does not hold the whole model"):
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
