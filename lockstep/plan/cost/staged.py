"""Data parallelism and pipelines as closed forms: one is the other with a single stage.

A step of 1F1B takes as long as a microbatch needs through all stages, and then as long as one of
the stages needs for its other microbatches, for the exchange of its gradients and its update:
the stage for which that is most. For one stage that is exact. With several it is what the event
simulator finds where no rank waits in the middle of the step; ``simulated`` asks it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from lockstep.plan.cost.breakdown import Memory, PlanCost, StepTime
from lockstep.plan.cost.placement import Group, PlacedDevice, Placement
from lockstep.plan.cost.profile import Costs, Profile
from lockstep.plan.cost.rates import (
    backward_seconds,
    bytes_moved,
    forward_seconds,
    gather_seconds,
    send_seconds,
    sum_seconds,
    update_seconds,
)
from lockstep.plan.pipeline.schedules import make_schedule
from lockstep.plan.pipeline.simulation import StageCosts, run_programs
from lockstep.plan.pipeline.stage_graph import StageGraph

# Gradients of ranks that share no memory leave in so many buckets, while backward goes on.
BUCKETS = 8

# Freed blocks of the heap do not fit what comes next: so much of it is resident for what is in use.
HEAP = 1.25

# Gradients of the whole model that a rank has at once when ranks compare theirs.
PROOF = 2.0

# Passes of more than this are not simulated one by one.
_MOST_PASSES = 4_000


@dataclass(frozen=True, order=True)
class Layout:
    """Which units and how many devices each stage has, and the number of microbatches.

    Attributes:
        starts: the first unit of each stage.
        replicas: of each stage; they take turns with the microbatches.
        shares: microbatches of the batch.
        recompute: whether stages keep their inputs alone, and compute again in backward.
    """

    starts: tuple[int, ...]
    replicas: tuple[int, ...]
    shares: int
    recompute: bool = False

    @property
    def num_ranks(self) -> int:
        """Devices in use."""
        return sum(self.replicas)


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """What one rank of a stage needs.

    Attributes:
        forward: seconds of a microbatch's forward pass.
        backward: of its backward pass, with what is computed again.
        transfer: of receiving and sending activations and their gradients.
        exchange: of gradients, as far as backward does not hide it.
        update: of the optimizer.
        turns: microbatches that the rank runs.
        memory: at the peak.
        limit: of the device's memory; 0 if it is not known.
        bytes_sent: by all ranks of the stage.
    """

    forward: float
    backward: float
    transfer: float
    exchange: float
    update: float
    turns: int
    memory: Memory
    limit: int
    bytes_sent: float

    @property
    def turn(self) -> float:
        """Seconds of a microbatch."""
        return self.forward + self.backward + self.transfer

    @property
    def rest(self) -> float:
        """Seconds of all but its first microbatch, and of what follows."""
        return (self.turns - 1) * self.turn + self.exchange + self.update


def staged_cost(
    profile: Profile, placement: Placement, layout: Layout, batch_size: int
) -> PlanCost:
    """What a layout costs for batches of ``batch_size``."""
    stages = list(stage_costs(profile, placement, layout, batch_size))
    seconds = sum(stage.turn for stage in stages) + max(stage.rest for stage in stages)
    return _plan_cost(stages, layout, seconds)


def simulated(profile: Profile, placement: Placement, layout: Layout, batch_size: int) -> PlanCost:
    """The same by the event simulator, if it has stages and not too many passes."""
    stages, alone = list(stage_costs(profile, placement, layout, batch_size)), _alone(layout)
    if len(stages) == 1 or alone.shares * len(stages) > _MOST_PASSES:
        return staged_cost(profile, placement, layout, batch_size)
    return _plan_cost(stages, layout, _simulated_seconds(stages, alone))


def stage_costs(
    profile: Profile, placement: Placement, layout: Layout, batch_size: int
) -> Iterator[StageCost]:
    """The costs of each stage, from the first to the last."""
    behind = layout.num_ranks
    edges = pairwise([*layout.starts, profile.num_units])
    for (start, stop), replicas in zip(edges, layout.replicas, strict=True):
        behind -= replicas
        yield stage_cost(profile, placement, layout, batch_size, start, stop, behind, replicas)


def in_flight(behind: int, replicas: int, turns: int) -> int:
    """Microbatches of a rank whose activations wait for backward at once, in 1F1B.

    Args:
        behind: ranks of later stages.
        replicas: of this stage.
        turns: microbatches that the rank runs.
    """
    return min(turns, 1 + -(-behind // replicas))


def kept_bytes(activations: Any, received: Any, at_once: int, *, recompute: bool) -> Any:
    """Activations of the microbatches at once, or their inputs and one microbatch's."""
    return at_once * received + activations if recompute else at_once * activations


def exposed(exchange: Any, backward: Any, placed: PlacedDevice) -> Any:
    """The part of an exchange that the last backward pass does not hide.

    Cores compute and exchange themselves. Accelerators do both at once, but for a bucket.
    """
    return exchange if placed.is_core else np.maximum(exchange / BUCKETS, exchange - backward)


def replica_memory(
    costs: Costs,
    slots: float,
    placed: PlacedDevice,
    group: Group,
    activations: Any,
    messages: Any,
    whole_bytes: float,
    tried_bytes: Any = 0.0,
) -> Memory:
    """A rank of a stage whose replicas each have all of its parameters.

    Ranks of a host's cores have one copy of the parameters together. Autograd makes gradients in
    memory that the heap keeps beside that of the last step's, or of the row that all ranks see; a
    rank beside others forms those of large matrices there. The script's rank has a copy of all for
    restarts, if there are others. Each replica forms its part of gradients whose factors they
    exchange.

    Args:
        costs: of the stage.
        slots: of the optimizer.
        placed: of the rank.
        group: of the stage's replicas.
        activations: kept from forward to backward, and gradients of one layer's.
        messages: buffers.
        whole_bytes: of the whole model's trained parameters. Before the first step ranks of several
            compare its gradients, and what the heap then had it keeps.
        tried_bytes: that the script's rank, of this stage, has for a while before the first step.
    """
    together = group.on_a_host if placed.shares_memory else 1
    if placed.is_core:
        activations = HEAP * activations
    factored = costs.factored_bytes
    formed = costs.formed_bytes if placed.has_others else 0.0
    made = placed.is_core * (costs.trainable_bytes - formed)
    copies = placed.has_others * placed.is_core * costs.trainable_bytes * (1 + slots)
    scratch = 0.0 if placed.shares_memory or group.size == 1 else costs.trainable_bytes / BUCKETS
    has_own = group.size == 1 or not placed.shares_memory
    kept = made + activations + has_own * costs.trainable_bytes
    before = placed.has_others * placed.is_core * PROOF * whole_bytes
    of_script = before + _excess(placed.is_core * tried_bytes - before)
    compared = _excess(of_script - kept - copies) + (group.size - 1) * _excess(before - kept)
    return Memory(
        parameters=costs.parameter_bytes / together,
        gradients=costs.trainable_bytes - factored * (1 - 1 / group.size) + made,
        slots=slots * costs.trainable_bytes / group.size,
        activations=activations,
        buffers=messages + scratch + (copies + compared) / group.size,
        base=placed.base_bytes,
    )


def _excess(difference: Any) -> Any:
    """What is above zero, of a number or an array."""
    return (difference + abs(difference)) / 2


def tried_bytes(profile: Profile, batch_size: int) -> float:
    """Of a batch's passes through the whole model: the script tries it before stages divide it."""
    whole = profile.whole
    passes = batch_size * (whole.activation_bytes + profile.gradient_bytes)
    return passes + whole.trainable_bytes


def stage_cost(
    profile: Profile,
    placement: Placement,
    layout: Layout,
    batch_size: int,
    start: int,
    stop: int,
    behind: int,
    replicas: int,
) -> StageCost:
    """The costs of units ``[start, stop)`` as a stage of ``replicas``, with ``behind`` ranks later.

    The layout gives the number of microbatches, and whether stages compute again.
    """
    samples = -(-batch_size // layout.shares)
    turns = -(-layout.shares // replicas)
    costs, place = profile.of(start, stop), placement.place(behind, replicas)
    placed, group = place.placed, place.group
    received, sent = (samples * size for size in profile.traffic(start, stop))
    transfer = send_seconds(received, place.before) + send_seconds(sent, place.after)
    forward = forward_seconds(costs, samples, placed)
    backward = backward_seconds(costs, samples, placed) + layout.recompute * forward
    is_whole = (start, stop) == (0, profile.num_units)
    if not (is_whole and replicas > 1 and placed.shares_memory and group.hosts == 1):
        costs = replace(costs, factored_bytes=0.0, factor_bytes=0.0)
    summed = costs.trainable_bytes - costs.factored_bytes
    exchange = sum_seconds(summed, group, shares_memory=placed.shares_memory)
    factors = batch_size * costs.factor_bytes
    exchange += gather_seconds(factors, group) if factors else 0.0
    at_once = in_flight(behind, replicas, turns)
    activations = kept_bytes(
        samples * costs.activation_bytes, received, at_once, recompute=layout.recompute
    )
    activations += samples * profile.gradient_bytes
    slots = profile.optimizer.slots
    moved = bytes_moved(costs.trainable_bytes, group, shares_memory=placed.shares_memory)
    return StageCost(
        forward=forward,
        backward=backward,
        transfer=transfer,
        exchange=float(exposed(exchange, backward, placed)),
        update=update_seconds(costs.trainable / replicas, profile.optimizer, placed),
        turns=turns,
        memory=replica_memory(
            costs,
            slots,
            placed,
            group,
            activations,
            2 * (received + sent) + factors / replicas,
            profile.whole.trainable_bytes,
            tried_bytes(profile, batch_size) * (start == 0 and not is_whole and layout.shares > 1),
        ),
        limit=place.limit,
        bytes_sent=moved + 2 * sent * layout.shares,
    )


def _plan_cost(stages: Sequence[StageCost], layout: Layout, seconds: float) -> PlanCost:
    slowest = max(stages, key=lambda stage: stage.turn + stage.rest)
    busy = StepTime(
        forward=slowest.turns * slowest.forward,
        backward=slowest.turns * slowest.backward,
        exchange=slowest.turns * slowest.transfer + slowest.exchange,
        update=slowest.update,
    )
    ranks = list(zip(stages, layout.replicas, strict=True))
    return PlanCost(
        step=replace(busy, bubble=max(seconds - busy.total, 0.0)),
        memory=tuple(stage.memory for stage, count in ranks for _ in range(count)),
        memory_limits=tuple(stage.limit for stage, count in ranks for _ in range(count)),
        bytes_sent=sum(stage.bytes_sent for stage in stages),
    )


def _alone(layout: Layout) -> Layout:
    """One of the pipelines, where all stages have as many replicas, which do the same."""
    first = layout.replicas[0]
    if {*layout.replicas} != {first} or layout.shares % first:
        return layout
    return replace(layout, replicas=(1,) * len(layout.starts), shares=layout.shares // first)


def _simulated_seconds(stages: Sequence[StageCost], layout: Layout) -> float:
    """The end of the rank that is last to have exchanged and updated."""
    ends = [sum(layout.replicas[: stage + 1]) for stage in range(len(stages))]
    graph = StageGraph(
        ranks=tuple(tuple(range(low, high)) for low, high in pairwise([0, *ends])),
        edges=tuple((stage, stage + 1) for stage in range(len(stages) - 1)),
    )
    costs = [
        StageCosts(
            forward=stage.forward + stage.transfer / 2,
            backward_input=stage.backward + stage.transfer / 2,
            backward_weight=0.0,
        )
        for stage in stages
    ]
    programs = make_schedule("1f1b", graph, layout.shares)
    afterwards = [
        stage.exchange + stage.update
        for stage, count in zip(stages, layout.replicas, strict=True)
        for _ in range(count)
    ]
    return run_programs(programs, graph, costs, after=afterwards).makespan
