"""Lowering: from a Plan to each rank's program for a batch of a given size.

The same programs, run in simulated time, predict the time of a step of a pipeline.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby

from lockstep.plan.averaging import AveragedUpdate
from lockstep.plan.decision import LocalUpdate, Pipeline, Stage
from lockstep.plan.makers.replicas import part_of_replica, plan_of_replica
from lockstep.plan.pipeline.schedules import forward_schedule, make_schedule
from lockstep.plan.pipeline.simulation import StageCosts, Timeline, run_programs
from lockstep.plan.pipeline.stage_graph import StageGraph
from lockstep.plan.program.rank_program import (
    Action,
    Backward,
    Forward,
    RankProgram,
    Reduce,
    Step,
    Sync,
)
from lockstep.plan.shares import num_filled_shares
from lockstep.plan.spec import Plan


def stage_graph(pipeline: Pipeline, degree: int = 1) -> StageGraph:
    """The stages as schedules see them: ``degree`` ranks that divide layers together are one."""
    return StageGraph(
        ranks=tuple(
            tuple(rank // degree for rank in stage.ranks[::degree]) for stage in pipeline.stages
        ),
        edges=tuple(
            sorted(
                (before, number)
                for number, stage in enumerate(pipeline.stages)
                for before in stage.needs
            )
        ),
    )


def predict(pipeline: Pipeline, num_microbatches: int) -> Timeline:
    """The passes of a step with the times that the Plan expects; updates take none."""
    graph = stage_graph(pipeline)
    programs = make_schedule(pipeline.schedule, graph, num_microbatches)
    return run_programs(programs, graph, [_stage_costs(stage) for stage in pipeline.stages])


def _stage_costs(stage: Stage) -> StageCosts:
    assert stage.predicted is not None
    forward, backward = stage.predicted.forward_seconds, stage.predicted.backward_seconds
    # Both parts of a backward pass multiply as many numbers.
    half = backward / 2
    again = forward if stage.recompute else 0.0
    return StageCosts(forward=forward, backward_input=half + again, backward_weight=half)


def lower_train(plan: Plan, rank: int, num_samples: int) -> RankProgram:
    """One training step of ``rank`` on a batch of ``num_samples``.

    Empty shares have no passes: the rank still reduces, steps and synchronises, but for one that
    steps on its own parameters. Consecutive passes of one kind in an interleaved Plan run together.
    """
    if plan.pipeline is not None:
        return _lower_staged(plan, plan.pipeline, rank, num_samples)
    shares = _filled_shares(plan, rank, num_samples)
    passes: list[Action] = []
    if plan.interleaved:
        passes += [Forward(0, share) for share in shares]
        passes += [Backward(0, share) for share in shares]
    else:
        for share in shares:
            passes += [Forward(0, share), Backward(0, share)]
    if isinstance(plan.update, AveragedUpdate) and not passes:
        return ()
    if isinstance(plan.update, LocalUpdate | AveragedUpdate):
        return (*passes, Reduce(), Step())
    return (*passes, Reduce(), Step(), Sync())


def _lower_staged(plan: Plan, pipeline: Pipeline, rank: int, num_samples: int) -> RankProgram:
    if not isinstance(plan.update, AveragedUpdate):
        return lower_stages(plan, pipeline, num_samples)[rank // plan.tensor_degree]
    replica, number = divmod(rank, plan.ranks_per_replica)
    part = part_of_replica(plan, replica, num_samples)
    return lower_train(plan_of_replica(plan, replica), number, len(part)) if part else ()


def lower_stages(plan: Plan, pipeline: Pipeline, num_samples: int) -> list[RankProgram]:
    """One training step of every rank of a pipeline on a batch of ``num_samples``.

    Ranks that divide layers together have the same, which is there once.
    """
    num_filled = num_filled_shares(num_samples, plan.num_shares)
    graph = stage_graph(pipeline, plan.tensor_degree)
    programs = make_schedule(pipeline.schedule, graph, num_filled)
    return [(*passes, Reduce(), Step(), Sync()) for passes in programs]


def lower_forward(plan: Plan, rank: int, num_samples: int) -> RankProgram:
    """Evaluation or prediction of ``rank`` on a batch of ``num_samples``."""
    if plan.pipeline is not None:
        num_filled = num_filled_shares(num_samples, plan.num_shares)
        graph = stage_graph(plan.pipeline, plan.tensor_degree)
        return forward_schedule(graph, num_filled)[rank // plan.tensor_degree]
    return tuple(Forward(0, share) for share in _filled_shares(plan, rank, num_samples))


def leaves_a_rank_idle(plan: Plan, num_samples: int) -> bool:
    """Whether some rank works on no share of such a batch, and sees no buffer change."""
    if plan.pipeline is None:
        return not _filled(plan.shares_of(plan.num_replicas - 1), plan, num_samples)
    most = max(len(stage.ranks) for stage in plan.pipeline.stages) // plan.tensor_degree
    return num_filled_shares(num_samples, plan.num_shares) < most


def _filled_shares(plan: Plan, rank: int, num_samples: int) -> list[int]:
    return _filled(plan.shares_of_rank(rank), plan, num_samples)


def _filled(shares: range, plan: Plan, num_samples: int) -> list[int]:
    filled = num_filled_shares(num_samples, plan.num_shares)
    return [share for share in shares if share < filled]


def microbatches_of(actions: Iterable[Action]) -> list[int]:
    """The microbatches of actions that pass over one."""
    return [action.microbatch for action in actions if isinstance(action, Forward | Backward)]


def grouped(
    program: Sequence[Action], *, interleaved: bool, forward_first: bool = False
) -> list[tuple[Action, ...]]:
    """A program as groups of actions that run together.

    Args:
        program: of a rank.
        interleaved: consecutive passes of one kind run together.
        forward_first: no share goes backward before the losses of all shares are known.
    """
    groups: list[tuple[Action, ...]] = [(action,) for action in program]
    if interleaved:
        groups = [tuple(group) for _, group in groupby(program, type)]
    return sorted(groups, key=lambda group: forward_first and not isinstance(group[0], Forward))
