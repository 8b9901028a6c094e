"""A model's costs as functions of the number of samples, and its optimizer's, for the planner.

Layers are measured for two numbers of samples. A line through both gives the part that no number
of samples changes: the calls themselves, and reading the weights.
"""

import statistics
import time
from collections.abc import Mapping
from typing import Any, cast

import msgspec
import torch
from torch import nn

from lockstep.capture.graph import capture_graph
from lockstep.capture.measuring import count_operations, measure_layers
from lockstep.capture.tracing import Trace
from lockstep.data.trees import Tree
from lockstep.graph.layer_graph import Layer, LayerCosts, LayerGraph, OptimizerCosts

# The smaller number of samples is so small a part of the larger.
PART = 4

# An optimizer is timed on so many elements, at most so often.
_ELEMENTS = 1 << 20
_STEPS = 5


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
    graph = capture_graph(model, trace, inputs, sizes)
    many, few = samples
    if few_inputs is not None:
        costs = measure_layers(model, trace, few_inputs)
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


def profile_optimizer(optimizer: Any) -> OptimizerCosts:
    """What an optimizer keeps and takes for an element; defaults if it cannot be tried.

    Args:
        optimizer: of torch, or a class or function that makes one from parameters.
    """
    weight = nn.Parameter(torch.zeros(_ELEMENTS // 1024, 1024))
    try:
        made = _alike(optimizer, weight)
        seconds = _step_seconds(made, weight)
    except Exception:  # an optimizer of the user's own may need its own parameters
        return OptimizerCosts()
    kept = sum(
        value.numel() for value in made.state[weight].values() if isinstance(value, torch.Tensor)
    )
    slots = round(kept / _ELEMENTS, 2)
    return OptimizerCosts(slots=slots, seconds_per_element=seconds / _ELEMENTS)


def _alike(optimizer: Any, weight: nn.Parameter) -> torch.optim.Optimizer:
    if isinstance(optimizer, torch.optim.Optimizer):
        kind: Any = type(optimizer)
        return cast(torch.optim.Optimizer, kind([weight], **optimizer.defaults))
    return cast(torch.optim.Optimizer, optimizer([weight]))


def _step_seconds(optimizer: torch.optim.Optimizer, weight: nn.Parameter) -> float:
    times = []
    for _ in range(_STEPS + 1):
        weight.grad = torch.ones_like(weight)
        began = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])
