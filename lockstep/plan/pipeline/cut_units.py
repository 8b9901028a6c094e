"""A model's layers as units that cuts may separate, with their costs."""

import math
from collections.abc import Sequence
from itertools import pairwise

from lockstep.errors import OptionError, PlanError
from lockstep.graph.layer_graph import Flow, Layer, LayerCosts, LayerGraph
from lockstep.plan.pipeline.cut_places import runs_whole
from lockstep.plan.pipeline.cuts import CutProblem, LayerCost, counted

# Copying a tensor to memory that all processes of a host see; measured at 5 to 6 GB/s.
SECONDS_PER_BYTE = 1 / 5e9


# A parameter, its gradient, and two slots of an optimizer such as Adam.
_TENSORS_PER_PARAMETER = 4


def units_of(graph: LayerGraph) -> list[tuple[int, int]]:
    """Runs ``[first, stop)`` of layers that no cut may divide."""
    partitioned = set(range(1, len(graph.layers)))
    for first, last in graph.inseparable:
        partitioned -= set(range(first + 1, last + 1))
    return list(pairwise([0, *sorted(partitioned), len(graph.layers)]))


def in_units(
    graph: LayerGraph, units: Sequence[tuple[int, int]], starts: Sequence[int]
) -> tuple[int, ...]:
    """Starts as units instead of layers.

    Raises:
        OptionError: one is within a unit.
    """
    by_first = {first: unit for unit, (first, _) in enumerate(units)}
    for start in starts:
        if start not in by_first:
            _raise_inseparable(graph, start)
    return tuple(by_first[start] for start in starts)


def _raise_inseparable(graph: LayerGraph, start: int) -> None:
    """Raise an error that names the layers that a cut at ``start`` would separate."""
    first, last = next((first, last) for first, last in graph.inseparable if first < start <= last)
    names = [layer.name for layer in graph.layers]
    elsewhere = f"Cut at {names[last + 1]!r}" if last + 1 < len(names) else "Cut elsewhere"
    shared = set(graph.layers[first].buffers) & set(graph.layers[last].buffers)
    if shared:
        raise OptionError(
            "All layers that change a buffer must be in one stage.",
            received=f"a cut at {names[start]!r}: {names[first]!r} and {names[last]!r} change "
            f"{min(shared)!r}",
            fix=f"{elsewhere}, or use a data parallel strategy.",
        )
    raise OptionError(
        "No tensor that crosses a cut may be changed in place on the other side.",
        received=f"a cut at {names[start]!r}: {names[last]!r} changes the "
        f"output of {names[first]!r}",
        fix=f"{elsewhere}, or let {names[last]!r} make a new tensor (inplace=False).",
    )


def cut_problem(
    graph: LayerGraph, units: Sequence[tuple[int, int]], in_flight: int, memory_bytes: int | None
) -> CutProblem:
    """The problem of cutting these units, where a device keeps ``in_flight`` microbatches."""
    unit_of = [unit for unit, (first, stop) in enumerate(units) for _ in range(first, stop)]
    flows = []
    for flow in graph.flows:
        users = {unit_of[user] for user in flow.users} - {unit_of[flow.source]}
        if users:
            flows.append(
                Flow(
                    source=unit_of[flow.source],
                    num_bytes=flow.num_bytes,
                    users=tuple(sorted(users)),
                )
            )
    return CutProblem(
        layers=tuple(_cost_of(graph.layers[first:stop], in_flight) for first, stop in units),
        flows=tuple(flows),
        seconds_per_byte=SECONDS_PER_BYTE,
        memory_limit_bytes=memory_bytes,
    )


def _cost_of(layers: Sequence[Layer], in_flight: int) -> LayerCost:
    sizes = {
        parameter.name: (parameter.size, parameter.num_bytes)
        for layer in layers
        for parameter in layer.parameters
    }
    costs = [costs_of(layer) for layer in layers]
    return LayerCost(
        seconds=math.fsum(one.forward_seconds + one.backward_seconds for one in costs),
        memory_bytes=_TENSORS_PER_PARAMETER * sum(num_bytes for _, num_bytes in sizes.values())
        + in_flight * sum(one.activation_bytes for one in costs),
        parameters=sum(size for size, _ in sizes.values()),
    )


def costs_of(layer: Layer) -> LayerCosts:
    """A layer's costs.

    Raises:
        PlanError: they were not measured.
    """
    if layer.costs is None:
        raise PlanError(
            "Planning a pipeline needs the costs of each layer.",
            received=f"no costs of {layer.name!r}",
            fix="Capture the model with a sample of its data.",
        )
    return layer.costs


def undivided(graph: LayerGraph) -> dict[str, str]:
    """Layers that run as one piece although they are made of others, with the reason."""
    return {layer.name: layer.atomic_reason for layer in graph.layers if layer.atomic_reason}


def why_fewer(graph: LayerGraph, units: Sequence[tuple[int, int]], wanted: int) -> str:
    """Why a model cannot have as many stages as were asked for.

    It computes the same in any number of stages, so it runs, with devices to spare.
    """
    reasons = [runs_whole(*one) for one in undivided(graph).items()][:3]
    if len(units) < len(graph.layers):
        reasons += [
            f"no cut may part {graph.layers[first].name!r} from {graph.layers[last].name!r}"
            for first, last in graph.inseparable[:3]
        ]
    found = f"{counted(len(units), 'stage')} instead of {wanted}, on as many devices"
    layers = f"the model has {counted(len(units), 'layer')}"
    return f"{found}: {'; '.join([layers, *reasons])}. A data parallel strategy takes more devices."
