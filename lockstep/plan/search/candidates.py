"""Plans of every family that could train a model on the devices of a Cluster, with their costs."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec

from lockstep.cluster.topology import Cluster, Host
from lockstep.graph.layer_graph import LayerGraph
from lockstep.plan.cost.breakdown import PlanCost
from lockstep.plan.cost.corrections import corrected
from lockstep.plan.cost.placement import Placement, placement_of
from lockstep.plan.cost.plan_cost import unit_bytes
from lockstep.plan.cost.profile import Profile, profile_of
from lockstep.plan.cost.sharded import sharded_cost
from lockstep.plan.cost.staged import Layout, simulated
from lockstep.plan.cost.tensor import tensor_cost
from lockstep.plan.engines import over
from lockstep.plan.makers.data_parallel import Maker, Mirrored, SingleDevice
from lockstep.plan.makers.many_hosts import MirroredHosts
from lockstep.plan.makers.sharded import FullySharded, default_units
from lockstep.plan.makers.tensor import TensorParallel, splits_of
from lockstep.plan.pipeline.pipelines import Pipelined
from lockstep.plan.search.layouts import best_layouts, share_counts
from lockstep.plan.spec import Plan

LEVELS = ("slots", "gradients", "parameters")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A way to train, and what it costs.

    Attributes:
        name: for people.
        cost: of a step, and of each rank.
        maker: of its Plan.
        num_devices: in use.
        cluster: the hosts in use.
        family: see ``plan.cost.corrections.family_of``.
    """

    name: str
    cost: PlanCost
    maker: Maker
    num_devices: int
    cluster: Cluster
    family: str

    def plan(self, graph: LayerGraph, batch_size: int) -> Plan:
        """Its Plan.

        Raises:
            LockstepError: no such Plan can run on these hosts.
        """
        return self.maker(graph, self.cluster, batch_size)


@dataclass(frozen=True)
class Given(Maker):
    """A Plan that has been made.

    Attributes:
        made: the Plan.
    """

    made: Plan

    def __call__(self, graph: LayerGraph, cluster: Cluster, batch_size: int) -> Plan:
        """The Plan, whatever the batch."""
        return self.made


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A model, the devices, and a batch.

    Attributes:
        graph: of the model, with costs.
        cluster: the devices.
        batch_size: of the global batch.
        num_devices: at most; None is all.
        precision: of the Plans.
    """

    graph: LayerGraph
    cluster: Cluster
    batch_size: int
    num_devices: int | None = None
    precision: str = "fp32"


def candidates(problem: Problem) -> Iterator[Candidate]:
    """All of them, the single device first; those that do not fit into memory are among them."""
    profile = profile_of(problem.graph, problem.batch_size)
    placement = placement_of(problem.cluster, problem.num_devices)
    counts = _device_counts(placement, problem.batch_size)
    for count in counts:
        yield _of_layout(problem, profile, Layout((0,), (count,), count))
    for count in counts[1:]:
        yield from _sharded(problem, profile, count)
        yield from _divided(problem, profile, count)
    seen = {Layout((0,), (count,), count) for count in counts}
    for layout in _layouts(problem, profile, placement):
        if layout not in seen:
            seen.add(layout)
            yield _of_layout(problem, profile, layout)


def _device_counts(placement: Placement, batch_size: int) -> list[int]:
    """Powers of two, and all."""
    most = min(len(placement), batch_size)
    return sorted({1 << power for power in range(most.bit_length())} | {most})


# --- one replica for each device -----------------------------------------------------------------


def _sharded(problem: Problem, profile: Profile, count: int) -> Iterator[Candidate]:
    if len(problem.cluster.hosts) > 1:
        return  # ranks of one host divide the state
    is_on_cores = not problem.cluster.hosts[0].accelerators
    placement = placement_of(problem.cluster, count, apart=True)
    units = default_units(problem.graph)
    sizes = unit_bytes(problem.graph, units)
    for level in LEVELS:
        mirrored = Mirrored(devices=count, precision=problem.precision)
        inner = over("gloo" if is_on_cores else None, mirrored)
        divided = () if level == "slots" else sizes
        cost = sharded_cost(
            profile,
            placement,
            level,
            divided,
            count,
            problem.batch_size,
            has_one_copy=is_on_cores,
        )
        yield Candidate(
            name=f"sharded {level}, {count} devices",
            cost=corrected(cost, problem.cluster, "sharded"),
            maker=FullySharded(maker=inner, level=level, units=None, shares_parameters=is_on_cores),
            num_devices=count,
            cluster=problem.cluster,
            family="sharded",
        )


def _divided(problem: Problem, profile: Profile, count: int) -> Iterator[Candidate]:
    """Layers divided inside, if any can be, on the cores of one host."""
    splits = splits_of(problem.graph, count)
    if len(problem.cluster.hosts) > 1 or problem.cluster.hosts[0].accelerators:
        return
    if splits.parameters:
        placement = placement_of(problem.cluster, count)
        cost = tensor_cost(problem.graph, profile, placement, splits, problem.batch_size)
        yield Candidate(
            name=f"layers divided, {count} devices",
            cost=corrected(cost, problem.cluster, "tensor"),
            maker=TensorParallel(degree=count, precision=problem.precision, splits=splits),
            num_devices=count,
            cluster=problem.cluster,
            family="tensor",
        )


# --- stages --------------------------------------------------------------------------------------


def _layouts(problem: Problem, profile: Profile, placement: Placement) -> Iterator[Layout]:
    """The best for each number of microbatches, and of each number of stages.

    In a pipeline, layers with statistics over the batch would take those of a microbatch.
    """
    shares = share_counts(problem.batch_size, len(placement))
    is_whole = any(layer.uses_batch_statistics for layer in problem.graph.layers)
    if is_whole:
        shares = [1]
    has_limit = any(placed.device.memory_bytes for placed in placement.all)
    ways = (False, True) if has_limit else (False,)
    found = best_layouts(profile, placement, problem.batch_size, shares, recompute=ways)
    for one in sorted(found.values(), key=lambda one: one.seconds):
        yield _runnable(one.layout, problem.batch_size)
    for stages in () if is_whole else (2, 4, 8):
        if stages <= min(len(placement), profile.num_units):
            yield from _of_so_many(problem, profile, placement, stages)


def _of_so_many(
    problem: Problem, profile: Profile, placement: Placement, stages: int
) -> Iterator[Layout]:
    """The best layout of so many stages, cut evenly by time, on as many replicas as there are."""
    replicas = max(min(len(placement) // stages, problem.batch_size), 1)
    costs = [profile.of(unit, unit + 1) for unit in range(profile.num_units)]
    work = [one.forward + one.backward or one.operations for one in costs]
    starts = even_starts(work, stages)
    for microbatches in (stages, 2 * stages, 4 * stages):
        if microbatches * replicas <= problem.batch_size:
            yield Layout(starts, (replicas,) * stages, microbatches * replicas)


def even_starts(work: list[float], stages: int) -> tuple[int, ...]:
    """Cuts next to equal parts of the work, each stage with a unit at least."""
    sums, total = [0.0], sum(work)
    for one in work:
        sums.append(sums[-1] + one)
    starts = [0]
    for stage in range(1, stages):
        near = min(range(len(sums)), key=lambda at: abs(sums[at] - total * stage / stages))
        starts.append(min(max(near, starts[-1] + 1), len(work) - stages + stage))
    return tuple(starts)


def _runnable(layout: Layout, batch_size: int) -> Layout:
    """Stages' replicas get as many microbatches each."""
    if len(layout.starts) == 1:
        return layout
    most = max(layout.replicas)
    microbatches = max(min(-(-layout.shares // most), batch_size // most), 1)
    return replace(layout, shares=microbatches * most)


def _of_layout(problem: Problem, profile: Profile, layout: Layout) -> Candidate:
    placement = placement_of(problem.cluster, layout.num_ranks)
    if layout.num_ranks == layout.shares == 1:
        profile = profile.threaded(problem.cluster.hosts[placement.all[0].host].num_cores)
    numbers = sorted({placed.host for placed in placement.all})
    hosts = tuple(problem.cluster.hosts[number] for number in numbers)
    family = "stages" if len(layout.starts) > 1 else "replicas"
    if layout.num_ranks == 1:
        family = "one device"
    cost = simulated(profile, placement, layout, problem.batch_size)
    return Candidate(
        name=_name(layout),
        cost=corrected(cost, problem.cluster, family),
        maker=_maker(problem, profile, layout, hosts),
        num_devices=layout.num_ranks,
        cluster=msgspec.structs.replace(problem.cluster, hosts=hosts),
        family=family,
    )


def _name(layout: Layout) -> str:
    stages, ranks = len(layout.starts), layout.num_ranks
    again = ", recomputed" if layout.recompute else ""
    if stages == 1:
        parts = f", {layout.shares} shares" if layout.shares != ranks else ""
        return "one device" + parts if ranks == 1 else f"mirrored, {ranks} devices{parts}"
    counts = {*layout.replicas}
    replicas = (
        f"{layout.replicas[0]} x "
        if len(counts) == 1 and counts != {1}
        else ""
        if counts == {1}
        else f"{'-'.join(map(str, layout.replicas))} in "
    )
    return f"{replicas}{stages} stages, {layout.shares} microbatches{again}"


def _maker(problem: Problem, profile: Profile, layout: Layout, hosts: tuple[Host, ...]) -> Maker:
    ranks, precision = layout.num_ranks, problem.precision
    if len(layout.starts) > 1:
        return over(None, _pipelined(problem, profile, layout))
    if ranks == 1 and layout.shares == 1:
        device = placement_of(problem.cluster, 1).all[0].device
        return SingleDevice(device=device.name, precision=precision)
    shares = None if layout.shares == ranks else layout.shares
    if len(hosts) == 1:
        return over(None, Mirrored(devices=ranks, num_shares=shares, precision=precision))
    each = -(-ranks // len(hosts))
    many = MirroredHosts(devices_per_host=each, num_shares=shares, precision=precision)
    return over(None, many)


def _pipelined(problem: Problem, profile: Profile, layout: Layout) -> Pipelined:
    names = [layer.name for layer in problem.graph.layers]
    are_even = len({*layout.replicas}) == 1
    most = max(layout.replicas)
    return Pipelined(
        cuts=tuple(names[profile.units[start][0]] for start in layout.starts[1:]),
        microbatches=max(layout.shares // most, 1),
        replicas=most if are_even else layout.replicas,
        recompute=layout.recompute,
        precision=problem.precision,
    )
