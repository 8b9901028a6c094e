"""A model's LayerGraph for makers of stages: what runs in order, the flows, and the costs.

For the planner layers are measured for two numbers of samples. A line through both gives the part
that no number of samples changes: the calls themselves, and reading the weights.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping

import msgspec
import torch
from torch import nn

from lockstep.capture.instructions import Input, references
from lockstep.capture.layers import parameter_info, ties_of
from lockstep.capture.measuring import count_operations, measure_layers
from lockstep.capture.scopes import device_of
from lockstep.capture.state import ModelState, set_mode
from lockstep.capture.tracing import Trace, TracedLayer, run_trace
from lockstep.data.trees import Tree, map_tensors, tensors_of
from lockstep.graph.layer_graph import Flow, Layer, LayerCosts, LayerGraph
from lockstep.plan.layout import align

# For a line through costs of two numbers of samples, the smaller is so small a part of the larger.
PART = 4


def capture_graph(
    model: nn.Module,
    trace: Trace,
    inputs: Tree,
    sizes: Mapping[int, int],
    *,
    repeats: int | None = 3,
) -> LayerGraph:
    """The graph of a traced model.

    Args:
        model: the model.
        trace: of the model, in training.
        inputs: a microbatch; costs and sizes are for its number of samples.
        sizes: see ``value_bytes``.
        repeats: see ``measure_layers``.
    """
    parameters = dict(model.named_parameters())
    costs = measure_layers(model, trace, inputs, repeats=repeats)
    return LayerGraph(
        layers=tuple(
            _layer(model, parameters, *pair) for pair in zip(trace.layers, costs, strict=True)
        ),
        tied=ties_of(model),
        flows=_flows(trace, sizes),
        inseparable=find_inseparable(model, trace, inputs),
    )


def profile_graph(
    model: nn.Module,
    trace: Trace,
    inputs: Tree,
    few_inputs: Tree | None,
    sizes: Mapping[int, int],
    samples: tuple[int, int],
) -> LayerGraph:
    """The graph of a traced model, with costs for any number of samples.

    Args:
        model: the model.
        trace: of the model, in training.
        inputs: so many samples as the costs shall be for.
        few_inputs: fewer of them; None if there are too few.
        sizes: see ``capture.graph.value_bytes``.
        samples: of ``inputs``, and of ``few_inputs``.
    """
    graph = capture_graph(model, trace, inputs, sizes, repeats=None)
    many, few = samples
    costs = None if few_inputs is None else _measured_if_possible(model, trace, few_inputs)
    if costs is not None:
        layers = [
            _with_fixed_part(layer, own, few / many)
            for layer, own in zip(graph.layers, costs, strict=True)
        ]
        graph = msgspec.structs.replace(graph, layers=tuple(layers))
    operations = count_operations(model, trace, inputs)
    counted = [
        _with_costs(layer, operations=count)
        for layer, count in zip(graph.layers, operations, strict=True)
    ]
    return msgspec.structs.replace(graph, layers=tuple(counted), samples=many)


def with_total_seconds(graph: LayerGraph, forward: float, backward: float) -> LayerGraph:
    """The graph, whose layers take so long together, each as much of it as before."""
    costs = [layer.costs for layer in graph.layers if layer.costs is not None]
    forward /= sum(one.forward_seconds for one in costs) or 1.0
    backward /= sum(one.backward_seconds for one in costs) or 1.0
    layers = [
        _with_costs(
            layer,
            forward_seconds=forward * one.forward_seconds,
            forward_fixed_seconds=forward * one.forward_fixed_seconds,
            backward_seconds=backward * one.backward_seconds,
            backward_fixed_seconds=backward * one.backward_fixed_seconds,
        )
        for layer, one in zip(graph.layers, costs, strict=True)
    ]
    return msgspec.structs.replace(graph, layers=tuple(layers))


def _measured_if_possible(model: nn.Module, trace: Trace, few: Tree) -> list[LayerCosts] | None:
    """The costs for a few samples; None if the model needs more, as BatchNorm does of one pixel."""
    try:
        return measure_layers(model, trace, few, repeats=None)
    except Exception:  # a model may raise any; it has run on more samples
        return None


def _with_costs(layer: Layer, **changes: float) -> Layer:
    assert layer.costs is not None
    costs = msgspec.structs.replace(layer.costs, **changes)
    return msgspec.structs.replace(layer, costs=costs)


def _with_fixed_part(layer: Layer, few: LayerCosts, part: float) -> Layer:
    many = layer.costs
    assert many is not None
    return _with_costs(
        layer,
        forward_fixed_seconds=_fixed(few.forward_seconds, many.forward_seconds, part),
        backward_fixed_seconds=_fixed(few.backward_seconds, many.backward_seconds, part),
    )


def _fixed(few: float, many: float, part: float) -> float:
    """Where a line through times of ``part`` of the samples and of all of them begins."""
    return min(max((few - part * many) / (1 - part), 0.0), few, many)


def value_bytes(trace: Trace, model: nn.Module, inputs: Tree) -> dict[int, int]:
    """Bytes that the tensors in each instruction's value take in a mailbox, for these inputs."""
    sizes: dict[int, int] = {}

    def observe(number: int, value: object) -> None:
        sizes[number] = sum(
            align(tensor.numel() * tensor.element_size()) for tensor in tensors_of(value)
        )

    state = ModelState(model)
    try:
        set_mode(model, training=trace.training)
        with torch.no_grad():
            run_trace(trace, model, map_tensors(torch.clone, inputs), observe)
    finally:
        state.restore()
    return sizes


def _layer(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], layer: TracedLayer, costs: LayerCosts
) -> Layer:
    return Layer(
        name=layer.name,
        kind=layer.kind,
        parameters=tuple(parameter_info(name, parameters[name]) for name in layer.parameters),
        buffers=layer.buffers,
        uses_batch_statistics=layer.uses_batch_statistics,
        device=device_of(model, layer.name.partition("@")[0]),
        draws=layer.draws,
        atomic_reason=layer.reason if layer.is_atomic else "",
        costs=costs,
    )


def _flows(trace: Trace, sizes: Mapping[int, int]) -> tuple[Flow, ...]:
    """The values of earlier layers that layers use; each layer reads the model's inputs itself."""
    users: dict[int, Counter[int]] = defaultdict(Counter)
    for instruction in trace.instructions:
        for value in references(instruction):
            source = trace.instructions[value]
            if not isinstance(source, Input) and source.layer != instruction.layer:
                users[value][instruction.layer] += 1
    return tuple(
        Flow(
            source=trace.instructions[value].layer,
            num_bytes=sizes[value],
            users=tuple(sorted(users[value])),
        )
        for value in sorted(users)
    )


def find_inseparable(model: nn.Module, trace: Trace, inputs: Tree) -> tuple[tuple[int, int], ...]:
    """See ``LayerGraph.inseparable``: it depends on the modes of modules, too."""
    pairs = {
        (trace.instructions[maker].layer, trace.instructions[changer].layer)
        for maker, changer in trace.changes
    }
    pairs |= {(users[0], users[-1]) for users in _users_of_changing(model, trace, inputs)}
    return tuple(sorted(pair for pair in pairs if pair[0] < pair[1]))


def _users_of_changing(model: nn.Module, trace: Trace, inputs: Tree) -> list[list[int]]:
    """The layers of each buffer that several layers use and that running the model changes.

    In different processes each layer would change its own copy.
    """
    users: dict[str, list[int]] = defaultdict(list)
    for number, layer in enumerate(trace.layers):
        for name in layer.buffers:
            users[name].append(number)
    shared = {name: found for name, found in users.items() if len(found) > 1}
    if not shared:
        return []
    changed = _changed_buffers(model, trace, inputs)
    if any(buffer.is_meta for buffer in model.buffers()):
        # There not every change shows, but with one that does come those of its layer.
        changing = {number for name in changed for number in users[name]}
        return [found for found in shared.values() if changing.intersection(found)]
    return [found for name, found in shared.items() if name in changed]


def _changed_buffers(model: nn.Module, trace: Trace, inputs: Tree) -> set[str]:
    """Buffers that the model changes when it runs in training."""
    state = ModelState(model)
    before = {
        name: (buffer, _version_of(buffer), buffer.clone())
        for name, buffer in model.named_buffers()
    }
    try:
        set_mode(model, training=True)
        with torch.no_grad():
            run_trace(trace, model, map_tensors(torch.clone, inputs))
        return {
            name for name, buffer in model.named_buffers() if _has_changed(buffer, *before[name])
        }
    finally:
        state.restore()


def _version_of(buffer: torch.Tensor) -> int:
    """How often it was changed in place, if torch counts that."""
    return 0 if buffer.is_inference() else buffer._version


def _has_changed(
    buffer: torch.Tensor, former: torch.Tensor, version: int, values: torch.Tensor
) -> bool:
    if buffer is not former or _version_of(buffer) != version:
        return True
    return not buffer.is_meta and not torch.equal(buffer, values)
