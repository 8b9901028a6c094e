"""What a step of a pipeline is expected to take, from what its stages do."""

from lockstep.plan.decision import (
    Pipeline,
    Stage,
)
from lockstep.plan.schedules import StageGraph, make_schedule
from lockstep.plan.simulation import StageCosts, Timeline, run_programs


def stage_graph(pipeline: Pipeline) -> StageGraph:
    """The stages as schedules see them."""
    return StageGraph(
        ranks=tuple(stage.ranks for stage in pipeline.stages),
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
