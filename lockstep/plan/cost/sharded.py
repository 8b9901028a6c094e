"""Data parallelism whose ranks divide the training's state, as closed forms.

Sharded levels (ZeRO 1 to 3), and synchronous parameter servers.
"""

from collections.abc import Sequence
from dataclasses import replace

from lockstep.plan.cost.breakdown import Memory, PlanCost, StepTime
from lockstep.plan.cost.placement import Placement
from lockstep.plan.cost.profile import Profile
from lockstep.plan.cost.rates import (
    backward_seconds,
    forward_seconds,
    gather_seconds,
    scatter_seconds,
    sum_seconds,
    update_seconds,
)
from lockstep.plan.cost.staged import HEAP, Layout, exposed, staged_cost


def sharded_cost(
    profile: Profile,
    placement: Placement,
    level: str,
    unit_bytes: Sequence[float],
    shares: int,
    batch_size: int,
    *,
    has_one_copy: bool = False,
    replicas: int = 1,
    is_small: bool = False,
) -> PlanCost:
    """What a sharded Plan costs for batches of ``batch_size``.

    Args:
        profile: of the model.
        placement: of the ranks.
        level: see ``plan.sharding``.
        unit_bytes: parameters of each unit that is gathered.
        shares: of a batch.
        batch_size: of the global batch.
        has_one_copy: ranks have one copy of the parameters, and gather none.
        replicas: groups of ranks that divide parameters among themselves.
        is_small: units are gathered once in a step, and the memory of gradients is kept.
    """
    ranks, costs = len(placement), profile.whole
    place = placement.place(0, ranks)
    placed, group = place.placed, place.group
    turns, samples = -(-shares // ranks), -(-batch_size // shares)
    divided = sum(unit_bytes) if level == "parameters" and not has_one_copy else 0.0
    shard = ranks // replicas
    among = placement.place(0, shard).group
    gather = sum(gather_seconds(one, among) for one in unit_bytes if divided)
    copies = replace(group, size=replicas, hosts=min(group.hosts, replicas))
    buckets = unit_bytes or [costs.trainable_bytes]
    exchange = sum(scatter_seconds(one, group) for one in buckets)
    whole = costs.trainable_bytes
    exchange += 0.0 if has_one_copy else gather_seconds(whole - divided, group)
    exchange += gather_seconds(divided / shard, copies)
    forward = forward_seconds(costs, samples, placed)
    backward = backward_seconds(costs, samples, placed)
    num_gathers = 1 if is_small else 2 * turns
    exchange += num_gathers * gather
    step = StepTime(
        forward=turns * forward,
        backward=turns * backward,
        exchange=float(exposed(exchange, turns * (forward + backward), placed)),
        update=update_seconds(costs.trainable / ranks, profile.optimizer, placed),
    )
    largest = max(unit_bytes, default=0.0)
    kept = whole - sum(unit_bytes)
    own = costs.parameter_bytes - divided + divided / shard
    memory = Memory(
        parameters=costs.parameter_bytes / ranks if has_one_copy else own,
        # Autograd makes gradients beside the rows from which they are sent.
        gradients=2 * whole
        if level == "slots"
        else kept + sum(unit_bytes) / (1 if is_small else ranks),
        slots=profile.optimizer.slots * whole / ranks,
        activations=HEAP**placed.is_core
        * samples
        * (costs.activation_bytes + profile.gradient_bytes),
        gathered=(divided - divided / shard if is_small else largest) if divided else 0.0,
        buffers=whole / 8 if level == "slots" else largest,
        base=placed.base_bytes,
    )
    sent = (ranks - 1) * (whole + (not has_one_copy) * (whole - divided))
    sent += (replicas - 1 + num_gathers * replicas * (shard - 1)) * divided
    return PlanCost(
        step=step,
        memory=(memory,) * ranks,
        memory_limits=tuple(one.device.memory_bytes for one in placement.all),
        bytes_sent=sent,
    )


def served_cost(
    profile: Profile, placement: Placement, servers: int, shares: int, batch_size: int
) -> PlanCost:
    """What synchronous parameter servers cost: workers compute, and then servers update.

    Servers have the first places of ``placement``.
    """
    workers, costs = len(placement) - servers, profile.whole
    computing = Placement(placement.cluster, placement.all[servers:])
    base = staged_cost(profile, computing, Layout((0,), (workers,), shares), batch_size)
    group = placement.place(0, len(placement)).group
    placed = placement.place(0, servers).placed
    # Each server sums its part of what all workers have written.
    exchange = sum_seconds(costs.trainable_bytes * workers / servers, group, shares_memory=True)
    update = update_seconds(costs.trainable / servers, profile.optimizer, placed)
    server = Memory(
        slots=profile.optimizer.slots * costs.trainable_bytes / servers, base=placed.base_bytes
    )
    return PlanCost(
        step=replace(base.step, exchange=exchange, update=update),
        memory=(*(replace(one, slots=0.0) for one in base.memory), *(server,) * servers),
        memory_limits=tuple(one.device.memory_bytes for one in reversed(placement.all)),
        bytes_sent=base.bytes_sent,
    )
