"""The order of passes on ranks that hold several stages of a pipeline."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from lockstep.plan.pipeline.stage_graph import StageGraph, needs_of, result_of
from lockstep.plan.program.rank_program import Backward, Forward, Pass, RankProgram
from lockstep.plan.shares import share_bounds


@dataclass(kw_only=True)
class _Merge:
    """Merges a rank's forward and backward passes into one order.

    Attributes:
        lead: forward passes that may run before the next backward pass.
    """

    forwards: deque[Forward]
    backwards: deque[Backward]
    lead: int = 0
    passes: list[Pass] = field(default_factory=list)

    def advance(self, graph: StageGraph, done: set[Pass]) -> bool:
        """Run passes until one waits for another; True if any could run."""
        before = len(self.passes)
        while (queue := self._next_queue()) and done.issuperset(needs_of(queue[0], graph)):
            action = queue.popleft()
            self.lead += 1 if isinstance(action, Backward) else -1
            self.passes.append(action)
            done.add(result_of(action))
        return len(self.passes) > before

    def _next_queue(self) -> deque[Forward] | deque[Backward]:
        return self.forwards if self.forwards and self.lead > 0 else self.backwards


def interleave(kind: str, graph: StageGraph, num_microbatches: int) -> tuple[RankProgram, ...]:
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
    """A key that sorts passes of one kind so that each follows those of its kind that it needs."""
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
