"""Lowering: from a Plan to each rank's program for a batch of a given size."""

from lockstep.plan.averaging import AveragedUpdate
from lockstep.plan.decision import LocalUpdate, Pipeline
from lockstep.plan.prediction import stage_graph
from lockstep.plan.program import Action, Backward, Forward, RankProgram, Reduce, Step, Sync
from lockstep.plan.schedules import forward_schedule, make_schedule
from lockstep.plan.shares import num_filled_shares
from lockstep.plan.spec import Plan


def lower_train(plan: Plan, rank: int, num_samples: int) -> RankProgram:
    """One training step of ``rank`` on a batch of ``num_samples``.

    Empty shares have no passes: the rank still reduces, steps and synchronises, but for one that
    steps on its own parameters. Consecutive passes of one kind in an interleaved Plan run together.
    """
    if plan.pipeline is not None:
        return lower_stages(plan, plan.pipeline, num_samples)[rank]
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


def lower_stages(plan: Plan, pipeline: Pipeline, num_samples: int) -> list[RankProgram]:
    """One training step of every rank of a pipeline on a batch of ``num_samples``."""
    num_filled = num_filled_shares(num_samples, plan.num_shares)
    programs = make_schedule(pipeline.schedule, stage_graph(pipeline), num_filled)
    return [(*passes, Reduce(), Step(), Sync()) for passes in programs]


def lower_forward(plan: Plan, rank: int, num_samples: int) -> RankProgram:
    """Evaluation or prediction of ``rank`` on a batch of ``num_samples``."""
    if plan.pipeline is not None:
        num_filled = num_filled_shares(num_samples, plan.num_shares)
        return forward_schedule(stage_graph(plan.pipeline), num_filled)[rank]
    return tuple(Forward(0, share) for share in _filled_shares(plan, rank, num_samples))


def leaves_a_rank_idle(plan: Plan, num_samples: int) -> bool:
    """Whether some rank works on no share of such a batch, and sees no buffer change."""
    if plan.pipeline is None:
        return not _filled_shares(plan, plan.num_ranks - 1, num_samples)
    most = max(len(stage.ranks) for stage in plan.pipeline.stages)
    return num_filled_shares(num_samples, plan.num_shares) < most


def _filled_shares(plan: Plan, rank: int, num_samples: int) -> list[int]:
    filled = num_filled_shares(num_samples, plan.num_shares)
    mine = plan.shares_of(rank)
    return [share for share in mine if share < filled]
