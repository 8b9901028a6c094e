"""Programs print; lowered programs do every share's work exactly once."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.plan.decision import LocalUpdate, SlicedUpdate
from lockstep.plan.mesh import Axis
from lockstep.plan.program.lowering import lower_forward, lower_train
from lockstep.plan.program.rank_program import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    RankProgram,
    Reduce,
    Step,
    Sync,
)
from lockstep.plan.spec import Plan
from tests.programs import format_program


@st.composite
def data_parallel_plans(draw: st.DrawFn) -> Plan:
    num_replicas = draw(st.integers(1, 8))
    num_shares = num_replicas + draw(st.integers(0, 9))
    return make_plan(num_replicas, num_shares, interleaved=draw(st.booleans()))


def make_plan(num_replicas: int, num_shares: int, *, interleaved: bool = False) -> Plan:
    return Plan(
        strategy="test",
        mesh=(Axis(name="data", size=num_replicas),),
        devices=tuple(f"cpu:{rank}" for rank in range(num_replicas)),
        threads_per_device=1,
        num_shares=num_shares,
        interleaved=interleaved,
        layers=(),
        update=SlicedUpdate(),
        precision="fp32",
    )


def shares_of(program: RankProgram, kind: type[Forward] | type[Backward]) -> list[int]:
    return [
        action.microbatch
        for action in program
        if isinstance(action, Forward | Backward) and type(action) is kind
    ]


def test_a_program_prints_as_the_documentation_shows() -> None:
    program = (Forward(2, 0), Backward(0, 13), Reduce(), Step(), Sync())
    assert format_program(program) == "2F0 0B13 REDUCE STEP SYNC"
    assert format_program((BackwardInput(1, 2), BackwardWeight(0, 13))) == "1I2 0W13"


@given(plan=data_parallel_plans(), num_samples=st.integers(0, 30))
def test_every_filled_share_goes_forward_and_backward_once(plan: Plan, num_samples: int) -> None:
    programs = [lower_train(plan, rank, num_samples) for rank in range(plan.num_ranks)]
    once = Counter(range(min(num_samples, plan.num_shares)))
    for kind in (Forward, Backward):
        assert Counter(share for one in programs for share in shares_of(one, kind)) == once


@given(plan=data_parallel_plans(), num_samples=st.integers(0, 30))
def test_a_share_goes_forward_before_it_goes_backward(plan: Plan, num_samples: int) -> None:
    for rank in range(plan.num_ranks):
        program = lower_train(plan, rank, num_samples)
        for share in shares_of(program, Forward):
            assert program.index(Forward(0, share)) < program.index(Backward(0, share))


@given(plan=data_parallel_plans(), num_samples=st.integers(0, 30))
def test_every_rank_ends_with_the_collective_actions(plan: Plan, num_samples: int) -> None:
    for rank in range(plan.num_ranks):
        program = lower_train(plan, rank, num_samples)
        assert program[-3:] == (Reduce(), Step(), Sync())
        assert not {Reduce(), Step(), Sync()} & set(program[:-3])


@given(plan=data_parallel_plans(), num_samples=st.integers(0, 30))
def test_evaluation_sees_every_filled_share_once(plan: Plan, num_samples: int) -> None:
    programs = [lower_forward(plan, rank, num_samples) for rank in range(plan.num_ranks)]
    actions = [action for program in programs for action in program]
    assert actions == [Forward(0, share) for share in range(min(num_samples, plan.num_shares))]


@pytest.mark.parametrize(
    ("interleaved", "text"),
    [
        (False, "0F0 0B0 0F1 0B1 REDUCE STEP SYNC"),
        (True, "0F0 0F1 0B0 0B1 REDUCE STEP SYNC"),
    ],
)
def test_interleaved_shares_all_go_forward_first(interleaved: bool, text: str) -> None:
    plan = make_plan(1, 2, interleaved=interleaved)
    assert format_program(lower_train(plan, 0, 5)) == text


def test_a_local_update_needs_no_barrier() -> None:
    plan = Plan(
        strategy="test",
        mesh=(),
        devices=("cpu:0",),
        threads_per_device=None,
        num_shares=1,
        interleaved=False,
        layers=(),
        update=LocalUpdate(),
        precision="fp32",
    )
    assert format_program(lower_train(plan, 0, 5)) == "0F0 0B0 REDUCE STEP"
