"""Replicas with local steps: each has a Plan of its own, for its part of every batch."""

import msgspec

from lockstep.plan.decision import LocalUpdate, Pipeline, Stage, StagedUpdate
from lockstep.plan.shares import share_bounds
from lockstep.plan.spec import Plan


def plan_of_replica(plan: Plan, replica: int) -> Plan:
    """The Plan of a replica between two averages: as if it trained alone."""
    shares, size = plan.shares_of(replica), plan.ranks_per_replica
    ranks = range(replica * size, (replica + 1) * size)
    pipeline = plan.pipeline
    return msgspec.structs.replace(
        plan,
        mesh=tuple(axis for axis in plan.mesh if axis.name == "pipe"),
        devices=tuple(plan.devices[rank] for rank in ranks),
        num_shares=len(shares),
        shares_per_row=len(shares) if pipeline is None else 1,
        update=LocalUpdate() if pipeline is None else StagedUpdate(),
        pipeline=None if pipeline is None else _pipeline_on(pipeline, ranks),
        hosts=(),
        compression=None,
        notes=(),
    )


def _pipeline_on(pipeline: Pipeline, ranks: range) -> Pipeline:
    """The stages as some consecutive ranks hold them, numbered from 0."""

    def held(stage: Stage) -> tuple[int, ...]:
        return tuple(rank - ranks.start for rank in stage.ranks if rank in ranks)

    stages = tuple(msgspec.structs.replace(one, ranks=held(one)) for one in pipeline.stages)
    return msgspec.structs.replace(pipeline, stages=stages)


def part_of_replica(plan: Plan, replica: int, num_samples: int) -> range:
    """The samples of a batch that a replica trains on."""
    shares = plan.shares_of(replica)
    bounds = share_bounds(num_samples, plan.num_shares)
    return range(bounds[shares[0]][0], bounds[shares[-1]][1])
