"""A model as makers of stages see it: what it runs, in order, what flows between, and the costs."""

from collections import Counter, defaultdict
from collections.abc import Mapping

import torch
from torch import nn

from lockstep.capture.instructions import Input, references
from lockstep.capture.layers import ties_of
from lockstep.capture.measuring import LayerMeasure, measure_layers
from lockstep.capture.scopes import device_of
from lockstep.capture.state import ModelState, set_mode
from lockstep.capture.tracing import Trace, TracedLayer, find_inplace, run_trace
from lockstep.data.trees import Tree, map_tensors, tensors_of
from lockstep.graph.layer_graph import Flow, Layer, LayerCosts, LayerGraph, ParameterInfo
from lockstep.plan.layout import align


def capture_graph(model: nn.Module, trace: Trace, inputs: Tree) -> LayerGraph:
    """The graph of a traced model.

    Args:
        model: the model.
        trace: of the model, in training.
        inputs: a microbatch: costs and sizes are those of its number of samples.
    """
    parameters = dict(model.named_parameters())
    measures = measure_layers(model, trace, inputs)
    return LayerGraph(
        layers=tuple(
            _layer(model, parameters, layer, measure)
            for layer, measure in zip(trace.layers, measures, strict=True)
        ),
        tied=ties_of(model),
        flows=_flows(trace, value_bytes(trace, model, inputs)),
        inseparable=_inseparable(trace),
    )


def value_bytes(trace: Trace, model: nn.Module, inputs: Tree) -> dict[int, int]:
    """Bytes that the tensors in each instruction's value take in a mailbox, for these inputs."""
    sizes: dict[int, int] = {}

    def observe(number: int, value: object) -> None:
        sizes[number] = sum(align(tensor.nbytes) for tensor in tensors_of(value))

    state = ModelState(model)
    try:
        set_mode(model, training=trace.training)
        with torch.no_grad():
            run_trace(trace, model, map_tensors(torch.clone, inputs), observe)
    finally:
        state.restore()
    return sizes


def _layer(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    layer: TracedLayer,
    measure: LayerMeasure,
) -> Layer:
    return Layer(
        name=layer.name,
        kind=layer.kind,
        parameters=tuple(
            ParameterInfo(
                name=name,
                shape=tuple(parameters[name].shape),
                dtype=str(parameters[name].dtype).removeprefix("torch."),
                trainable=parameters[name].requires_grad,
            )
            for name in layer.parameters
        ),
        buffers=layer.buffers,
        uses_batch_statistics=layer.uses_batch_statistics,
        device=device_of(model, layer.name.partition("@")[0]),
        draws=layer.draws,
        atomic_reason=layer.reason if layer.is_atomic else "",
        costs=LayerCosts(
            forward_seconds=measure.forward_seconds,
            backward_seconds=measure.backward_seconds,
            activation_bytes=measure.activation_bytes,
            is_estimated=measure.is_estimated,
        ),
    )


def _flows(trace: Trace, sizes: Mapping[int, int]) -> tuple[Flow, ...]:
    """What layers use of earlier ones; the model's inputs are read where they are used."""
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


def _inseparable(trace: Trace) -> tuple[tuple[int, int], ...]:
    pairs = {
        (trace.instructions[maker].layer, trace.instructions[changer].layer)
        for maker, changer in find_inplace(trace)
    }
    return tuple(sorted(pair for pair in pairs if pair[0] < pair[1]))
