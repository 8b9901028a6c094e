"""Pipeline schedules as data: which passes each rank runs, in which order.

Stages form a graph, not only a chain (two towers that meet, say); a stage may have several
replicas, which take microbatches in turn, and a rank may hold several stages. A schedule knows no
times: it is made for passes of equal length, and ``plan.pipeline.simulation`` computes its costs
for other lengths.

No schedule can deadlock. Where ranks hold one stage each, in all but gpipe, each rank of a stage
of r replicas warms up with ``w = 1 + ceil(d / r)`` forward passes, d being the replicas of later
stages on the longest path; or with ``2 * w - 1``, and let w be that. Number the forward pass of
microbatch m with m, and the backward pass with ``m + (w - 1) * r``. Then a pass waits for passes of
lower numbers only, but for forward passes of its own number: a forward pass for those of earlier
stages, a backward pass for one of its rank. So none waits for itself. Where ranks hold several
stages, passes are put into an order in which they can run one after the other.

Not here: pipelines that run both ways, and schedules searched for given times.
"""

from collections.abc import Callable, Iterable, Iterator

from lockstep.errors import PlanError
from lockstep.plan.pipeline.interleaving import interleave
from lockstep.plan.pipeline.stage_graph import StageGraph
from lockstep.plan.program.rank_program import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Pass,
    RankProgram,
)


def make_schedule(kind: str, graph: StageGraph, num_microbatches: int) -> tuple[RankProgram, ...]:
    """The passes of each rank in one training step.

    - ``gpipe``: all forward passes, then all backward passes (Huang et al. 2019).
    - ``1f1b``: forward passes until the first backward pass can come, then one of each in turn
      (Narayanan et al. 2019, PipeDream). Where ranks hold several stages it is ``interleaved``.
    - ``interleaved``: the same for ranks of several stages (Narayanan et al. 2021, Megatron-LM).
      Where each rank holds one it is ``1f1b``.
    - ``zb-h1``: gradients of weights are formed later, within 1f1b's peak of activations.
    - ``zb-h2``: a longer warm-up, too, with less than twice that peak (both: Qi et al. 2023, Zero
      Bubble Pipeline Parallelism).

    A stage's backward passes, and its passes for weights, run in the order of microbatches on each
    rank: gradients are summed in one order, whatever the schedule.

    Raises:
        PlanError: an unknown schedule, no microbatch, or a zero-bubble schedule for ranks that
            hold several stages.
    """
    _check_schedule(kind)
    _check_num_microbatches(num_microbatches)
    if any(len(stages) > 1 for stages in graph.stages_of_rank):
        _check_ranks_can_be_shared(kind, graph)
        return interleave(kind, graph, num_microbatches)
    warm_ups = _warm_ups(graph)
    longest = max(warm_ups)
    programs: list[RankProgram] = [()] * graph.num_ranks
    for stage, ranks in enumerate(graph.ranks):
        for rank in ranks:
            microbatches = graph.microbatches_of(stage, rank, num_microbatches)
            passes = _ORDERS[kind](stage, microbatches, warm_ups[stage], longest)
            programs[rank] = tuple(passes)
    return tuple(programs)


def forward_schedule(graph: StageGraph, num_microbatches: int) -> tuple[RankProgram, ...]:
    """The passes of each rank in evaluation: forward only.

    A rank of several stages takes each microbatch through all of them before the next.

    Raises:
        PlanError: no microbatch.
    """
    _check_num_microbatches(num_microbatches)
    return tuple(
        tuple(
            Forward(stage, microbatch)
            for microbatch in range(num_microbatches)
            for stage in stages
            if graph.rank_of(stage, microbatch) == rank
        )
        for rank, stages in enumerate(graph.stages_of_rank)
    )


# --- ranks that hold one stage each --------------------------------------------------------------


def _warm_ups(graph: StageGraph) -> list[int]:
    """For each stage the forward passes that a rank runs before its first backward pass.

    Until that can come, each replica of a later stage on the longest path may take a microbatch.
    In a chain of p stages without replicas it is p - s for stage s.
    """
    below = [0] * graph.num_stages  # replicas of later stages on the longest path
    for stage in reversed(range(graph.num_stages)):
        later = (len(graph.ranks[after]) + below[after] for after in graph.successors[stage])
        below[stage] = max(later, default=0)
    return [1 + -(-below[stage] // len(ranks)) for stage, ranks in enumerate(graph.ranks)]


# Each takes a stage, the microbatches of a rank, the stage's warm-up and the longest of any stage.


def _gpipe(stage: int, microbatches: range, warm_up: int, longest: int) -> Iterator[Pass]:
    yield from (Forward(stage, microbatch) for microbatch in microbatches)
    yield from (Backward(stage, microbatch) for microbatch in microbatches)


def _one_forward_one_backward(
    stage: int, microbatches: range, warm_up: int, longest: int
) -> Iterator[Pass]:
    yield from (Forward(stage, microbatch) for microbatch in microbatches[:warm_up])
    for index, microbatch in enumerate(microbatches):
        yield Backward(stage, microbatch)
        yield from _at(Forward, stage, microbatches, index + warm_up)


def _zero_bubble_h1(stage: int, microbatches: range, warm_up: int, longest: int) -> Iterator[Pass]:
    """Every rank may hold as many microbatches as the one that warms up longest.

    One that warms up less delays that many more of its weights' gradients: they fill its time when
    the pipeline drains.
    """
    delay = longest - warm_up
    yield from (Forward(stage, microbatch) for microbatch in microbatches[:warm_up])
    for index, microbatch in enumerate(microbatches):
        yield BackwardInput(stage, microbatch)
        yield from _at(BackwardWeight, stage, microbatches, index - delay)
        yield from _at(Forward, stage, microbatches, index + warm_up)
    delayed = microbatches[max(len(microbatches) - delay, 0) :]
    yield from (BackwardWeight(stage, microbatch) for microbatch in delayed)


def _zero_bubble_h2(stage: int, microbatches: range, warm_up: int, longest: int) -> Iterator[Pass]:
    """Warm up for as long as a microbatch takes to the last stage and back, not only there."""
    return _zero_bubble_h1(stage, microbatches, 2 * warm_up - 1, 2 * longest - 1)


def _at(make: type[Pass], stage: int, microbatches: range, index: int) -> Iterator[Pass]:
    if 0 <= index < len(microbatches):
        yield make(stage, microbatches[index])


_ORDERS: dict[str, Callable[[int, range, int, int], Iterable[Pass]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _one_forward_one_backward,
    "zb-h1": _zero_bubble_h1,
    "zb-h2": _zero_bubble_h2,
}
SCHEDULES = tuple(_ORDERS)


# --- checks ---------------------------------------------------------------------------------------


def _check_schedule(kind: str) -> None:
    if kind not in _ORDERS:
        raise PlanError(
            "The schedule is unknown.",
            received=repr(kind),
            fix=f"Use one of {', '.join(SCHEDULES)}.",
        )


def _check_num_microbatches(num_microbatches: int) -> None:
    if num_microbatches < 1:
        raise PlanError(
            "A schedule needs a microbatch.",
            received=f"num_microbatches={num_microbatches}",
            fix="Use at least one.",
        )


def _check_ranks_can_be_shared(kind: str, graph: StageGraph) -> None:
    if kind.startswith("zb-"):
        rank = next(rank for rank, stages in enumerate(graph.stages_of_rank) if len(stages) > 1)
        raise PlanError(
            f"Schedule {kind} is for ranks that hold one stage each.",
            received=f"stages {graph.stages_of_rank[rank]} on rank {rank}",
            fix='Use "interleaved", or a rank for each stage.',
        )
