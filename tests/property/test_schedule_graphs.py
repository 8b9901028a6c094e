"""Schedules of any graph: every pass once, on its rank, without deadlock, sums in one order."""

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.plan.pipeline.schedules import SCHEDULES, forward_schedule, make_schedule
from lockstep.plan.pipeline.simulation import StageCosts, Timeline, run_programs
from lockstep.plan.pipeline.stage_graph import StageGraph
from lockstep.plan.program.rank_program import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Pass,
)
from tests.programs import check_programs
from tests.thorough import core_of

MICROBATCHES = st.integers(1, 14)
MOST_STAGES = 7
SHARING = tuple(kind for kind in SCHEDULES if not kind.startswith("zb-"))


@st.composite
def edges(draw: st.DrawFn, num_stages: int) -> tuple[tuple[int, int], ...]:
    pairs = [(first, last) for last in range(num_stages) for first in range(last)]
    return tuple(pair for pair in pairs if draw(st.booleans()))


@st.composite
def graphs_of_one_stage_per_rank(draw: st.DrawFn) -> StageGraph:
    replicas = draw(st.lists(st.integers(1, 4), min_size=1, max_size=MOST_STAGES))
    free = iter(draw(st.permutations(range(sum(replicas)))))
    return StageGraph(
        ranks=tuple(tuple(next(free) for _ in range(count)) for count in replicas),
        edges=draw(edges(len(replicas))),
    )


@st.composite
def graphs(draw: st.DrawFn) -> StageGraph:
    """Ranks may hold several stages, or none."""
    ranks = st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True).map(tuple)
    placed = draw(st.lists(ranks, min_size=1, max_size=MOST_STAGES))
    return StageGraph(ranks=tuple(placed), edges=draw(edges(len(placed))))


def run_units(kind: str, graph: StageGraph, num_microbatches: int) -> Timeline:
    unit = StageCosts(forward=1, backward_input=1, backward_weight=1)
    programs = make_schedule(kind, graph, num_microbatches)
    return run_programs(programs, graph, [unit] * graph.num_stages)


def microbatches_in_order(timeline: Timeline, kind: type[Pass]) -> list[list[int]]:
    """For each rank and stage the microbatches of its passes of one kind."""
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, events in enumerate(timeline.events):
        for event in events:
            if isinstance(event.action, kind):
                found[rank, event.action.stage].append(event.action.microbatch)
    return list(found.values())


@pytest.mark.parametrize("kind", SCHEDULES)
@given(graph=graphs_of_one_stage_per_rank(), num_microbatches=MICROBATCHES)
def test_every_schedule_runs_on_ranks_of_one_stage(
    kind: str, graph: StageGraph, num_microbatches: int
) -> None:
    check_programs(make_schedule(kind, graph, num_microbatches), graph)


@pytest.mark.parametrize("kind", SHARING)
@given(graph=graphs(), num_microbatches=MICROBATCHES)
def test_schedules_run_on_ranks_of_several_stages(
    kind: str, graph: StageGraph, num_microbatches: int
) -> None:
    check_programs(make_schedule(kind, graph, num_microbatches), graph)


@pytest.mark.parametrize("kind", SHARING)
@given(num_stages=st.integers(1, 12), num_ranks=st.integers(1, 5), num_microbatches=MICROBATCHES)
def test_schedules_run_on_chains_that_go_round_the_ranks(
    kind: str, num_stages: int, num_ranks: int, num_microbatches: int
) -> None:
    graph = StageGraph.chain(num_stages, num_ranks)
    check_programs(make_schedule(kind, graph, num_microbatches), graph)


@given(graph=graphs(), num_microbatches=MICROBATCHES)
def test_evaluation_runs_on_any_graph(graph: StageGraph, num_microbatches: int) -> None:
    programs = forward_schedule(graph, num_microbatches)
    check_programs(programs, graph)
    assert sum(map(len, programs)) == num_microbatches * graph.num_stages


@pytest.mark.parametrize("kind", core_of(SCHEDULES, ["1f1b", "zb-h1"]))
@given(data=st.data(), num_microbatches=MICROBATCHES)
def test_a_rank_sums_the_gradients_of_a_stage_in_the_order_of_microbatches(
    kind: str, data: st.DataObject, num_microbatches: int
) -> None:
    graph = data.draw(graphs() if kind in SHARING else graphs_of_one_stage_per_rank())
    timeline = run_units(kind, graph, num_microbatches)
    orders = [
        order
        for action in (Forward, Backward, BackwardInput, BackwardWeight)
        for order in microbatches_in_order(timeline, action)
    ]
    assert orders == [sorted(order) for order in orders]


@pytest.mark.thorough
@given(graph=graphs_of_one_stage_per_rank(), num_microbatches=MICROBATCHES)
def test_zero_bubble_schedules_keep_to_their_memory(
    graph: StageGraph, num_microbatches: int
) -> None:
    plenty = 2 * graph.num_ranks  # as many as the longest warm-up takes
    peak = max(run_units("1f1b", graph, plenty).peak_activations)
    assert max(run_units("zb-h1", graph, num_microbatches).peak_activations) <= peak
    assert max(run_units("zb-h2", graph, num_microbatches).peak_activations) <= 2 * peak - 1
