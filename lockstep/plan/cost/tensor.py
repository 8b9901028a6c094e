"""What tensor parallelism costs: ranks of one host compute their parts of layers.

A layer that is divided by columns gets its inputs whole; the layers behind it work on parts, until
one that is divided by rows adds up the ranks' results, or an operation that needs all gathers them.
In backward the gradients of a divided run's inputs are added up. All other layers run whole on
every rank.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from msgspec import structs

from lockstep.graph.layer_graph import Layer, LayerGraph, ParameterInfo
from lockstep.plan.cost.breakdown import PlanCost, StepTime
from lockstep.plan.cost.placement import Group, Placement
from lockstep.plan.cost.profile import Costs, Profile, costs_of_layers, profile_of
from lockstep.plan.cost.rates import backward_seconds, forward_seconds, update_seconds
from lockstep.plan.cost.staged import Layout, replica_memory, simulated
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


def grouped_cost(
    graph: LayerGraph, placement: Placement, splits: TensorSplits, layout: Layout, batch_size: int
) -> PlanCost:
    """What replicas or stages cost each of which is a group of ranks that divide its layers.

    A rank of each group stands for it, with its part of the layers. It updates its slice of the
    parameters, of which the group has one copy. What the ranks of a group exchange counts as
    forward and backward.

    Args:
        graph: of the model, with costs and operations.
        placement: of all ranks, group by group.
        splits: of the parameters.
        layout: of the groups.
        batch_size: of the global batch.
    """
    degree = len(placement) // layout.num_ranks
    group = placement.place(0, degree).group
    parts = [*parts_of(graph, splits, degree)]
    width = _element_bytes(graph)
    layers = tuple(_on_rank(one, graph.samples * width, group) for one in parts)
    profile = profile_of(structs.replace(graph, layers=layers)).sliced(degree)
    leaders = Placement(placement.cluster, placement.all[::degree])
    cost = simulated(profile, leaders, layout, batch_size)
    moved = sum(one.gathered + degree * one.summed for one in parts) * width * batch_size
    return replace(
        cost,
        memory=tuple(one for one in cost.memory for _ in range(degree)),
        memory_limits=tuple(one for one in cost.memory_limits for _ in range(degree)),
        bytes_sent=cost.bytes_sent * degree + moved,
    )


def _on_rank(part: LayerShard, width: float, group: Group) -> Layer:
    """A layer with the costs of a rank's part, and half of its exchanges in each pass."""
    costs, ways = part.layer.costs, part.ways
    if costs is None:
        return part.layer
    fixed = sum(group.inside.latency_seconds / 2 for one in (part.summed, part.gathered) if one)
    moved = _seconds(width * part.summed, group.size, group)
    moved = (moved + _seconds(width * part.gathered, 1, group)) / 2
    forward, backward = costs.forward_fixed_seconds, costs.backward_fixed_seconds
    own = structs.replace(
        costs,
        forward_seconds=forward + (costs.forward_seconds - forward) / ways + moved,
        backward_seconds=backward + (costs.backward_seconds - backward) / ways + moved,
        forward_fixed_seconds=forward + fixed,
        backward_fixed_seconds=backward + fixed,
        activation_bytes=costs.activation_bytes // ways,
        operations=costs.operations / ways,
    )
    return structs.replace(part.layer, costs=own)


def parts_of(graph: LayerGraph, splits: TensorSplits, ranks: int) -> Iterator[LayerShard]:
    """The layers of a graph on one of the ranks."""
    known = {one.name: one for one in splits.parameters}
    is_inside = False
    for layer in graph.layers:
        weights = [one for one in layer.parameters if len(one.shape) > 1]
        divided = [one for one in weights if one.name in known]
        if not divided:
            is_inside = is_inside and not layer.parameters
            yield LayerShard(layer=layer, ways=ranks if is_inside else 1)
            continue
        operations = 0.0 if layer.costs is None else layer.costs.operations / graph.samples
        uses = operations / (2 * sum(one.size for one in weights))  # of each element
        summed = gathered = 0.0
        for weight in divided:
            own = known[weight.name]
            rows, outs, ins = _product(layer, weight, own, uses)
            if own.by == "rows":
                summed, is_inside = summed + rows * outs, False
                continue
            if own.by == "matrices":
                gathered += 0.0 if is_inside else rows * ins  # gradients of inputs
            else:
                summed += 0.0 if is_inside else rows * ins
            gathered += rows * outs if own.gathered_for else 0.0
            is_inside = not own.gathered_for
        yield LayerShard(
            layer=layer, ways=ranks, parameter_ways=ranks, summed=summed, gathered=gathered
        )


# Layers whose weights of more than two dims are no stacks of matrices.
_WITHOUT_STACKS = ("Conv", "EinsumDense")


def _product(
    layer: Layer, weight: ParameterInfo, own: ParameterSplit, uses: float
) -> tuple[float, int, int]:
    """Rows of a sample in a layer's product, the sizes of its outputs and its inputs.

    A weight of shape (experts, ...) is a stack: its rows are those of all experts.
    """
    shape, dim = weight.shape, own.split.dim
    if own.by == "matrices":
        return uses * shape[0], shape[-1], shape[1]
    if len(shape) == 3 and dim > 0 and not layer.kind.startswith(_WITHOUT_STACKS):
        uses, shape, dim = uses * shape[0], shape[1:], dim - 1
    if own.by == "rows":
        return uses, shape[0 if dim else -1], shape[dim]
    if dim == 0:
        return uses, shape[0], shape[1]
    return uses, math.prod(shape[dim:]), shape[dim - 1]


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
