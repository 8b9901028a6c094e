"""The costs of a schedule: programs run in simulated time, without any process.

A rank runs its passes in their order. A pass starts when its rank is free and all that it needs
has arrived: what another rank sends takes a transfer time, during which both ranks go on. A whole
backward pass sends when all of it has ended, as it would in a framework that splits none.

When it has run its passes, a rank exchanges gradients and updates (``REDUCE``, ``STEP``, ``SYNC``)
for as long as it is told. Times are in any unit, the same throughout. Not here: links that several
transfers share.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property

from lockstep.errors import PlanError, Problems
from lockstep.plan.pipeline.schedules import make_schedule
from lockstep.plan.pipeline.stage_graph import StageGraph, needs_of, result_of
from lockstep.plan.program.rank_program import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Pass,
    RankProgram,
)

Times = float | Sequence[float]
Transfer = float | Mapping[tuple[int, int], float]

_MOST_NAMED = 6


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """How long a stage's passes take on one microbatch; a whole backward pass takes both parts.

    Raises:
        PlanError: a time that is negative, infinite or NaN.
    """

    forward: float
    backward_input: float
    backward_weight: float

    def __post_init__(self) -> None:
        _check_times(astuple(self))

    def of(self, action: Pass) -> float:
        """How long ``action`` takes."""
        match action:
            case Forward():
                return self.forward
            case BackwardInput():
                return self.backward_input
            case BackwardWeight():
                return self.backward_weight
            case Backward():
                return self.backward_input + self.backward_weight


@dataclass(frozen=True, kw_only=True)
class Event:
    """A pass, and when it started and ended."""

    action: Pass
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """When each rank ran each of its passes in one step.

    Attributes:
        events: for each rank its passes in their order.
        steps_together: ranks begin each step together, at time 0. Without that a rank goes on to
            its next step as soon as it has done with this one, so that only the time from its own
            first pass on counts, as Qi et al. 2023 count it for ZB-H2.
        after: for each rank how long it exchanges and updates after its last pass; empty for no
            time.
    """

    events: tuple[tuple[Event, ...], ...]
    steps_together: bool = True
    after: tuple[float, ...] = ()

    @property
    def ends(self) -> tuple[float, ...]:
        """When each rank ends its last pass; 0 where it has none."""
        return tuple(events[-1].end if events else 0.0 for events in self.events)

    @cached_property
    def makespan(self) -> float:
        """How long the step takes: that of the rank that takes longest."""
        after = self.after or (0.0,) * len(self.events)
        begins = [events[0].start if events else 0.0 for events in self.events]
        if self.steps_together:
            begins = [0.0] * len(self.events)
        spans = zip(begins, self.ends, after, strict=True)
        return max((end - begin + more for begin, end, more in spans), default=0.0)

    @cached_property
    def bubble_rate(self) -> float:
        """The part of the makespan in which a rank is idle, on the mean over ranks."""
        busy = [sum(event.end - event.start for event in events) for events in self.events]
        if not self.makespan:
            return 0.0
        return max(1 - sum(busy) / len(busy) / self.makespan, 0.0)  # never -0% by rounding

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """For each rank the most microbatches whose activations it holds at once.

        It holds them from the start of the forward pass to the end of the backward pass, or of the
        pass for the weights. A rank of several stages holds a microbatch once for each. In
        evaluation, where no backward pass comes, it holds them during the forward pass only.
        """
        return tuple(_peak([event.action for event in events]) for events in self.events)


def simulate(
    *,
    schedule: str,
    stages: int,
    microbatches: int,
    forward: Times,
    backward_input: Times,
    backward_weight: Times,
    transfer: float = 0.0,
    chunks: int = 2,
) -> Timeline:
    """Predict one step of a pipeline: a chain of stages, each on a device of its own.

    Args:
        schedule: one of ``plan.pipeline.schedules.SCHEDULES``.
        stages: devices of the pipeline.
        microbatches: parts of the batch.
        forward: time of a stage's forward pass on a microbatch; or one time per stage.
        backward_input: the same for the gradients of its inputs.
        backward_weight: the same for the gradients of its weights.
        transfer: time from a device to the next, in either direction.
        chunks: into how many each device's stage is cut if the schedule is ``"interleaved"``:
            then times are cut as well, unless there is one for each chunk, in the model's order.

    Returns:
        The timeline, with times in the unit of those given. Under ``"zb-h2"`` devices need not
        begin a step together: see ``Timeline.steps_together``.

    Raises:
        PlanError: an unknown schedule, a number below 1, or times that do not fit the stages.
    """
    chunks = chunks if schedule == "interleaved" else 1
    graph = StageGraph.chain(stages * chunks, stages)
    costs = [
        StageCosts(forward=one, backward_input=other, backward_weight=third)
        for one, other, third in zip(
            _per_stage("forward", forward, stages, chunks),
            _per_stage("backward_input", backward_input, stages, chunks),
            _per_stage("backward_weight", backward_weight, stages, chunks),
            strict=True,
        )
    ]
    programs = make_schedule(schedule, graph, microbatches)
    return run_programs(programs, graph, costs, transfer, steps_together=schedule != "zb-h2")


def run_programs(
    programs: Sequence[RankProgram],
    graph: StageGraph,
    costs: Sequence[StageCosts],
    transfer: Transfer = 0.0,
    *,
    steps_together: bool = True,
    after: Sequence[float] = (),
) -> Timeline:
    """Run the passes of all ranks in simulated time.

    Args:
        programs: for each rank its program.
        graph: the stages.
        costs: for each stage how long its passes take.
        transfer: time for a stage's values to arrive at a stage on another rank, in either
            direction; or one for each edge of the graph.
        steps_together: see ``Timeline``.
        after: see ``Timeline``.

    Raises:
        PlanError: a deadlock, with what each rank waits for; or programs, costs or transfers
            that do not fit the graph.
    """
    _check_counts(graph, programs, costs)
    run = _Run(programs, graph, costs, _per_edge(transfer, graph))
    run.run()
    return Timeline(
        events=tuple(tuple(events) for events in run.events),
        steps_together=steps_together,
        after=tuple(after),
    )


def format_grid(timeline: Timeline, unit: float = 1.0) -> str:
    """The timeline as text: a row for each rank, a cell for each time ``unit``.

    A cell names the pass that runs in its middle, ``F0`` or, on a rank of several stages, ``1F0``;
    in the further cells of a longer pass are dashes. A cell is blank where the rank is idle.
    """
    rows = [_cells(events, unit) for events in timeline.events]
    width = max((len(cell) for row in rows for cell in row), default=0)
    margin = len(str(len(rows) - 1))
    return "\n".join(
        f"rank {rank:>{margin}} | {' '.join(_pad(cell, width) for cell in row)}".rstrip()
        for rank, row in enumerate(rows)
    )


def _cells(events: Sequence[Event], unit: float) -> list[str]:
    shows_stage = len({event.action.stage for event in events}) > 1
    cells: list[str] = []
    for event in events:
        start, stop = (math.ceil(time / unit - 0.5) for time in (event.start, event.end))
        if start < stop:
            name = str(event.action)
            name = name if shows_stage else name.removeprefix(str(event.action.stage))
            cells += [""] * (start - len(cells)) + [name] + ["-"] * (stop - start - 1)
    return cells


def _pad(cell: str, width: int) -> str:
    return cell * width if cell == "-" else f"{cell:<{width}}"


def _per_stage(name: str, times: Times, stages: int, chunks: int) -> list[float]:
    """One time for each stage of the chain, in its order."""
    if not isinstance(times, Sequence):
        return [times / chunks] * (stages * chunks)
    if len(times) == stages:
        return [time / chunks for time in times] * chunks
    if len(times) == stages * chunks:
        return list(times)
    lengths = f"{stages}" if chunks == 1 else f"{stages} or {stages * chunks}"
    raise PlanError(
        f"The times of {name} do not fit the stages.",
        received=f"{len(times)} times for {stages} stages",
        fix=f"Give one time for all, or a sequence of {lengths}.",
    )


# --- running --------------------------------------------------------------------------------------


class _Run:
    """Runs every rank until it needs a pass that has not ended."""

    def __init__(
        self,
        programs: Sequence[RankProgram],
        graph: StageGraph,
        costs: Sequence[StageCosts],
        transfers: Mapping[tuple[int, int], float],
    ) -> None:
        self.events: list[list[Event]] = [[] for _ in programs]
        self._graph = graph
        self._costs = costs
        self._transfers = transfers
        self._left = [deque(_passes(program)) for program in programs]
        self._ends: dict[Pass, float] = {}
        self._waiting: dict[Pass, list[int]] = {}

    def run(self) -> None:
        """Run every pass.

        Raises:
            PlanError: a deadlock.
        """
        able = deque(range(len(self._left)))
        while able:
            able.extend(self._advance(able.popleft()))
        if any(self._left):
            raise self._deadlock()

    def _advance(self, rank: int) -> list[int]:
        """Run what a rank can run; the ranks that have waited for some of that."""
        left = self._left[rank]
        freed: list[int] = []
        while left:
            needs = list(needs_of(left[0], self._graph))
            missing = next((need for need in needs if need not in self._ends), None)
            if missing is not None:
                self._waiting.setdefault(missing, []).append(rank)
                break
            result = self._run_pass(rank, left.popleft(), needs)
            freed += self._waiting.pop(result, [])
        return freed

    def _run_pass(self, rank: int, action: Pass, needs: Iterable[Pass]) -> Pass:
        events = self.events[rank]
        free = events[-1].end if events else 0.0
        start = max((free, *(self._arrival(need, action, rank) for need in needs)))
        end = start + self._costs[action.stage].of(action)
        events.append(Event(action=action, start=start, end=end))
        result = result_of(action)
        self._ends[result] = end
        return result

    def _arrival(self, need: Pass, action: Pass, rank: int) -> float:
        """When ``rank`` has what ``action`` needs of ``need``."""
        if self._graph.rank_of(need.stage, need.microbatch) == rank:
            return self._ends[need]
        first, last = sorted((need.stage, action.stage))  # gradients go against the edge
        return self._ends[need] + self._transfers[first, last]

    def _deadlock(self) -> PlanError:
        coming = {action for left in self._left for action in left}
        waits: list[tuple[int, str]] = []
        for need, ranks in self._waiting.items():
            whole = Backward(need.stage, need.microbatch)
            name = whole if whole in coming and result_of(whole) == need else need
            source = f"{name} of rank {self._graph.rank_of(need.stage, need.microbatch)}"
            for rank in ranks:
                waits.append((rank, f"rank {rank} at {self._left[rank][0]} for {source}"))
        return PlanError(
            "The programs deadlock: every rank that is not done waits for a pass.",
            received=_listed([text for _, text in sorted(waits)]),
            fix="Put each pass after those that it needs.",
        )


def _passes(program: RankProgram) -> list[Pass]:
    return [action for action in program if isinstance(action, Pass)]


def _peak(passes: Sequence[Pass]) -> int:
    """The most microbatches that wait for their last pass, if a rank runs ``passes``."""
    last = [action for action in passes if isinstance(action, Backward | BackwardWeight)]
    waits = {(action.stage, action.microbatch) for action in last}
    peak = held = 0
    for action in passes:
        if isinstance(action, Forward):
            peak = max(peak, held + 1)
            held += (action.stage, action.microbatch) in waits
        elif isinstance(action, Backward | BackwardWeight):
            held -= 1
    return peak


# --- checks ---------------------------------------------------------------------------------------


def _check_times(times: Iterable[float]) -> None:
    wrong = [str(time) for time in times if not 0 <= time < math.inf]
    if wrong:
        raise PlanError(
            "A pass or a transfer takes a finite time, of 0 or more.",
            received=_listed(wrong),
            fix="Correct the times.",
        )


def _per_edge(transfer: Transfer, graph: StageGraph) -> Mapping[tuple[int, int], float]:
    """The transfer time of each edge."""
    transfers = transfer if isinstance(transfer, Mapping) else dict.fromkeys(graph.edges, transfer)
    missing = [str(edge) for edge in graph.edges if edge not in transfers]
    if missing:
        raise PlanError(
            "Every edge needs a transfer time.",
            received=f"none for {_listed(missing)}",
            fix="Give one for each, or a single number.",
        )
    _check_times(transfers.values())
    return transfers


def _check_counts(
    graph: StageGraph, programs: Sequence[RankProgram], costs: Sequence[StageCosts]
) -> None:
    problems = Problems()
    if len(programs) != graph.num_ranks:
        problems.add(
            "Every rank needs a program.",
            received=f"{len(programs)} programs for {graph.num_ranks} ranks",
            fix="Give one for each rank, if only an empty one.",
        )
    if len(costs) != graph.num_stages:
        problems.add(
            "Every stage needs costs.",
            received=f"{len(costs)} costs for {graph.num_stages} stages",
            fix="Give them for each stage.",
        )
    problems.raise_if_any(PlanError)


def _listed(names: Sequence[str]) -> str:
    """The first few of ``names``, and how many more there are."""
    more = len(names) - _MOST_NAMED
    return "; ".join(names[:_MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
