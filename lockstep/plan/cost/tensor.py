"""Tensor parallelism as a closed form: ranks of one host compute their parts of layers.

A layer that is divided by columns gets its inputs whole; the layers behind it work on parts, until
one that is divided by rows adds up the ranks' results, or an operation that needs all gathers them.
In backward the gradients of a divided run's inputs are added up. All other layers run whole on
every rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lockstep.graph.layer_graph import Layer, LayerGraph, ParameterInfo
from lockstep.plan.cost.parts import PlanCost, StepTime
from lockstep.plan.cost.placement import Group, Placement
from lockstep.plan.cost.profile import Costs, Profile, costs_of_layers
from lockstep.plan.cost.rates import backward_seconds, forward_seconds, update_seconds
from lockstep.plan.cost.staged import replica_memory
from lockstep.plan.splits import ParameterSplit, TensorSplits


@dataclass(frozen=True, kw_only=True)
class LayerShard:
    """A layer on a rank.

    Attributes:
        layer: the layer.
        ways: how many ranks divide it; 1 if it is whole.
        parameter_ways: likewise its parameters.
        summed: elements for a sample of what is added up, in forward or backward.
        gathered: likewise of what is gathered.
    """

    layer: Layer
    ways: int = 1
    parameter_ways: int = 1
    summed: float = 0.0
    gathered: float = 0.0


def tensor_cost(
    graph: LayerGraph, profile: Profile, placement: Placement, splits: TensorSplits, batch_size: int
) -> PlanCost:
    """What dividing layers costs for batches of ``batch_size``.

    Args:
        graph: of the model, with costs and operations.
        profile: of the graph.
        placement: of the ranks, all on one host.
        splits: of the parameters.
        batch_size: of the global batch, which every rank computes.
    """
    ranks, optimizer = len(placement), profile.optimizer
    place = placement.place(0, ranks)
    placed, group = place.placed, place.group
    parts = [*parts_of(graph, splits, ranks)]
    costs = _costs_of_rank(parts, graph.samples)
    width = batch_size * _element_bytes(graph)
    exchange = sum(
        _seconds(width * one.summed, ranks, group) + _seconds(width * one.gathered, 1, group)
        for one in parts
    )
    whole = profile.whole
    step = StepTime(
        forward=float(forward_seconds(costs, batch_size, placed)),
        backward=float(backward_seconds(costs, batch_size, placed)),
        exchange=float(exchange),
        update=float(update_seconds(whole.trainable / ranks, optimizer, placed)),
    )
    activations = batch_size * (costs.activation_bytes + profile.gradient_bytes)
    memory = replica_memory(
        whole, optimizer.slots, placed, group, activations, 0.0, whole.trainable_bytes
    )
    memory = replace(memory, gradients=costs.trainable_bytes + whole.trainable_bytes / ranks)
    moved = sum(width * (ranks * one.summed + one.gathered) for one in parts)
    return PlanCost(
        step=step,
        memory=(memory,) * ranks,
        memory_limits=tuple(one.device.memory_bytes for one in placement.all),
        bytes_sent=moved,
    )


def parts_of(graph: LayerGraph, splits: TensorSplits, ranks: int) -> Iterator[LayerShard]:
    """The layers of a graph on one of the ranks."""
    known = {one.name: one for one in splits.parameters}
    is_inside = False
    for layer in graph.layers:
        weights = (one for one in layer.parameters if one.name in known and len(one.shape) > 1)
        weight = next(weights, None)
        if weight is None:
            is_inside = is_inside and not layer.parameters
            yield LayerShard(layer=layer, ways=ranks if is_inside else 1)
            continue
        own = known[weight.name]
        rows, outs, ins = _product(layer, weight, own, graph.samples)
        if own.by == "rows":
            summed, gathered, is_inside = rows * outs, 0.0, False
        else:
            summed = 0.0 if is_inside else rows * ins  # gradients of inputs
            gathered = rows * outs if own.gathered_for else 0.0
            is_inside = not own.gathered_for
        yield LayerShard(
            layer=layer, ways=ranks, parameter_ways=ranks, summed=summed, gathered=gathered
        )


def _product(
    layer: Layer, weight: ParameterInfo, own: ParameterSplit, samples: int
) -> tuple[float, int, int]:
    """Rows of a sample in a layer's product, the sizes of its outputs and its inputs."""
    operations = 0.0 if layer.costs is None else layer.costs.operations
    rows = operations / (2 * weight.size) / samples
    cut, other = weight.shape[own.split.dim], weight.shape[own.split.dim == 0]
    return (rows, other, cut) if own.by == "rows" else (rows, cut, other)


def _costs_of_rank(parts: list[LayerShard], samples: int) -> Costs:
    """Calls take as long on parts as on the whole."""
    found = Costs()
    for one in parts:
        own = costs_of_layers([one.layer], samples)
        found = replace(
            found,
            forward_fixed=found.forward_fixed + own.forward_fixed,
            forward=found.forward + own.forward / one.ways,
            backward_fixed=found.backward_fixed + own.backward_fixed,
            backward=found.backward + own.backward / one.ways,
            activation_bytes=found.activation_bytes + own.activation_bytes / one.ways,
            trainable_bytes=found.trainable_bytes + own.trainable_bytes / one.parameter_ways,
        )
    return found


def _element_bytes(graph: LayerGraph) -> int:
    sizes = [one.num_bytes // one.size for one in graph.parameters if one.size]
    return max(sizes, default=4)


def _seconds(num_bytes: float, times: int, group: Group) -> float:
    """Every rank writes its part where all see it, they meet, and each reads all of it.

    Args:
        num_bytes: of the result.
        times: results that a rank reads: of a sum, those of all ranks.
        group: the ranks.
    """
    if not num_bytes:
        return 0.0
    written = num_bytes if times > 1 else num_bytes / group.size
    moved = (written + times * num_bytes) / group.inside.bytes_per_second
    return moved + group.inside.latency_seconds
