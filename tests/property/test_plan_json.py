"""A Plan survives its JSON, whatever is in it, and prints in 100 columns."""

import math

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from lockstep.plan.spec import (
    Axis,
    LayerPlacement,
    LocalUpdate,
    Plan,
    SlicedUpdate,
    Update,
)

NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=120)
LAYERS = st.builds(
    LayerPlacement,
    name=NAMES,
    kind=NAMES,
    num_parameters=st.integers(0, 10**13),
    stage=st.integers(0, 99),
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    sizes = draw(st.lists(st.integers(1, 4), max_size=3))
    names = ["data", "pipe", "tensor"]
    mesh = tuple(Axis(name=name, size=size) for name, size in zip(names, sizes, strict=False))
    num_ranks = math.prod(sizes)
    num_shares = draw(st.integers(sizes[0] if sizes else 1, 20))
    updates: list[Update] = [SlicedUpdate()]
    if num_ranks == num_shares == 1:
        updates.append(LocalUpdate())
    return Plan(
        strategy=draw(NAMES),
        mesh=mesh,
        devices=tuple(draw(st.lists(NAMES, min_size=num_ranks, max_size=num_ranks))),
        threads_per_device=draw(st.none() | st.integers(1, 64)),
        num_shares=num_shares,
        interleaved=draw(st.booleans()),
        layers=tuple(draw(st.lists(LAYERS, max_size=50))),
        update=draw(st.sampled_from(updates)),
        precision=draw(st.sampled_from(["fp32", "fp64"])),
        notes=tuple(draw(st.lists(NAMES, max_size=3))),
    )


@given(plan=plans())
def test_reading_what_was_written_gives_the_plan(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(plan.to_json().decode()) == plan


@given(plan=plans())
def test_equal_plans_are_written_in_the_same_bytes(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()).to_json() == plan.to_json()


@given(plan=plans())
def test_a_plan_prints_in_100_columns(plan: Plan) -> None:
    assert max(map(cell_len, str(plan).splitlines())) <= 100
