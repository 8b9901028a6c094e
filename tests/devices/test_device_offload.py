"""Accelerators whose host has a part of the training: the bits of one that has all of it."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.errors import NonFiniteLossError, OptionError
from lockstep.parallel.sharding.offloaded_memory import Copier, OffloadedMemory
from lockstep.parallel.sharding.parameter_offload import ParameterOffload
from lockstep.train.optim import slot_windows
from tests.devices.found import ACCELERATORS, ranks_on_devices
from tests.parity import test_sharded as models
from tests.parity.test_offload import ADAM, OPTIONS, check_same_bits, fit, make_trainer, state_of
from tests.thorough import core_of


def sharded(count: int = 1, **options: Any) -> lockstep.Strategy:
    return lockstep.FullyShardedStrategy(ranks_on_devices(count), engine="gloo", **options)


@pytest.mark.parametrize(
    ("name", "count", "offload"),
    core_of(
        [
            (name, count, offload)
            for name in OPTIONS
            for count in (1, 2)
            for offload in ("slots", "parameters")
        ],
        [("clipping", 1, "slots"), ("accumulation", 1, "parameters")],
        [("bf16", 1, "slots"), ("averages", 1, "slots"), ("bf16", 1, "parameters")],
    ),
)
def test_what_lies_in_host_memory_has_the_same_bits(name: str, count: int, offload: str) -> None:
    """Also in a second call of ``fit``."""
    found = []
    for place in (None, offload):
        trainer = make_trainer(sharded(count, offload=place), **OPTIONS[name])
        fit(trainer, epochs=1)
        fit(trainer, epochs=1)
        found.append(state_of(trainer))
    check_same_bits(found[1], found[0])


@pytest.mark.parametrize(("offload", "most"), [(None, 5.0), ("slots", 2.9), ("a directory", 2.9)])
def test_a_device_has_a_window_of_slots(offload: str | None, most: float, tmp_path: Path) -> None:
    """Peak of a training, in multiples of the parameters: they, gradients, slots, a window."""
    gc.collect()
    model = nn.Sequential(*(nn.Linear(1100, 1100) for _ in range(2)))
    place = str(tmp_path) if offload == "a directory" else offload
    options: dict[str, Any] = {"loss": nn.MSELoss(), "optimizer": ADAM}
    trainer = lockstep.Trainer(model, strategy=sharded(offload=place), **options)
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    values = torch.randn(8, 1100)
    trainer.fit((values, values), batch_size=4, verbose=0)
    num_bytes = sum(one.nbytes for one in model.parameters())
    peak = (torch.accelerator.max_memory_allocated() - before) / num_bytes
    assert most - 1 < peak < most


def test_trainings_resume_wherever_their_slots_are(tmp_path: Path) -> None:
    strategies = [
        lockstep.FullyShardedStrategy(["cpu", "cpu"]),
        sharded(2, offload="slots"),
        sharded(1, num_shares=2, offload="parameters"),
        sharded(2),
    ]
    for epochs, strategy in enumerate(strategies, 1):
        trainer = make_trainer(strategy)
        fit(trainer, checkpoint=lockstep.Checkpoint(tmp_path), epochs=epochs)
    expected = make_trainer(sharded(2))
    fit(expected, epochs=len(strategies))
    check_same_bits(state_of(trainer), state_of(expected))


def test_an_optimizer_of_ones_own_is_refused() -> None:
    optimizer = partial(torch.optim.Muon, lr=1e-2)
    trainer = lockstep.Trainer(
        nn.Linear(12, 5, bias=False),
        loss=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        strategy=lockstep.FullyShardedStrategy(ACCELERATORS[:1], offload="slots"),
    )
    with pytest.raises(OptionError, match="treat each element separately"):
        fit(trainer)


# --- parameters that are streamed ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "count"),
    core_of(
        [(name, count) for name in models.MODELS for count in (1, 2)],
        [("skipped blocks", 1), ("LSTM", 1)],
        [("BatchNorm", 2), ("frozen", 1), ("tied", 1), ("recomputed in backward", 1)],
    ),
)
def test_models_are_what_one_device_trains(name: str, count: int) -> None:
    make_model, options = models.MODELS[name]
    expected = models.trained(make_model, lockstep.SingleDeviceStrategy("cpu"), **options)
    found = models.trained(make_model, sharded(count, offload="parameters"), **options)
    models.check_equal({name: one.cpu() for name, one in found.items()}, expected)


LAYERS = 32


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(LAYERS)))


@contextmanager
def limited(num_bytes: int) -> Iterator[None]:
    """Within the block the stand-in holds so many bytes more at most."""
    gc.collect()
    module: Any = torch.get_device_module(ACCELERATORS[0])
    if not hasattr(module, "limit_memory"):
        pytest.skip("The stand-in alone has a limit.")
    before = module.limit_memory(torch.accelerator.memory_allocated() + num_bytes)
    try:
        yield
    finally:
        module.limit_memory(before)


class Trace:
    """Notes the copies of units that are begun while the unit before is used.

    In forward such a copy waits for the end of that unit's forward pass. If the pass waited for the
    copy as well, neither would end.
    """

    def __init__(self, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, int]] = []
        self._passed = [threading.Event() for _ in range(LAYERS)]
        self._unit = {one: number for number, one in enumerate(model.children())}
        self._awaited: int | None = None
        begin, begin_next, expect = (
            Copier.begin,
            ParameterOffload._begin_next,
            OffloadedMemory.expect,
        )

        def noted(copier: Copier, pairs: Any) -> Callable[[], None]:
            before, self._awaited = self._awaited, None
            if before is None:
                return begin(copier, pairs)
            self.events.append(("copy is asked for", before + 1))
            return begin(copier, self._waiting(pairs, before))

        def ahead(residency: Any) -> None:
            self._await(residency._at if residency._direction == 1 else None)
            begin_next(residency)

        def guess(memory: Any, unit: int | None) -> None:
            self._await(unit - 1 if unit else None)
            expect(memory, unit)

        monkeypatch.setattr(Copier, "begin", noted)
        monkeypatch.setattr(ParameterOffload, "_begin_next", ahead)
        monkeypatch.setattr(OffloadedMemory, "expect", guess)
        for module in self._unit:
            module.register_forward_hook(self._leave)

    def _await(self, unit: int | None) -> None:
        """The next copy waits for the end of a unit's forward pass, which has begun."""
        self._awaited = unit
        if unit is not None:
            self._passed[unit].clear()

    def _waiting(self, pairs: Any, before: int) -> Iterator[Any]:
        assert self._passed[before].wait(120)
        yield from pairs
        self.events.append(("copy ends", before + 1))

    def take(self) -> list[tuple[str, int]]:
        """What has been noted since the last call."""
        events, self.events = self.events, []
        return events

    def _leave(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        unit = self._unit[module]
        self.events.append(("forward ends", unit))
        self._passed[unit].set()


def overlapped(events: list[tuple[str, int]]) -> set[int]:
    """Units that were copied while the one before went forward."""
    found = set()
    for place, (what, unit) in enumerate(events):
        if what == "copy is asked for":
            later = events[place:]
            if ("forward ends", unit - 1) in later[: later.index(("copy ends", unit))]:
                found.add(unit)
    return found


def test_a_device_with_a_quarter_of_the_parameters_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trains, evaluates and predicts, with the bits of one that has all; copies overlap."""
    monkeypatch.setattr(slot_windows, "_MOST_ELEMENTS", 1 << 16)
    num_bytes = sum(one.nbytes for one in layers().parameters())
    values = torch.randn(16, 256, generator=torch.Generator().manual_seed(1))
    found = []
    for offload, most in ((None, 8.0), ("parameters", 0.25)):
        options: dict[str, Any] = {"loss": nn.MSELoss(), "optimizer": ADAM}
        trainer = lockstep.Trainer(layers(), strategy=sharded(offload=offload), seed=3, **options)
        with limited(int(most * num_bytes)):
            if offload is not None:
                trace = Trace(trainer.model, monkeypatch)
            trainer.fit((values, values), batch_size=8, verbose=0)
            fitted = [] if offload is None else trace.take()
            loss = trainer.evaluate((values, values), batch_size=8)["loss"]
            output = trainer.predict(values, batch_size=8)
        found.append({**state_of(trainer), "loss": torch.tensor(loss), "output": output})
    check_same_bits(found[1], found[0])
    assert overlapped(fitted) == overlapped(trace.take()) == {*range(1, LAYERS)}


def test_without_offload_it_is_too_small() -> None:
    num_bytes = sum(one.nbytes for one in layers().parameters())
    trainer = lockstep.Trainer(layers(), loss=nn.MSELoss(), optimizer=ADAM, strategy=sharded())
    values = torch.randn(16, 256)
    with limited(num_bytes // 4), pytest.raises(torch.OutOfMemoryError):
        trainer.fit((values, values), batch_size=8, verbose=0)


class Looks(lockstep.Callback):
    """After each step all weights are whole. It sets one, and another once, by its ``data``."""

    def __init__(self, *, assigns: bool) -> None:
        self.assigns = assigns
        self.sums: list[float] = []

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        model: Any = self.trainer.model
        parameters = list(model.parameters())
        self.sums.append(sum(float(one.detach().abs().sum()) for one in parameters))
        with torch.no_grad():
            model.blocks[1].weight.mul_(0.5)
            if batch == 1 and self.assigns:
                model.blocks[2].weight.data = model.blocks[2].weight.data * 2
            elif batch == 1:
                model.blocks[2].weight.mul_(2)


@pytest.mark.parametrize("count", core_of([1, 2], [2]))
def test_callbacks_see_and_change_whole_weights(count: int) -> None:
    found, sums = [], []
    for offload in (None, "parameters"):
        looks = Looks(assigns=offload is not None)
        strategy = sharded(count, offload=offload)
        trainer = make_trainer(strategy, models.Blocks, callbacks=[looks])
        fit(trainer)
        found.append(state_of(trainer))
        sums.append(looks.sums)
    check_same_bits(found[1], found[0])
    assert sums[1] == sums[0]


class Fails(models.Blocks):
    left = 9

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        assert self.left
        return super().forward(x)


def test_errors_leave_whole_weights_in_host_memory() -> None:
    trainer = make_trainer(sharded(offload="parameters"), Fails)
    with pytest.raises(AssertionError):
        fit(trainer, epochs=9)
    assert all(
        one.device.type == "cpu" and one.isfinite().all() for one in trainer.model.parameters()
    )
    inputs = models.INPUTS.clone()
    inputs[40] = torch.nan
    good, bad = (make_trainer(sharded(offload="parameters"), models.Blocks) for _ in range(2))
    good.fit((inputs[:32], models.TARGETS[:32]), batch_size=16, shuffle=False, verbose=0)
    with pytest.raises(NonFiniteLossError, match="inputs are not finite already"):
        bad.fit((inputs, models.TARGETS), batch_size=16, shuffle=False, verbose=0)
    for one, other in zip(bad.model.parameters(), good.model.parameters(), strict=True):
        assert one.device.type == "cpu"
        assert torch.equal(one, other)


def test_activations_are_computed_again_in_low_precision() -> None:
    """By the thread of backward, as the forward pass has computed them."""
    values = torch.randn(16, 256, generator=torch.Generator().manual_seed(1))
    found = []
    for recompute in (False, True):
        strategy = sharded(offload="parameters", recompute=recompute)
        options: dict[str, Any] = {"loss": nn.MSELoss(), "precision": "bf16-mixed"}
        trainer = make_trainer(strategy, lambda: layers()[:4], **options)  # type: ignore[index]
        trainer.fit((values, values), batch_size=8, verbose=0)
        found.append(state_of(trainer))
    check_same_bits(found[1], found[0])
