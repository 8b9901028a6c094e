"""Pipeline schedules as data: which passes each rank runs, in which order.

Stages form a graph, not only a chain (two towers that meet, say); a stage may have several
replicas, which take microbatches in turn, and a rank may hold several stages. A schedule knows no
times: it is made for passes of equal length, and ``plan.pipeline.simulation`` tells what it costs
with other lengths.

No schedule can deadlock. Where ranks hold one stage each, in all but gpipe, each rank of a stage
of r replicas warms up with ``w = 1 + ceil(d / r)`` forward passes, d being the replicas of later
stages on the longest path; or with ``2 * w - 1``, and let w be that. Number the forward pass of
microbatch m with m, and the backward pass with ``m + (w - 1) * r``. Then a pass waits for passes of
lower numbers only, but for forward passes of its own number: a forward pass for those of earlier
stages, a backward pass for one of its rank. So none waits for itself. Where ranks hold several
stages, passes are put into an order in which they can run one after the other.

Not here: pipelines that run both ways, and schedules searched for given times.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain

from lockstep.errors import PlanError, Problems
from lockstep.plan.program.rank_program import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Pass,
    RankProgram,
)
from lockstep.plan.shares import share_bounds


@dataclass(frozen=True, kw_only=True)
class StageGraph:
    """Stages, what each needs of others, and where each lives.

    Attributes:
        ranks: for each stage the ranks that hold a replica of it; microbatch m runs on rank
            ``ranks[stage][m % len(ranks[stage])]``.
        edges: ``(from, to)``: stage ``to`` needs something of stage ``from``, which has a lower
            number.

    Raises:
        PlanError: a stage without ranks or twice on one, or an edge that leads nowhere or back.
    """

    ranks: tuple[tuple[int, ...], ...]
    edges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        problems = Problems()
        _check_stages(self, problems)
        _check_edges(self, problems)
        problems.raise_if_any(PlanError)

    @classmethod
    def chain(cls, num_stages: int, num_ranks: int | None = None) -> "StageGraph":
        """Each stage feeds the next; stage s is on rank ``s % num_ranks``, by default on rank s.

        Raises:
            PlanError: no stage or no rank.
        """
        num_ranks = num_stages if num_ranks is None else num_ranks
        if min(num_stages, num_ranks) < 1:
            raise PlanError(
                "A pipeline needs stages and ranks.",
                received=f"{num_stages} stages on {num_ranks} ranks",
                fix="Use at least one of each.",
            )
        return cls(
            ranks=tuple((stage % num_ranks,) for stage in range(num_stages)),
            edges=tuple((stage, stage + 1) for stage in range(num_stages - 1)),
        )

    @property
    def num_stages(self) -> int:
        """Stages of the graph."""
        return len(self.ranks)

    @cached_property
    def num_ranks(self) -> int:
        """One more than the highest rank that holds a stage."""
        return 1 + max(rank for ranks in self.ranks for rank in ranks)

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """For each stage those that it needs something of."""
        return _by_key(self.num_stages, ((last, first) for first, last in self.edges))

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """For each stage those that need something of it."""
        return _by_key(self.num_stages, self.edges)

    @cached_property
    def stages_of_rank(self) -> tuple[tuple[int, ...], ...]:
        """For each rank the stages that it holds a replica of."""
        held = ((rank, stage) for stage, ranks in enumerate(self.ranks) for rank in ranks)
        return _by_key(self.num_ranks, held)

    def rank_of(self, stage: int, microbatch: int) -> int:
        """The rank that runs a microbatch through a stage."""
        ranks = self.ranks[stage]
        return ranks[microbatch % len(ranks)]

    def meetings(self, stage: int, other: int) -> set[tuple[int, int]]:
        """The ranks that run the same microbatches through one stage and through another."""
        most = math.lcm(len(self.ranks[stage]), len(self.ranks[other]))
        return {(self.rank_of(stage, each), self.rank_of(other, each)) for each in range(most)}

    def microbatches_of(self, stage: int, rank: int, num_microbatches: int) -> range:
        """The microbatches that ``rank``, which holds ``stage``, runs through it."""
        ranks = self.ranks[stage]
        return range(ranks.index(rank), num_microbatches, len(ranks))


def _by_key(size: int, pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """For each key below ``size`` the values that ``pairs`` give it, in order and once."""
    values: list[set[int]] = [set() for _ in range(size)]
    for key, value in pairs:
        values[key].add(value)
    return tuple(tuple(sorted(found)) for found in values)


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
        return _share_ranks(kind, graph, num_microbatches)
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


def needs_of(action: Pass, graph: StageGraph) -> Iterator[Pass]:
    """What must have ended before ``action`` can start.

    ``BackwardInput`` stands for the gradients of a stage's inputs, whether a pass of that name
    forms them or a ``Backward``: see ``result_of``.
    """
    stage, microbatch = action.stage, action.microbatch
    match action:
        case Forward():
            yield from (Forward(before, microbatch) for before in graph.predecessors[stage])
        case Backward() | BackwardInput():
            yield Forward(stage, microbatch)
            yield from (BackwardInput(after, microbatch) for after in graph.successors[stage])
        case BackwardWeight():
            yield BackwardInput(stage, microbatch)


def result_of(action: Pass) -> Pass:
    """What others that need ``action`` ask for in ``needs_of``."""
    if isinstance(action, Backward):
        return BackwardInput(action.stage, action.microbatch)
    return action


# --- ranks of one stage ---------------------------------------------------------------------------


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


# --- ranks of several stages ----------------------------------------------------------------------


@dataclass(kw_only=True)
class _Merge:
    """A rank's forward and backward passes on their way into one order.

    Attributes:
        lead: forward passes that may run before the next backward pass.
    """

    forwards: deque[Forward]
    backwards: deque[Backward]
    lead: int = 0
    passes: list[Pass] = field(default_factory=list)

    def advance(self, graph: StageGraph, done: set[Pass]) -> bool:
        """Run passes for as long as nothing that they need is missing; whether any could run."""
        before = len(self.passes)
        while (queue := self._next_queue()) and done.issuperset(needs_of(queue[0], graph)):
            action = queue.popleft()
            self.lead += 1 if isinstance(action, Backward) else -1
            self.passes.append(action)
            done.add(result_of(action))
        return len(self.passes) > before

    def _next_queue(self) -> deque[Forward] | deque[Backward]:
        return self.forwards if self.forwards and self.lead > 0 else self.backwards


def _share_ranks(kind: str, graph: StageGraph, num_microbatches: int) -> tuple[RankProgram, ...]:
    """Each rank takes a group of microbatches through one of its stages, then through the next.

    For a chain that goes round P ranks, and a number of microbatches that P divides, this is the
    order of Narayanan et al. 2021.
    """
    groups = _groups(num_microbatches, _round_trip(graph))
    merges = [_merge_of_rank(graph, rank, groups) for rank in range(graph.num_ranks)]
    if kind == "gpipe":
        for merge in merges:
            merge.lead = len(merge.forwards)
    else:
        _set_leads(graph, merges, groups)
    done: set[Pass] = set()
    while any(merge.backwards for merge in merges):
        moved = [merge.advance(graph, done) for merge in merges]
        if not any(moved):
            # All wait for backward passes: ranks warm up too little for a graph such as this.
            # What the first of all forward passes that are left needs is done, so it can run.
            waiting = (merge for merge in merges if merge.forwards)
            min(waiting, key=lambda merge: _turn(merge.forwards[0], groups)).lead += 1
    return tuple(tuple(merge.passes) for merge in merges)


def _round_trip(graph: StageGraph) -> int:
    """The most passes from a stage to the next one that shares a rank with it.

    With as many microbatches in a group, the first is back at a rank when the last has left it.
    """
    return max(_steps_to_own_rank(graph, stage) for stage in range(graph.num_stages))


def _steps_to_own_rank(graph: StageGraph, start: int) -> int:
    """Edges on the longest path from ``start`` to the next stage on a rank of its own; else 1."""
    steps = {start: 0}
    for stage in range(start + 1, graph.num_stages):
        before = [steps[first] for first in graph.predecessors[stage] if first in steps]
        if before:
            steps[stage] = 1 + max(before)
            if not set(graph.ranks[start]).isdisjoint(graph.ranks[stage]):
                return steps[stage]
    return 1


def _groups(num_microbatches: int, length: int) -> list[int]:
    """The group of each microbatch; groups have at least ``length``, if there are as many.

    Sizes differ by at most one. The rest as a short group of its own would be back at each rank
    before its turn, and leave all waiting.
    """
    bounds = share_bounds(num_microbatches, max(num_microbatches // length, 1))
    return [group for group, (start, stop) in enumerate(bounds) for _ in range(start, stop)]


def _turn(action: Forward | Backward, groups: Sequence[int]) -> tuple[int, int, int]:
    """Sorts passes of one kind so that each comes after all of its kind that it needs."""
    downstream = isinstance(action, Forward)
    stage = action.stage if downstream else -action.stage
    return groups[action.microbatch], stage, action.microbatch


def _merge_of_rank(graph: StageGraph, rank: int, groups: Sequence[int]) -> _Merge:
    places = [
        (stage, microbatch)
        for stage in graph.stages_of_rank[rank]
        for microbatch in graph.microbatches_of(stage, rank, len(groups))
    ]
    turn = partial(_turn, groups=groups)
    return _Merge(
        forwards=deque(sorted((Forward(*place) for place in places), key=turn)),
        backwards=deque(sorted((Backward(*place) for place in places), key=turn)),
    )


def _set_leads(graph: StageGraph, merges: Sequence[_Merge], groups: Sequence[int]) -> None:
    """A rank warms up with the forward passes that fit before its first backward pass can come.

    All passes are taken to be equally long.
    """
    ends = _forward_ends(graph, [merge.forwards for merge in merges], groups)
    for merge in merges:
        if merge.backwards:
            start = _earliest_start(graph, merge.backwards[0], ends)
            merge.lead = sum(ends[forward] <= start for forward in merge.forwards)


def _forward_ends(
    graph: StageGraph, forwards: Iterable[Iterable[Forward]], groups: Sequence[int]
) -> dict[Pass, int]:
    """When each forward pass ends if ranks run nothing else, in passes."""
    ends: dict[Pass, int] = {}
    free = [0] * graph.num_ranks
    for action in sorted(chain.from_iterable(forwards), key=partial(_turn, groups=groups)):
        rank = graph.rank_of(action.stage, action.microbatch)
        arrivals = (ends[need] for need in needs_of(action, graph))
        free[rank] = ends[action] = 1 + max((free[rank], *arrivals))
    return ends


def _earliest_start(graph: StageGraph, backward: Backward, ends: dict[Pass, int]) -> int:
    """When a backward pass could start if later stages did nothing else meanwhile, in passes."""
    starts: dict[int, int] = {}
    for stage in reversed(range(backward.stage, graph.num_stages)):
        arrivals = (starts[after] + 1 for after in graph.successors[stage])
        starts[stage] = max((ends[Forward(stage, backward.microbatch)], *arrivals))
    return starts[backward.stage]


# --- checks ---------------------------------------------------------------------------------------


def _check_schedule(kind: str) -> None:
    if kind not in _ORDERS:
        raise PlanError(
            "There is no such schedule.",
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


def _check_stages(graph: StageGraph, problems: Problems) -> None:
    if not graph.ranks:
        problems.add("A graph needs a stage.", received="ranks=()", fix="Name each stage's ranks.")
    for stage, ranks in enumerate(graph.ranks):
        if not ranks or len(set(ranks)) < len(ranks) or min(ranks) < 0:
            problems.add(
                f"Stage {stage} must live on at least one rank, and once on each.",
                received=f"ranks {ranks}",
                fix="Name different ranks, counted from 0.",
            )


def _check_edges(graph: StageGraph, problems: Problems) -> None:
    for first, last in graph.edges:
        if not 0 <= first < last < graph.num_stages:
            problems.add(
                f"An edge must lead from one of {graph.num_stages} stages to a later one.",
                received=f"edge {(first, last)}",
                fix="Number each stage after all those that it needs something of.",
            )
