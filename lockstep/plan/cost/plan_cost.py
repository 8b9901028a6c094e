"""What any Plan is expected to cost, from a model's graph and the devices that there are."""

from lockstep.cluster.topology import Cluster, Device, Host
from lockstep.errors import PlanError
from lockstep.graph.layer_graph import LayerGraph
from lockstep.plan.averaging import AveragedUpdate
from lockstep.plan.cost.breakdown import PlanCost
from lockstep.plan.cost.corrections import corrected, family_of
from lockstep.plan.cost.placement import Placement, placement_at
from lockstep.plan.cost.profile import Profile, profile_of
from lockstep.plan.cost.sharded import served_cost, sharded_cost
from lockstep.plan.cost.staged import Layout, simulated, staged_cost
from lockstep.plan.cost.tensor import grouped_cost, tensor_cost
from lockstep.plan.decision import Pipeline
from lockstep.plan.devices import is_cpu
from lockstep.plan.sharding import is_in
from lockstep.plan.spec import Plan


def cost_of(plan: Plan, graph: LayerGraph, cluster: Cluster, batch_size: int) -> PlanCost:
    """The time of a step, and the memory of each rank, by part.

    Args:
        plan: the Plan.
        graph: of its model, in the order in which layers run, with costs.
        cluster: the devices.
        batch_size: of the global batch.

    Raises:
        PlanError: the graph has no costs; or a Plan whose costs are not known: replicas that
            train locally, servers that do not wait, layers that ranks without common memory
            divide, sequences divided by time, several stages on a device, several threads for each
            of several ranks, other schedules than 1F1B.
    """
    _check_known(plan)
    return corrected(_modelled(plan, graph, cluster, batch_size), cluster, family_of(plan))


def _modelled(plan: Plan, graph: LayerGraph, cluster: Cluster, batch_size: int) -> PlanCost:
    profile = profile_of(graph, batch_size)
    if plan.pipeline is not None:
        layout, order = _layout_of(plan, plan.pipeline, graph, profile)
        placement = _placement(plan, cluster, order)
        if plan.tensor is not None:
            return grouped_cost(graph, placement, plan.tensor, layout, batch_size)
        return simulated(profile, placement, layout, batch_size)
    placement = _placement(plan, cluster, [*reversed(range(plan.num_ranks))])
    if plan.num_servers:
        return served_cost(profile, placement, plan.num_servers, plan.num_shares, batch_size)
    if plan.sharding is not None:
        sizes = unit_bytes(graph, plan.sharding.units)
        return sharded_cost(
            profile,
            placement,
            plan.sharding.level,
            sizes,
            plan.num_shares,
            batch_size,
            has_one_copy=plan.sharding.shares_parameters,
            replicas=len(plan.ranks_along("data", 0)),
            is_small=plan.sharding.is_small,
        )
    if plan.tensor is not None and plan.num_replicas > 1:
        layout = Layout((0,), (plan.num_replicas,), plan.num_shares)
        return grouped_cost(graph, placement, plan.tensor, layout, batch_size)
    if plan.tensor is not None:
        return tensor_cost(graph, profile, placement, plan.tensor, batch_size)
    layout = Layout((0,), (plan.num_ranks,), plan.num_shares)
    if plan.threads_per_device is None:  # it has those of the process
        profile = profile.threaded(cluster.hosts[0].num_cores)
    return staged_cost(profile, placement, layout, batch_size)


def unit_bytes(graph: LayerGraph, units: tuple[tuple[str, ...], ...]) -> list[float]:
    """Bytes of the parameters of each unit; in a traced graph a layer's name may end in ``@2``."""
    sizes = []
    for unit in units:
        found = {
            one.name: one.num_bytes
            for layer in graph.layers
            for one in layer.parameters
            if one.trainable and any(is_in(layer.name.partition("@")[0], name) for name in unit)
        }
        sizes.append(float(sum(found.values())))
    return sizes


def _check_known(plan: Plan) -> None:
    stages = () if plan.pipeline is None else plan.pipeline.stages
    held = [rank for stage in stages for rank in stage.ranks]
    reasons = {
        "replicas that train locally": isinstance(plan.update, AveragedUpdate),
        "servers for which workers do not wait": plan.is_stale,
        "layers that ranks without common memory divide": plan.tensor is not None
        and not plan.engine.shares_memory,
        "sequences divided by time": plan.tensor is not None and plan.tensor.by_time is not None,
        "several stages on a device": len(held) > len({*held}),
        "several threads for each of several ranks": plan.num_ranks > 1
        and is_cpu(plan.devices)
        and (plan.threads_per_device or 1) > 1,
        "a schedule other than 1f1b": plan.pipeline is not None
        and plan.pipeline.schedule != "1f1b",
    }
    unknown = [reason for reason, holds in reasons.items() if holds]
    if unknown:
        raise PlanError(
            "The planner has no costs for this Plan.",
            received=" and ".join(unknown),
            fix="Measure it: train some steps.",
        )


def _layout_of(
    plan: Plan, pipeline: Pipeline, graph: LayerGraph, profile: Profile
) -> tuple[Layout, list[int]]:
    """The Plan's stages in units, and its ranks in the order of places."""
    if len(plan.layers) != len(graph.layers):
        raise PlanError(
            "The Plan and the graph must be of one model.",
            received=f"{len(plan.layers)} layers and {len(graph.layers)}",
            fix="Measure the model again.",
        )
    stage_of_unit = [plan.layers[first].stage for first, _ in profile.units]
    starts = tuple(stage_of_unit.index(stage) for stage in range(len(pipeline.stages)))
    layout = Layout(
        starts=starts,
        replicas=tuple(len(stage.ranks) // plan.tensor_degree for stage in pipeline.stages),
        shares=plan.num_shares,
        recompute=all(stage.recompute for stage in pipeline.stages),
    )
    order = [rank for stage in reversed(pipeline.stages) for rank in reversed(stage.ranks)]
    return layout, order


def _placement(plan: Plan, cluster: Cluster, order: list[int]) -> Placement:
    places = []
    for rank in order:
        host = plan.host_of(rank) if plan.hosts else 0
        places.append((host, _device(cluster.hosts[host], plan.devices[rank])))
    return placement_at(cluster, places, apart=not plan.engine.shares_memory)


def _device(host: Host, name: str) -> Device:
    for device in host.devices:
        if device.name == name:
            return device
    raise PlanError(
        "The Plan is for other devices.",
        received=f"{name} on {host.name}, which has {', '.join(one.name for one in host.devices)}",
        fix="Plan for the devices that there are.",
    )
