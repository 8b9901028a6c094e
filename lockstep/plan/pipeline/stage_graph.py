"""The stages of a pipeline as a graph: which rank holds each, and which passes need which."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from lockstep.errors import PlanError, Problems
from lockstep.plan.program.rank_program import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Pass,
)


@dataclass(frozen=True, kw_only=True)
class StageGraph:
    """Stages, their dependencies, and the ranks that hold them.

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

    def at(self, place: int, degree: int) -> "StageGraph":
        """The same graph where each rank stands for ``degree`` consecutive ones: that of one place.

        Args:
            place: of a rank among those that stand for one here.
            degree: how many these are.
        """
        ranks = tuple(tuple(degree * rank + place for rank in held) for held in self.ranks)
        return StageGraph(ranks=ranks, edges=self.edges)

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
        """For each stage the stages that it needs."""
        return _by_key(self.num_stages, ((last, first) for first, last in self.edges))

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """For each stage the stages that need it."""
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


def needs_of(action: Pass, graph: StageGraph) -> Iterator[Pass]:
    """The passes that must have ended before ``action`` can start.

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
    """The pass under which ``needs_of`` names ``action``."""
    if isinstance(action, Backward):
        return BackwardInput(action.stage, action.microbatch)
    return action


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
