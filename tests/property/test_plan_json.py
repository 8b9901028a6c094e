"""A Plan survives its JSON, whatever is in it, and prints in 100 columns."""

import math

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from lockstep.plan.averaging import AveragedUpdate, Nesterov
from lockstep.plan.decision import (
    LayerPlacement,
    LocalUpdate,
    Pipeline,
    SlicedUpdate,
    Stage,
    StagedUpdate,
    StagePrediction,
    Update,
)
from lockstep.plan.mesh import Axis
from lockstep.plan.spec import Plan

NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=120)
SECONDS = st.floats(0, 1e5)
SIZES = st.integers(0, 10**13)
PREDICTIONS = st.builds(
    StagePrediction,
    forward_seconds=SECONDS,
    backward_seconds=SECONDS,
    activation_bytes=SIZES,
    received_bytes=SIZES,
    sent_bytes=SIZES,
)


def layers(num_stages: int) -> st.SearchStrategy[list[LayerPlacement]]:
    layer = st.builds(
        LayerPlacement,
        name=NAMES,
        kind=NAMES,
        num_parameters=SIZES,
        stage=st.integers(0, num_stages - 1),
    )
    return st.lists(layer, max_size=50)


@st.composite
def pipelines(draw: st.DrawFn, num_ranks: int) -> Pipeline:
    """Every rank holds a stage, some more than one."""
    num_stages = draw(st.integers(1, 6))
    held = [list(range(stage, num_ranks, num_stages)) for stage in range(num_stages)]
    return Pipeline(
        schedule=draw(NAMES),
        stages=tuple(
            Stage(
                ranks=tuple(ranks or [0]),
                needs=tuple(draw(st.sets(st.integers(0, 5)))),
                recompute=draw(st.booleans()),
                predicted=draw(st.none() | PREDICTIONS),
            )
            for ranks in held
        ),
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    sizes = draw(st.lists(st.integers(1, 4), max_size=3))
    names = ["data", "pipe", "tensor"]
    mesh = tuple(Axis(name=name, size=size) for name, size in zip(names, sizes, strict=False))
    num_ranks = math.prod(sizes)
    num_shares = draw(st.integers(sizes[0] if sizes else 1, 20))
    updates: list[Update] = [SlicedUpdate(), AveragedUpdate(every=3, outer=Nesterov(lr=0.5))]
    if num_ranks == num_shares == 1:
        updates.append(LocalUpdate())
    pipeline = draw(st.none() | pipelines(num_ranks))
    if pipeline is not None:
        updates = [StagedUpdate()]
    return Plan(
        strategy=draw(NAMES),
        mesh=mesh,
        devices=tuple(draw(st.lists(NAMES, min_size=num_ranks, max_size=num_ranks))),
        threads_per_device=draw(st.none() | st.integers(1, 64)),
        num_shares=num_shares,
        interleaved=draw(st.booleans()),
        layers=tuple(draw(layers(1 if pipeline is None else len(pipeline.stages)))),
        update=draw(st.sampled_from(updates)),
        precision=draw(st.sampled_from(["fp32", "fp64"])),
        pipeline=pipeline,
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
