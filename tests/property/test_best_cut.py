"""The best cutting is what trying all of them finds, ties and all."""

import itertools
import re
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import PlanError
from lockstep.graph.layer_graph import Flow
from lockstep.plan.pipeline.cuts import CutProblem, LayerCost, best_cut, describe_cut

# Few different values make ties; arbitrary floats make sums that round.
SECONDS = st.sampled_from([0.0, 0.25, 0.5, 1.0]) | st.integers(0, 10**6).map(lambda n: n * 1e-7)
SECONDS_PER_BYTE = st.sampled_from([0.0, 0.125, 0.5]) | st.integers(1, 10**4).map(
    lambda n: n * 1e-9
)
LAYERS = st.builds(
    lambda seconds, memory_bytes: LayerCost(seconds=seconds, memory_bytes=memory_bytes),
    SECONDS,
    st.sampled_from([3, 2, 4, 1, 5, 0]),
)
NUM_BYTES = st.integers(0, 3) | st.integers(0, 1 << 20)


@st.composite
def flows(draw: st.DrawFn, num_layers: int) -> tuple[Flow, ...]:
    """A chain, with tensors that skip layers, are used often, or by nobody."""
    made = [
        Flow(source=i, num_bytes=draw(NUM_BYTES), users=(i + 1,)) for i in range(num_layers - 1)
    ]
    for _ in range(draw(st.integers(0, 6))):
        source = draw(st.integers(0, num_layers - 1))
        later = list(range(source + 1, num_layers))
        users = draw(st.lists(st.sampled_from(later), max_size=4)) if later else []
        made.append(Flow(source=source, num_bytes=draw(NUM_BYTES), users=tuple(users)))
    return tuple(draw(st.permutations(made)))


@st.composite
def cut_problems(draw: st.DrawFn) -> CutProblem:
    """Models of up to 10 layers, with and without costs of transfers and a memory limit."""
    num_layers = draw(st.sampled_from([5, 6, 7, 8, 9, 10, 4, 3, 2, 1]))  # not mostly small ones
    layers = tuple(draw(st.lists(LAYERS, min_size=num_layers, max_size=num_layers)))
    return CutProblem(
        layers=layers,
        flows=draw(flows(num_layers)),
        seconds_per_byte=draw(SECONDS_PER_BYTE),
        memory_limit_bytes=draw(st.sampled_from([None, None, 5, 7, 8, 9, 10, 12, 14, 17])),
    )


def nums_stages(problem: CutProblem) -> st.SearchStrategy[int]:
    return st.sampled_from(
        [count for count in (3, 2, 4, 5, 3, 2, 4, 1) if count <= len(problem.layers)]
    )


def all_starts(problem: CutProblem, num_stages: int) -> list[tuple[int, ...]]:
    cuts = itertools.combinations(range(1, len(problem.layers)), num_stages - 1)
    return [(0, *starts) for starts in cuts]


class Tried:
    """One cutting, by the definition of its costs and in exact arithmetic."""

    def __init__(self, problem: CutProblem, starts: tuple[int, ...]) -> None:
        bounds = pairwise([*starts, len(problem.layers)])
        stages = [set(range(start, stop)) for start, stop in bounds]
        self.starts = starts
        self.received = [
            sum(
                flow.num_bytes
                for flow in problem.flows
                if flow.source not in stage and stage & set(flow.users)
            )
            for stage in stages
        ]
        self.sent = [
            sum(
                flow.num_bytes
                for flow in problem.flows
                if flow.source in stage and set(flow.users) - stage
            )
            for stage in stages
        ]
        self.memory = [sum(problem.layers[i].memory_bytes for i in stage) for stage in stages]
        self.seconds = [
            sum(exact(problem.layers[i].seconds) for i in stage)
            + 2 * exact(problem.seconds_per_byte) * (received + sent)
            for stage, received, sent in zip(stages, self.received, self.sent, strict=True)
        ]


def exact(seconds: float) -> int:
    """A time in units of 2^-200 s."""
    units = Fraction(seconds) * 2**200
    assert units.denominator == 1
    return int(units)


@pytest.mark.parametrize("num_examples", [100, pytest.param(1000, marks=pytest.mark.exhaustive)])
def test_the_best_cut_is_what_trying_all_finds(num_examples: int) -> None:
    examples = given(problem=cut_problems(), data=st.data())
    settings(max_examples=num_examples)(examples(check_best_cut))()


def check_best_cut(problem: CutProblem, data: st.DataObject) -> None:
    num_stages = data.draw(nums_stages(problem))
    tried = [Tried(problem, starts) for starts in all_starts(problem, num_stages)]
    limit = problem.memory_limit_bytes
    fitting = [each for each in tried if limit is None or max(each.memory) <= limit]
    if not fitting:
        needed = min(max(each.memory) for each in tried)
        with pytest.raises(PlanError, match=rf"\b{needed} bytes .*memory_limit_bytes={limit} "):
            best_cut(problem, num_stages)
        return
    best = min(fitting, key=lambda each: (max(each.seconds), sum(each.sent), each.starts))
    found = best_cut(problem, num_stages)
    assert found.slowest == float(Fraction(max(best.seconds), 2**200))
    assert sum(found.stage_bytes_sent) == sum(best.sent)
    assert found.starts == best.starts


@given(problem=cut_problems(), data=st.data())
def test_a_given_cut_costs_what_the_definition_says(
    problem: CutProblem, data: st.DataObject
) -> None:
    num_stages = data.draw(nums_stages(problem))
    starts = data.draw(st.sampled_from(all_starts(problem, num_stages)))
    tried, cut = Tried(problem, starts), describe_cut(problem, starts)
    assert cut.starts == starts
    assert list(cut.stage_seconds) == [float(Fraction(each, 2**200)) for each in tried.seconds]
    assert list(cut.stage_bytes_received) == tried.received
    assert list(cut.stage_bytes_sent) == tried.sent


@given(problem=cut_problems(), limit=st.integers(0, 12))
def test_the_stages_that_an_error_advises_are_the_fewest_that_fit(
    problem: CutProblem, limit: int
) -> None:
    problem = replace(problem, memory_limit_bytes=limit)
    total = sum(layer.memory_bytes for layer in problem.layers)
    largest = max(layer.memory_bytes for layer in problem.layers)
    if total <= limit:
        best_cut(problem, 1)
        return
    with pytest.raises(PlanError) as caught:
        best_cut(problem, 1)
    advised = re.search(r"Use (\d+) stages or more", str(caught.value))
    assert (advised is None) == (largest > limit)
    if advised is not None:
        enough = int(advised[1])
        assert max(Tried(problem, best_cut(problem, enough).starts).memory) <= limit
        with pytest.raises(PlanError):
            best_cut(problem, enough - 1)
