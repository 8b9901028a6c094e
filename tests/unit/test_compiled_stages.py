"""Stages whose runs of instructions are functions: the same bits, and messages in the same order.

The compiler here is none, or inductor's first half; training with all of torch.compile is in
tests/parity/test_compiled_models.py.
"""

import gc
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import lockstep
from lockstep.capture.graph import value_bytes
from lockstep.capture.instructions import CallModule
from lockstep.capture.tracing import trace_modes
from lockstep.data.trees import Tree, map_tensors, tensors_of
from lockstep.errors import ModelError
from lockstep.parallel.data_parallel.forward import modes_of
from lockstep.parallel.pipeline.compiled_stages import _kept, compiled_stages
from lockstep.parallel.pipeline.microbatch_run import MicrobatchRun
from lockstep.parallel.pipeline.partition import Partition, partition
from tests.thorough import core_of
from tests.zoo import case, cases


class Letters:
    """Mail within a process, and the order in which it is sent and read."""

    def __init__(self, partition: Partition) -> None:
        self.events: list[tuple[object, ...]] = []
        self._parts = partition.parts
        self._values: dict[int, Tree] = {}
        self._gradients: dict[tuple[int, int], list[Tensor | None]] = {}

    def send(self, stage: int, number: int, share: int, tree: Tree) -> None:
        self.events.append(("send", stage, number))
        self._values[number] = map_tensors(_as_leaf, tree)

    def receive(self, number: int, sender: int, share: int) -> Tree:
        self.events.append(("receive", number))
        return map_tensors(_as_leaf, self._values[number])

    def send_gradient(
        self, stage: int, number: int, share: int, gradients: list[Tensor | None]
    ) -> None:
        self._gradients[number, stage] = [*gradients]

    def receive_gradients(self, stage: int, number: int, share: int) -> list[Any]:
        return [self._gradients[number, user] for user in self._parts[stage].sent[number]]


def _as_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


class Seeded:
    """A loss that begins backward from fixed gradients."""

    def __init__(self, output: Tree) -> None:
        self._outputs = [one for one in tensors_of(output) if one.requires_grad]

    def backward(self, denominator: object) -> None:
        seeds = [torch.linspace(-1, 1, one.numel()).view_as(one) for one in self._outputs]
        torch.autograd.backward(self._outputs, seeds)


def run(partitioned: Partition, model: nn.Module, inputs: Tree) -> tuple[list[Tensor], Letters]:
    """Outputs, gradients and buffers of all stages, one after the other; and their mail."""
    mail = Letters(partitioned)
    runs = [
        MicrobatchRun(
            stage=stage,
            share=0,
            part=part,
            instructions=partitioned.instructions,
            model=model,
            mail=mail,  # type: ignore[arg-type]  # in its place
        )
        for stage, part in enumerate(partitioned.parts)
    ]
    model.zero_grad()
    torch.manual_seed(3)
    with torch.set_grad_enabled(model.training):
        outputs = [one.forward(inputs)[0] for one in runs]
        if model.training:
            runs[-1].loss = Seeded(outputs[-1])  # type: ignore[assignment]
            for one in reversed(runs):
                one.backward(1.0)
    assert not any(one._values for one in runs)
    found = [*tensors_of(outputs[-1]), *model.buffers()]
    found += [one.grad for one in model.parameters() if one.grad is not None]
    return [one.detach().clone() for one in found], mail


def partitions(
    model: nn.Module, inputs: Tree, strategy: lockstep.Strategy
) -> dict[bool, Partition]:
    targets = torch.zeros(len(next(tensors_of(inputs))))
    plan = strategy.plan(model, batch_size=16, sample=(inputs, targets))
    traces = trace_modes(model, inputs)
    return {
        trace.training: partition(plan, trace, value_bytes(trace, model, inputs))
        for trace in traces
    }


def as_it_is(graph: fx.GraphModule) -> Callable[..., Any]:
    return graph


def compiled(
    partitioned: Partition,
    model: nn.Module,
    *,
    training: bool,
    compiler: Callable[[fx.GraphModule], Callable[..., Any]] = as_it_is,
) -> Partition:
    stages = range(len(partitioned.parts))
    return compiled_stages(partitioned, model, stages, training=training, compiler=compiler)


def first_rows(tree: Tree) -> Tree:
    return map_tensors(lambda one: one[:4].float() if one.is_floating_point() else one[:4], tree)


@pytest.mark.parametrize("name", core_of([one.name for one in cases()], ["unet"]))
def test_functions_of_runs_have_the_bits_of_instructions(name: str) -> None:
    one = case(name)
    model, inputs = one.make_model().float(), first_rows(one.inputs)
    for training, partitioned in partitions(model, inputs, lockstep.PipelineStrategy(3)).items():
        with modes_of(model, training=training):
            before = [buffer.clone() for buffer in model.buffers()]
            expected, plain = run(partitioned, model, inputs)
            for buffer, value in zip(model.buffers(), before, strict=True):
                buffer.copy_(value)
            found, mail = run(compiled(partitioned, model, training=training), model, inputs)
        assert mail.events == plain.events
        assert all(map(torch.equal, found, expected))
        assert len(found) == len(expected)


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    layers: Sequence[nn.Module] = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(8, 3))


def test_a_stage_is_one_function() -> None:
    model, inputs = chain(), torch.randn(4, 6)
    graphs: list[fx.GraphModule] = []

    def noted(graph: fx.GraphModule) -> Callable[..., Any]:
        graphs.append(graph)
        return graph

    partitioned = partitions(model, inputs, lockstep.PipelineStrategy(cuts=["2"]))[True]
    found = compiled_stages(partitioned, model, [0], training=True, compiler=noted)
    assert [len([*graph.children()]) for graph in graphs] == [2]
    assert found.parts[1] == partitioned.parts[1]  # another rank's
    calls = [found.instructions[number] for number in found.parts[0].instructions]
    assert not any(isinstance(call, CallModule) for call in calls)
    assert next(iter(graphs[0].children())) is model[0]


def test_functions_are_kept_while_they_are_the_same() -> None:
    model, inputs = chain(), torch.randn(4, 6)
    graphs: list[fx.GraphModule] = []

    def noted(graph: fx.GraphModule) -> Callable[..., Any]:
        graphs.append(graph)
        return graph

    def compile_it() -> int:
        before = len(graphs)
        partitioned = partitions(model, inputs, lockstep.PipelineStrategy(cuts=["2"]))
        for training, one in partitioned.items():
            found = compiled(one, model, training=training, compiler=noted)
            assert torch.equal(run(found, model, inputs)[0][0], model(inputs))
        return len(graphs) - before

    assert compile_it() == 2  # in evaluation they are the same
    assert compile_it() == 0
    model[2] = nn.Linear(8, 8)
    assert compile_it() == 1
    model, number = chain(), len(_kept)
    gc.collect()
    assert len(_kept) < number
    assert compile_it() == 2


@pytest.mark.thorough  # the compiler takes seconds to import
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, in what it imports
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_torch_compiles_functions_once_for_all_sizes_but_the_first() -> None:
    from torch._dynamo.callback import callback_handler

    counts: list[int] = [0]

    def note(*details: object) -> None:
        counts[-1] += 1

    def compiler(graph: fx.GraphModule) -> Callable[..., Any]:
        function: Callable[..., Any] = torch.compile(graph, backend="aot_eager")
        return function

    one = case("unet")
    model, inputs = one.make_model(), one.inputs
    partitioned = partitions(model, first_rows(inputs), lockstep.PipelineStrategy(3))[True]
    model.double()
    functions = compiled(partitioned, model, training=True, compiler=compiler)
    callback_handler.register_start_callback(note)
    try:
        for size in (6, 5, 4, 6):
            rows = map_tensors(itemgetter(slice(size)), inputs)
            expected, _ = run(partitioned, model, rows)
            found, _ = run(functions, model, rows)
            for value, wanted in zip(found, expected, strict=True):
                assert (value - wanted).norm() <= 1e-12 * wanted.norm()
            counts.append(0)
    finally:
        callback_handler.remove_start_callback(note)
    assert min(counts[:2]) > 0
    assert counts[2:] == [0, 0, 0]


class Sized(nn.Module):
    """Decides by a size, makes tensors itself, and computes a part without gradients."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            factor = (self.calls + 1) * torch.tensor([1.0, 2.0])[0]
        x = self.first(x) * self.scale * factor
        if x.size(1) > 1:
            x = x + torch.arange(x.size(0), device=x.device).view(-1, 1, 1)
        x[:, 0].mul_(2)
        output: Tensor = self.last(x.relu_())
        return output


def test_decisions_changes_in_place_and_parts_without_gradients() -> None:
    model, inputs = Sized(), torch.randn(4, 2, 6)
    for training, partitioned in partitions(model, inputs, lockstep.PipelineStrategy(2)).items():
        with modes_of(model, training=training):
            for size in (4, 3):
                expected, _ = run(partitioned, model, inputs[:size])
                functions = compiled(partitioned, model, training=training)
                found, _ = run(functions, model, inputs[:size])
                assert all(map(torch.equal, found, expected))
            with pytest.raises(ModelError, match=r"gt\(1, 1\), first True"):
                run(functions, model, inputs[:, :1])
