"""Measuring layers: what counts as whose time and memory, and what is left as it was."""

import copy
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep
from lockstep import accelerators
from lockstep.capture import measuring
from lockstep.capture.graph import (
    capture_graph,
    profile_graph,
    value_bytes,
    with_total_seconds,
)
from lockstep.capture.measuring import measure_layers, measure_model
from lockstep.capture.tracing import trace_model
from lockstep.data.order import stream_states
from lockstep.data.trees import map_tensors
from lockstep.graph.layer_graph import LayerCosts
from tests.zoo import Case, cases

FLOAT, NUM_SAMPLES = 4, 16


def measured(model: nn.Module, inputs: Any, *, training: bool = True) -> dict[str, LayerCosts]:
    trace = trace_model(model, inputs, training=training)
    found = measure_layers(model, trace, inputs)
    return dict(zip([layer.name for layer in trace.layers], found, strict=True))


def parameter_bytes(model: nn.Module, inputs: Any) -> list[int]:
    trace = trace_model(model, inputs, training=True)
    graph = capture_graph(model, trace, inputs, value_bytes(trace, model, inputs))
    return [sum(one.num_bytes for one in layer.parameters) for layer in graph.layers]


def test_a_layer_keeps_what_its_backward_needs_and_nothing_twice() -> None:
    model = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 30), nn.ReLU(), nn.Dropout())
    found = measured(model, torch.randn(NUM_SAMPLES, 10))
    assert [one.activation_bytes for one in found.values()] == [
        NUM_SAMPLES * 10 * FLOAT,  # its inputs
        NUM_SAMPLES * 20 * FLOAT,  # its outputs
        0,  # its inputs, which the layer before keeps already
        NUM_SAMPLES * 30 * FLOAT,
        NUM_SAMPLES * 30 * FLOAT,  # the mask
    ]


class Sloped(nn.Module):
    """Its outputs are slopes, whose computation allows no hooks on saved tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        slope = torch.func.grad(lambda row: self.inner(row).square().sum())
        slopes: Tensor = torch.func.vmap(slope)(x)
        return slopes


def test_of_a_layer_with_torch_func_all_results_count() -> None:
    model = nn.Sequential(nn.Linear(10, 10), Sloped(), nn.Linear(10, 10))
    found = [one.activation_bytes for one in measured(model, torch.randn(8, 10)).values()]
    values = 8 * 10 * FLOAT
    assert found[0] == values
    assert sum(found) > 4 * values


def test_parameters_and_buffers_are_no_activations() -> None:
    model = nn.Sequential(nn.Linear(50, 60), nn.BatchNorm1d(60))
    found = measured(model, torch.randn(2, 50))
    assert parameter_bytes(model, torch.randn(2, 50)) == [(50 * 60 + 60) * FLOAT, 120 * FLOAT]
    saved = (
        2 * 50 * FLOAT,
        2 * 60 * FLOAT + 2 * 60 * FLOAT,
    )  # what it normalised, and its statistics
    assert tuple(one.activation_bytes for one in found.values()) == saved


def test_a_parameter_counts_for_all_its_layers_and_a_tensor_for_the_first_that_keeps_it() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            twice: Tensor = self.linear(torch.sigmoid(self.linear(x)))
            return twice + F.linear(x, self.linear.weight)

    found = measured(Shared(), torch.randn(4, 8))
    assert [*found] == ["linear", "linear@2"]
    assert parameter_bytes(Shared(), torch.randn(4, 8)) == [64 * FLOAT, 64 * FLOAT]
    assert [one.activation_bytes for one in found.values()] == [2 * 4 * 8 * FLOAT, 0]


class Slow(torch.autograd.Function):
    """Takes the time it is told to, forward and backward, by a clock of the test's own."""

    clock = 0.0

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        Slow.clock += forward
        ctx.backward_seconds = backward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        Slow.clock += ctx.backward_seconds
        return gradients[0], None, None


def use_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.perf_counter", lambda: Slow.clock)
    monkeypatch.setattr("time.thread_time", lambda: 0.0)
    monkeypatch.setattr(measuring, "_waited_seconds", lambda: 0.0)


class Timed(nn.Module):
    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.seconds = forward, backward

    def forward(self, x: Tensor) -> Any:
        return Slow.apply(self.linear(x), *self.seconds)  # type: ignore[no-untyped-call]


def test_time_is_that_of_the_layer_that_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    use_clock(monkeypatch)
    model = nn.Sequential(Timed(2.0, 5.0), Timed(1.0, 0.0), Timed(0.5, 0.25))
    found = measured(model, torch.randn(4, 3))
    assert [one.forward_seconds for one in found.values()] == [2.0, 1.0, 0.5]
    assert [one.backward_seconds for one in found.values()] == [5.0, 0.0, 0.25]
    found = measured(model, torch.randn(4, 3), training=False)
    assert [one.forward_seconds for one in found.values()] == [2.0, 1.0, 0.5]
    assert [one.backward_seconds for one in found.values()] == [0.0, 0.0, 0.0]
    assert [one.activation_bytes for one in found.values()] == [0, 0, 0]


def test_of_the_whole_model_all_layers_go_forward_before_one_goes_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_clock(monkeypatch)
    layers, x = [Timed(2.0, 5.0), Timed(1.0, 0.25)], torch.randn(4, 3)
    model, order = nn.Sequential(*layers), list[str]()
    trace = trace_model(model, x, training=True)
    for number, layer in enumerate(layers):
        layer.linear.register_forward_hook(lambda *_, n=number: order.append(f"forward {n}"))
        layer.linear.weight.register_hook(lambda _, n=number: order.append(f"backward {n}"))
    assert measure_model(model, trace, lambda: model(x)) == (3.0, 5.25)
    assert order[:4] == ["forward 0", "forward 1", "backward 1", "backward 0"]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_time_of_the_whole_model_is_shared_out_over_its_layers() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(4, 3)
    trace = trace_model(model, x, training=True)
    graph = profile_graph(model, trace, x, x[:1], value_bytes(trace, model, x), (4, 1))
    before, after = (
        [layer.costs for layer in one.layers if layer.costs is not None]
        for one in (graph, with_total_seconds(graph, 6.0, 9.0))
    )
    assert sum(one.forward_seconds for one in after) == pytest.approx(6.0)
    assert sum(one.backward_seconds for one in after) == pytest.approx(9.0)
    for one, other in zip(before, after, strict=True):
        longer = other.forward_seconds / one.forward_seconds
        assert longer == pytest.approx(6.0 / sum(cost.forward_seconds for cost in before))
        assert other.forward_fixed_seconds == pytest.approx(longer * one.forward_fixed_seconds)
        assert other.activation_bytes == one.activation_bytes


def test_times_are_medians_without_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    use_clock(monkeypatch)
    seconds = iter([100.0, 3.0, 1.0, 50.0, 2.0, 4.0])

    class Jittery(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.is_measured = False

        def forward(self, x: Tensor) -> Any:
            taken = next(seconds) if self.is_measured else 0.0
            return Slow.apply(self.linear(x), taken, 0.0)  # type: ignore[no-untyped-call]

    layer = Jittery()
    model = nn.Sequential(layer)
    x = torch.randn(4, 3)
    trace = trace_model(model, x, training=True, atomic={"0": "it has no one time"})
    layer.is_measured = True
    (found,) = measure_layers(model, trace, x, repeats=5)
    assert found.forward_seconds == 3.0


def test_gradients_that_nobody_needs_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    use_clock(monkeypatch)
    model = nn.Sequential(Timed(1.0, 1.0), Timed(1.0, 1.0), Timed(1.0, 1.0))
    model[:2].requires_grad_(False)
    found = measured(model, torch.randn(4, 3))
    assert [one.backward_seconds for one in found.values()] == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_every_layer_is_measured_and_everything_left_as_it_was(case: Case, training: bool) -> None:
    model = case.make_model().double()
    inputs = map_tensors(lambda tensor: tensor[:4].clone(), case.inputs)
    given = map_tensors(Tensor.clone, inputs)
    trace = trace_model(model, inputs, training=training)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = copy.deepcopy(model.state_dict())
    stream = stream_states().cpu
    found = measure_layers(model, trace, inputs, repeats=1)
    assert len(found) == len(trace.layers)
    assert all(one.forward_seconds > 0 and not one.is_estimated for one in found)
    has_parameters = [bool(layer.parameters) and training for layer in trace.layers]
    assert all(
        one.backward_seconds > 0
        for one, layer, has in zip(found, trace.layers, has_parameters, strict=True)
        if has and layer.name != "flagged"
    )
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(
        torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters() if p.grad is not None
    )
    assert torch.equal(stream, stream_states().cpu)
    assert model.training
    for one, other in zip(tensors(inputs), tensors(given), strict=True):
        assert torch.equal(one, other)
        assert not one.requires_grad


def tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(found.append, tree)
    return found


def test_layers_that_work_in_place_can_be_measured_alone() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.Dropout(inplace=True))
    found = measured(model, torch.randn(NUM_SAMPLES, 1, 8, 8))
    size = NUM_SAMPLES * 4 * 6 * 6 * FLOAT
    assert found["1"].activation_bytes == size
    assert found["1"].backward_seconds > 0


def test_on_the_meta_device_operations_are_counted() -> None:
    model = nn.Sequential(nn.Linear(100, 200), nn.Tanh(), nn.Linear(200, 50)).to("meta")
    found = measured(model, torch.randn(NUM_SAMPLES, 100, device="meta"))
    first, tanh, last = found.values()
    assert all(one.is_estimated for one in found.values())
    assert (tanh.forward_seconds, tanh.backward_seconds) == (0.0, 0.0)
    assert first.forward_seconds == first.backward_seconds == 2 * last.forward_seconds
    assert last.backward_seconds == 2 * last.forward_seconds  # its inputs have gradients, too
    assert (first.activation_bytes, tanh.activation_bytes) == (
        NUM_SAMPLES * 100 * FLOAT,
        NUM_SAMPLES * 200 * FLOAT,
    )
    inputs = torch.randn(NUM_SAMPLES, 100, device="meta")
    assert parameter_bytes(model, inputs)[-1] == (200 * 50 + 50) * FLOAT


def test_what_takes_long_is_run_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once to be warm, once to be timed."""

    class Counting(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Counting.calls += 1
            return x * 2

    def count_calls(enough_seconds: float) -> int:
        monkeypatch.setattr(measuring, "_ENOUGH_SECONDS", enough_seconds)
        model, inputs = nn.Sequential(Counting(), nn.Linear(4, 4)), torch.ones(3, 4)
        trace = trace_model(model, inputs, training=True, atomic={"0": "to be seen"})
        Counting.calls = 0
        measure_layers(model, trace, inputs)
        return Counting.calls

    assert count_calls(0.0) == 2
    assert count_calls(3600.0) == 4


def test_runs_are_repeated_until_their_times_vary_little() -> None:
    even, uneven = [[(1.0, 2.0)]] * 3, [[(1.0, 0.0)], [(2.0, 0.0)], [(1.5, 0.0)]]
    assert measuring._needs_more(even[:2], None)
    assert not measuring._needs_more(even, None)
    assert measuring._needs_more(uneven, None)
    assert not measuring._needs_more([*uneven, *even * 4], None)
    assert not measuring._needs_more(uneven * 20, None)  # enough of it
    assert measuring._needs_more(even, 4)
    assert not measuring._needs_more(uneven, 3)


def test_a_device_has_done_its_work_when_a_time_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def timed() -> float:
        events.append("timed")
        return 0.0

    monkeypatch.setattr(accelerators, "in_use", lambda: torch.cuda)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: events.append("waited"))
    monkeypatch.setattr(time, "perf_counter", timed)
    measuring.timed(lambda: events.append("ran"))
    assert events == ["waited", "timed", "ran", "waited", "timed"]


class Forces(nn.Module):
    """Derives its output in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


@pytest.mark.parametrize(
    "model",
    [
        Forces(),
        # Of a single sample it has one value per channel, too few for statistics.
        nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6)),
    ],
    ids=["derivative in forward", "batch norm"],
)
def test_an_automatic_strategy_measures_what_it_can(model: nn.Module) -> None:
    data = torch.randn(12, 6), torch.randn(12, 6)
    trainer = lockstep.Trainer(
        model, loss="mse", optimizer="sgd", strategy=lockstep.AutoStrategy(devices=2)
    )
    plan = trainer.plan_for(*data, batch_size=4)
    assert any("Chosen of" in note for note in plan.notes), plan


def test_seconds_in_which_others_have_the_core_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited = iter([1.0, 6.0])  # so the kernel's count for this thread grows by 5 in the call
    use_clock(monkeypatch)
    monkeypatch.setattr(measuring, "_waited_seconds", lambda: next(waited))

    def body() -> None:
        Slow.clock += 8.0

    assert measuring.timed(body) == 3.0


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="asks Linux")
def test_linux_counts_the_seconds_in_which_a_thread_waits_for_a_core() -> None:
    code = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
    core = min(os.sched_getaffinity(0))
    other = subprocess.Popen([sys.executable, "-c", code, str(core)])
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        before = measuring._waited_seconds()
        while measuring._waited_seconds() == before:  # until it has had to wait
            pass
    finally:
        os.sched_setaffinity(0, mine)
        other.kill()
        other.wait()
