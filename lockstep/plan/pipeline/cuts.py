"""Where to cut a model into stages so that the slowest is as fast as possible.

The model's layers come in the order in which it computes, and a stage is a run of consecutive
ones. A cutting is the tuple ``starts`` of each stage's first layer; ``starts[0]`` is 0.

A stage writes each tensor that other stages use once, to memory that they share, and each of them
reads it once; gradients take the same way back. So what a stage costs depends on where it starts
and stops and not on the other cuts, and the best cutting is found by dynamic programming over
intervals (as in PipeDream, Narayanan et al. 2019, section 3.1). Times are compared as exact whole
numbers: a model of equal blocks has many cuttings that are equally good, and rounding shall not
choose among them.

Not covered: stages that hold runs of layers from several places of the order (interleaving),
stages on several devices, and memory that depends on the stage's place in the schedule.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import add

from lockstep.errors import PlanError, Problems
from lockstep.formatting import first_few, format_bytes
from lockstep.graph.layer_graph import Flow


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """The costs that a layer adds to its stage.

    Attributes:
        seconds: forward and backward of one microbatch.
        memory_bytes: parameters with their gradients and optimizer state, and activations kept.
        parameters: number of parameter elements.
    """

    seconds: float
    memory_bytes: int
    parameters: int = 0


@dataclass(frozen=True, kw_only=True)
class CutProblem:
    """A model to cut.

    Attributes:
        layers: in the order in which the model computes.
        flows: every tensor that a layer makes for others.
        seconds_per_byte: of writing a tensor for another stage, or of reading it.
        memory_limit_bytes: that no stage may exceed; None is no limit.

    Raises:
        PlanError: no layers, costs that are negative or not finite, or flows to no later layer.
    """

    layers: tuple[LayerCost, ...]
    flows: tuple[Flow, ...]
    seconds_per_byte: float
    memory_limit_bytes: int | None = None

    def __post_init__(self) -> None:
        problems = Problems()
        if not self.layers:
            problems.add(
                "A model without layers has no stages.", received="no layers", fix="Add some."
            )
        costs = [cost for each in self.layers for cost in (each.seconds, each.memory_bytes)]
        costs += [self.seconds_per_byte, *(flow.num_bytes for flow in self.flows)]
        strange = [cost for cost in costs if not (math.isfinite(cost) and cost >= 0)]
        if strange:
            problems.add(
                "Times and sizes are finite and not negative.",
                received=first_few(strange),
                fix="Measure again.",
            )
        back = [flow for flow in self.flows if not _goes_forward(flow, len(self.layers))]
        if back:
            problems.add(
                f"A tensor goes from a layer to later ones, of {len(self.layers)}.",
                received=first_few(back),
                fix="List layers in the order in which the model computes.",
            )
        problems.raise_if_any(PlanError)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A cutting and the costs of its stages, for one microbatch.

    Attributes:
        starts: index of the first layer of each stage.
        stage_seconds: forward and backward, with the transfers of both.
        stage_bytes_received: tensors that a stage reads of others, in the forward pass.
        stage_bytes_sent: tensors that a stage writes for others, in the forward pass.
    """

    starts: tuple[int, ...]
    stage_seconds: tuple[float, ...]
    stage_bytes_received: tuple[int, ...]
    stage_bytes_sent: tuple[int, ...]

    @property
    def slowest(self) -> float:
        """Seconds of the slowest stage."""
        return max(self.stage_seconds)


def describe_cut(problem: CutProblem, starts: Sequence[int]) -> Cut:
    """The costs of a given cutting; it may exceed the memory limit.

    Raises:
        PlanError: ``starts`` is no cutting of this model.
    """
    _check_starts(starts, len(problem.layers))
    clock = _clock_of(problem)
    received, sent = _traffic(problem, starts)
    return Cut(
        starts=tuple(starts),
        # Division of whole numbers rounds once, to the nearest float.
        stage_seconds=tuple(
            ticks / clock.per_second for ticks in _stage_ticks(problem, clock, starts)
        ),
        stage_bytes_received=tuple(received),
        stage_bytes_sent=tuple(sent),
    )


def best_cut(problem: CutProblem, num_stages: int) -> Cut:
    """The cutting with the shortest slowest stage, of those within the memory limit.

    Among equals it is the one with the fewest bytes sent, and then the one whose ``starts`` come
    first in lexicographic order. Exact. It takes O(n^2 num_stages) steps for n layers, and about
    n^2 where an even cutting is near the best: up to seconds for thousands of layers.

    Raises:
        PlanError: there are not so many layers, or no cutting is within the memory limit.
    """
    _check_num_stages(problem, num_stages)
    check_memory(problem, num_stages)
    clock = _clock_of(problem)
    limit = _sufficient_ticks(problem, clock, num_stages)
    times = ((row.start, row.ticks) for row in _rows(problem, clock, limit))
    slowest, _ = _best_path(times, len(problem.layers), num_stages, max, never=limit + 1)
    # A second pass, as a longer stage that others hide may send less.
    never = 1 + sum(flow.num_bytes for flow in problem.flows)
    traffic = (
        (row.start, row.sent_within(slowest, never)) for row in _rows(problem, clock, slowest)
    )
    _, starts = _best_path(traffic, len(problem.layers), num_stages, add, never=never)
    return describe_cut(problem, starts)


# --- exact costs ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Clock:
    """Times as whole numbers of a unit, the tick, in which every time given is exact.

    Attributes:
        layers: ticks of each layer.
        per_byte: ticks of sending or receiving a byte, and as much again for its gradient.
        per_second: ticks of a second.
    """

    layers: tuple[int, ...]
    per_byte: int
    per_second: int


def _clock_of(problem: CutProblem) -> _Clock:
    times = [layer.seconds for layer in problem.layers] + [2 * problem.seconds_per_byte]
    ratios = [time.as_integer_ratio() for time in times]
    # Denominators of floats are powers of 2, so the largest is a multiple of all.
    per_second = max(denominator for _, denominator in ratios)
    *layers, per_byte = (
        numerator * (per_second // denominator) for numerator, denominator in ratios
    )
    return _Clock(layers=tuple(layers), per_byte=per_byte, per_second=per_second)


def _traffic(problem: CutProblem, starts: Sequence[int]) -> tuple[list[int], list[int]]:
    """Bytes that each stage receives and sends in the forward pass."""
    received = [0] * len(starts)
    sent = [0] * len(starts)
    for flow in problem.flows:
        home = bisect_right(starts, flow.source) - 1
        others = {bisect_right(starts, user) - 1 for user in flow.users} - {home}
        for stage in others:
            received[stage] += flow.num_bytes
        if others:
            sent[home] += flow.num_bytes
    return received, sent


def _stage_ticks(problem: CutProblem, clock: _Clock, starts: Sequence[int]) -> list[int]:
    received, sent = _traffic(problem, starts)
    return [
        own + clock.per_byte * (read + written)
        for own, read, written in zip(_sums(clock.layers, starts), received, sent, strict=True)
    ]


def _sums(values: Sequence[int], starts: Sequence[int]) -> list[int]:
    return [sum(values[start:stop]) for start, stop in pairwise([*starts, len(values)])]


@dataclass(frozen=True, kw_only=True)
class _Row:
    """Costs of the intervals [start, start + 1), [start, start + 2) and so on."""

    start: int
    ticks: list[int]
    sent: list[int]

    def sent_within(self, limit: int, otherwise: int) -> list[int]:
        """Bytes sent, or ``otherwise`` where an interval takes more than ``limit`` ticks."""
        return [
            sent if ticks <= limit else otherwise
            for ticks, sent in zip(self.ticks, self.sent, strict=True)
        ]


def _rows(problem: CutProblem, clock: _Clock, limit: int) -> Iterator[_Row]:
    """Costs of all intervals, the last start first.

    A row ends where the layers alone take more than ``limit`` ticks or the memory limit: longer
    intervals do as well.

    ``ticks[i]`` and ``sent[i]`` are what layer i adds to an interval that begins at ``start`` and
    reaches it. They change only where ``start`` comes to a layer that makes or uses a tensor: its
    next user need not receive it any more, and its last user, once in one interval with the
    source, makes sending it unnecessary.
    """
    sent = [0] * len(problem.layers)
    received = [0] * len(problem.layers)
    next_users: list[list[tuple[int, int]]] = [[] for _ in problem.layers]
    last_users: list[list[tuple[int, int]]] = [[] for _ in problem.layers]
    for flow in problem.flows:
        holders = [flow.source, *sorted(set(flow.users))]
        sent[flow.source] += flow.num_bytes
        last_users[flow.source].append((holders[-1], flow.num_bytes))
        for holder, user in pairwise(holders):
            received[user] += flow.num_bytes
            next_users[holder].append((user, flow.num_bytes))
    ticks = [
        own + clock.per_byte * (read + written)
        for own, read, written in zip(clock.layers, received, sent, strict=True)
    ]
    ends = _row_ends(problem, clock, limit)
    for start in reversed(range(len(problem.layers))):
        for user, num_bytes in next_users[start]:
            ticks[user] -= clock.per_byte * num_bytes
        for user, num_bytes in last_users[start]:
            ticks[user] -= clock.per_byte * num_bytes
            sent[user] -= num_bytes
        within = slice(start, ends[start])
        yield _Row(
            start=start,
            ticks=list(accumulate(ticks[within])),
            sent=list(accumulate(sent[within])),
        )


def _row_ends(problem: CutProblem, clock: _Clock, limit: int) -> list[int]:
    """For each start, the largest stop of an interval whose layers alone keep both limits."""
    times = [0, *accumulate(clock.layers)]
    sizes = [0, *accumulate(layer.memory_bytes for layer in problem.layers)]
    room = sizes[-1] if problem.memory_limit_bytes is None else problem.memory_limit_bytes
    return [
        min(bisect_right(times, time + limit), bisect_right(sizes, size + room)) - 1
        for time, size in zip(times[:-1], sizes[:-1], strict=True)
    ]


def _best_path(
    rows: Iterator[tuple[int, list[int]]],
    num_layers: int,
    num_stages: int,
    join: Callable[[int, int], int],
    *,
    never: int,
) -> tuple[int, tuple[int, ...]]:
    """The least cost of joined intervals, and the first of the cuttings that have it.

    ``rows`` are costs of intervals, by their start from the last to the first. From ``never`` on,
    a cost means impossible. Every choice is the earliest next start among the best for
    the layers that remain, whatever came before, so the cutting is the first in lexicographic
    order.
    """
    # By number of stages, then by first layer: of the layers from there on, in so many stages.
    least = [[never] * (num_layers + 1) for _ in range(num_stages + 1)]
    following = [[num_layers] * (num_layers + 1) for _ in range(num_stages + 1)]
    least[0][num_layers] = 0
    for start, row in rows:
        rest = slice(start + 1, start + 1 + len(row))
        for count in range(1, num_stages + 1):
            costs = list(map(join, row, least[count - 1][rest]))
            if costs:
                least[count][start] = min(costs)
                following[count][start] = start + 1 + costs.index(least[count][start])
    starts = [0]
    for count in range(num_stages, 1, -1):
        starts.append(following[count][starts[-1]])
    assert least[num_stages][0] < never
    return least[num_stages][0], tuple(starts)


def _sufficient_ticks(problem: CutProblem, clock: _Clock, num_stages: int) -> int:
    """Ticks that some cutting within the memory limit keeps: of an even one, where it fits."""
    starts = _even_starts(clock.layers, num_stages)
    memory = _sums([each.memory_bytes for each in problem.layers], starts)
    if problem.memory_limit_bytes is None or max(memory) <= problem.memory_limit_bytes:
        return max(_stage_ticks(problem, clock, starts))
    written = sum(flow.num_bytes for flow in problem.flows)
    read = sum(flow.num_bytes * len(set(flow.users)) for flow in problem.flows)
    return sum(clock.layers) + clock.per_byte * (read + written)  # no stage takes more


def _even_starts(layer_ticks: Sequence[int], num_stages: int) -> list[int]:
    """Cuts next to equal parts of the layers' time, each stage with a layer at least."""
    times = [0, *accumulate(layer_ticks)]
    starts = [0]
    for stage in range(1, num_stages):
        start = bisect_left(times, times[-1] * stage // num_stages)
        latest = len(layer_ticks) - num_stages + stage
        starts.append(min(max(start, starts[-1] + 1), latest))
    return starts


# --- memory ---------------------------------------------------------------------------------------


def fewest_stages(problem: CutProblem, limit_bytes: int | None) -> int:
    """Stages that are needed to stay within ``limit_bytes``, which each layer by itself does."""
    if limit_bytes is None:
        return 1
    count, filled = 1, 0
    for layer in problem.layers:
        filled += layer.memory_bytes
        if filled > limit_bytes:
            count, filled = count + 1, layer.memory_bytes
    return count


def _needed_bytes(problem: CutProblem, num_stages: int) -> int:
    """The least memory limit that ``num_stages`` stages can keep."""
    least = max(layer.memory_bytes for layer in problem.layers)
    most = sum(layer.memory_bytes for layer in problem.layers)
    # More room never needs more stages; fewer stages than asked for can be cut further.
    return least + bisect_left(
        range(least, most), True, key=lambda limit: fewest_stages(problem, limit) <= num_stages
    )


def check_memory(cut_problem: CutProblem, num_stages: int) -> None:
    """Check that this number of stages can stay within the memory limit.

    Raises:
        PlanError: they cannot.
    """
    limit = cut_problem.memory_limit_bytes
    if limit is None:
        return
    needed = _needed_bytes(cut_problem, num_stages)
    if needed <= limit:
        return
    largest = max(layer.memory_bytes for layer in cut_problem.layers)
    if largest <= limit:
        fix = f"Use {fewest_stages(cut_problem, limit)} stages or more, on a device each."
    else:
        fix = (
            f"One layer alone needs {_exact_bytes(largest)}: "
            "use smaller microbatches, or devices with more memory."
        )
    raise PlanError(
        f"{counted(num_stages, 'stage')} of this model, however cut, "
        f"need {_exact_bytes(needed)} of memory on some device.",
        received=f"memory_limit_bytes={limit} ({format_bytes(limit)})",
        fix=fix,
    )


# --- checks ---------------------------------------------------------------------------------------


def _goes_forward(flow: Flow, num_layers: int) -> bool:
    return 0 <= flow.source < num_layers and all(
        flow.source < user < num_layers for user in flow.users
    )


def _check_starts(starts: Sequence[int], num_layers: int) -> None:
    rising = all(start < stop for start, stop in pairwise([*starts, num_layers]))
    if not (starts and starts[0] == 0 and rising):
        raise PlanError(
            f"Stages start at rising indices of the {counted(num_layers, 'layer')}, from 0.",
            received=f"starts={tuple(starts)}",
            fix="Give every stage a layer.",
        )


def _check_num_stages(cut_problem: CutProblem, num_stages: int) -> None:
    num_layers = len(cut_problem.layers)
    if not 1 <= num_stages <= num_layers:
        raise PlanError(
            "Every stage needs at least one layer.",
            received=f"{counted(num_stages, 'stage')} of {counted(num_layers, 'layer')}",
            fix=f"Use 1 to {num_layers} stages." if num_layers > 1 else "Use 1 stage.",
        )


# --- names and texts ------------------------------------------------------------------------------


def counted(count: int, noun: str) -> str:
    """A number with its noun."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _exact_bytes(num_bytes: int) -> str:
    """All digits too: needed and given may be equal when rounded."""
    return f"{num_bytes} bytes ({format_bytes(num_bytes)})"
