"""The measure of a proof: what agrees, what does not, and what is said of it."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.parallel.updater_interface import PieceSlots
from lockstep.proof.comparison import Comparison, compare_step, norm_of, rounding_mask
from lockstep.proof.reference import Record
from lockstep.proof.report import make_report
from lockstep.train.callbacks.driver import Snapshot

WEIGHT = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)
BIAS = torch.tensor([1e-9, 0.0], dtype=torch.float64)


def record(**changes: Any) -> Record:
    state = {"weight": WEIGHT, "bias": BIAS, "tied": WEIGHT, "mean": BIAS, "count": torch.tensor(3)}
    parts: dict[str, Any] = {
        "step": 2,
        "loss": 0.5,
        "gradients": {"weight": WEIGHT, "bias": BIAS},
        "state": state,
        "buffers": frozenset({"mean", "count"}),
        "parameters": frozenset({"weight", "bias"}),
        "moved_buffers": frozenset({"mean", "count"}),
        "slots": {"weight": {"average": WEIGHT, "step": torch.tensor(3.0)}},
    }
    return Record(**{**parts, **changes})


def snapshot(**changes: Any) -> Snapshot:
    """Two ranks that agree with ``record``, the slots cut in two."""
    flat = WEIGHT.flatten()
    parts: dict[str, Any] = {
        "step": 2,
        "loss": 0.5,
        "weight": 7.0,
        "gradients": dict(record().gradients),
        "states": [dict(record().state), dict(record().state)],
        "slots": [
            PieceSlots(
                name="weight",
                start=start,
                stop=stop,
                slots={"average": flat[start:stop].clone(), "step": torch.tensor(3.0)},
            )
            for start, stop in ((0, 4), (4, 6))
        ],
    }
    return Snapshot(**{**parts, **changes})


def differences(found: list[Comparison]) -> list[str]:
    return [str(one) for one in found if not one.agrees]


def with_state(rank: int, name: str, value: Any) -> list[dict[str, Tensor]]:
    states = [dict(state) for state in snapshot().states]
    if value is None:
        del states[rank][name]
    else:
        states[rank][name] = value
    return states


def test_equal_steps_agree_in_everything() -> None:
    found = compare_step(snapshot(), record())
    assert differences(found) == []
    assert {one.kind: sum(other.kind == one.kind for other in found) for one in found} == {
        "loss": 1,
        "gradient": 2,
        "slot": 3,  # one average, a step count for each of its two pieces
        "parameter": 6,
        "buffer": 4,
    }


def test_tensors_are_measured_by_the_largest_of_their_kind() -> None:
    scale = norm_of([WEIGHT, BIAS])
    within, beyond = BIAS + 0.5e-12 * scale, BIAS + 2e-12 * scale
    gradients = {"weight": WEIGHT, "bias": within}
    assert differences(compare_step(snapshot(gradients=gradients), record())) == []
    gradients = {"weight": WEIGHT, "bias": beyond}
    (difference,) = differences(compare_step(snapshot(gradients=gradients), record()))
    assert difference.startswith("gradient bias, step 2: relative 2.8e-12")


def test_a_parameter_is_compared_on_every_rank_and_under_every_name() -> None:
    states = with_state(1, "tied", WEIGHT + 1e-3)
    (difference,) = differences(compare_step(snapshot(states=states), record()))
    assert difference.startswith(
        "parameter tied, rank 1, step 2: relative 3.3e-04"
    )  # S counts it once


@pytest.mark.parametrize(
    ("value", "remark"),
    [
        (None, "none, the reference has one"),
        (torch.zeros(3), "shape (3,) instead of (2, 3)"),
        (WEIGHT.where(WEIGHT < 5, torch.nan), "1 of 6 not finite"),
        (WEIGHT.where(WEIGHT < 5, torch.inf), "1 of 6 not finite"),
    ],
)
def test_what_no_number_says_is_said_in_words(value: Any, remark: str) -> None:
    states = with_state(0, "weight", value)
    (difference,) = differences(compare_step(snapshot(states=states), record()))
    assert difference == f"parameter weight, rank 0, step 2: {remark}"


def test_a_tensor_too_many_is_a_difference() -> None:
    states = with_state(1, "extra", WEIGHT)
    (difference,) = differences(compare_step(snapshot(states=states), record()))
    assert difference == "parameter extra, rank 1, step 2: one where the reference has none"


def test_nan_on_both_sides_is_a_difference_and_equal_infinities_are_none() -> None:
    for value, count in ((torch.nan, 1), (-torch.inf, 0)):
        bias = torch.tensor([value, 0.0], dtype=torch.float64)
        found = compare_step(
            snapshot(gradients={"weight": WEIGHT, "bias": bias}),
            record(gradients={"weight": WEIGHT, "bias": bias}),
        )
        assert len(differences(found)) == count


def test_counts_must_be_equal() -> None:
    states = with_state(1, "count", torch.tensor(4))
    (difference,) = differences(compare_step(snapshot(states=states), record()))
    assert difference == "buffer count, rank 1, step 2: 1 of 1 differ"


def test_a_large_constant_buffer_excuses_no_other() -> None:
    table = torch.full((4,), 1e6, dtype=torch.float64)
    ours = record(
        state={**record().state, "table": table}, buffers=frozenset({"mean", "count", "table"})
    )
    states = [{**state, "table": table} for state in with_state(0, "mean", BIAS + 1e-12)]
    (difference,) = differences(compare_step(snapshot(states=states), ours))
    assert difference.startswith("buffer mean, rank 0")


def test_a_gradient_where_there_should_be_none_and_the_reverse() -> None:
    found = compare_step(
        snapshot(gradients={"weight": None, "bias": BIAS}),
        record(gradients={"weight": WEIGHT, "bias": None}),
    )
    assert differences(found) == [
        "gradient weight, step 2: none, the reference has one",
        "gradient bias, step 2: one where the reference has none",
    ]


def test_gradients_of_a_batch_of_no_weight_do_not_count() -> None:
    found = compare_step(snapshot(weight=0.0, loss=math.nan, gradients={}), record(loss=None))
    assert differences(found) == []
    (difference,) = differences(compare_step(snapshot(weight=0.0, gradients={}), record()))
    assert difference == "loss, step 2: none, the reference has an update"


def test_losses() -> None:
    assert differences(compare_step(snapshot(loss=0.5 + 0.9e-12), record())) == []
    assert differences(compare_step(snapshot(loss=0.5 + 2e-12), record())) == [
        "loss, step 2: relative 2.0e-12"
    ]
    assert differences(compare_step(snapshot(loss=5e5 * (1 + 0.9e-12)), record(loss=5e5))) == []
    assert differences(compare_step(snapshot(step=3), record())) == [
        "loss, step 2: Lockstep has it as step 3"
    ]
    assert "nan instead of 0.5" in differences(compare_step(snapshot(loss=math.nan), record()))[0]


def test_slots_are_put_together_along_memory() -> None:
    """A transposed parameter is cut along its memory, not along its rows."""
    parameter = WEIGHT.t()
    ours = record(
        state={"weight": parameter},
        buffers=frozenset(),
        moved_buffers=frozenset(),
        slots={"weight": {"average": parameter.contiguous()}},
    )
    flat = WEIGHT.flatten()
    pieces = [
        PieceSlots(name="weight", start=start, stop=stop, slots={"average": flat[start:stop]})
        for start, stop in ((3, 6), (0, 3))
    ]
    found = compare_step(snapshot(states=[{"weight": parameter}], slots=pieces), ours)
    assert differences(found) == []
    found = compare_step(snapshot(states=[{"weight": parameter}], slots=pieces[:1]), ours)
    assert differences(found) == ["slot weight average, step 2: 3 of 6 not finite"]


def test_slots_of_whole_parameters_counts_and_strangers() -> None:
    whole = PieceSlots(
        name="weight",
        start=0,
        stop=6,
        slots={"average": WEIGHT, "step": torch.tensor(2.0), "odd": 1},
    )
    assert differences(compare_step(snapshot(slots=[whole]), record())) == [
        "slot weight step, step 2: relative 3.3e-01",
        "slot weight odd, step 2: one where the reference has none",
    ]
    assert differences(compare_step(snapshot(slots=[]), record())) == [
        "slot weight average, step 2: none, the reference has one",
        "slot weight step, step 2: none, the reference has one",
    ]


def test_numbers_that_are_no_tensors_are_compared_to_all_their_digits() -> None:
    """torch.as_tensor would make float32 of them, to which these are equal."""
    slots = {"average": WEIGHT, "step": torch.tensor(3.0), "product": 0.1}
    whole = PieceSlots(name="weight", start=0, stop=6, slots={**slots, "product": 0.1 + 1e-10})
    own = record(slots={"weight": slots})
    assert differences(compare_step(snapshot(slots=[whole]), own)) == [
        "slot weight product, step 2: relative 1.0e-09"
    ]


def test_rounding_is_small_on_both_sides_and_disagrees() -> None:
    ours = torch.tensor([1e-17, 1e-17, 0.0, 1e-17, 1.0, 0.0], dtype=torch.float64)
    theirs = torch.tensor([2e-17, 1e-17, 3e-18, 1.0, 1e-17, 0.0], dtype=torch.float64)
    mask = rounding_mask(ours, theirs, scale=1.0)
    assert mask.tolist() == [True, False, True, False, False, False]
    assert not rounding_mask(ours, theirs, scale=1e-6).any()


# --- the report ---------------------------------------------------------------------------------


def comparison(kind: str, step: int, relative: float, name: str = "head.weight") -> Comparison:
    return Comparison(
        kind=kind, name="" if kind == "loss" else name, rank=1, step=step, relative=relative
    )


def test_differences_come_in_the_order_in_which_a_fault_spreads() -> None:
    report = make_report(
        "title",
        [
            comparison("parameter", 3, 1e-3),
            comparison("loss", 4, 0.5),
            comparison("gradient", 3, 1e-2, "small"),
            comparison("gradient", 3, 1e-1),
            comparison("gradient", 2, 1e-13),
        ],
        [],
        [],
    )
    assert not report.passed
    assert [(one.kind, one.step) for one in report.differences] == [
        ("gradient", 3),
        ("gradient", 3),
        ("parameter", 3),
        ("loss", 4),
    ]
    assert "first difference: gradient head.weight, rank 1, step 3: relative 1.0e-01" in str(report)
    assert "Failed: 4 of 5 comparisons" in str(report)


def test_a_report_of_agreement() -> None:
    found = compare_step(snapshot(), record())
    report = make_report("two devices", found, ["a.bias (1 of 2 elements)"], ["a note"])
    assert report.passed
    assert report.first_difference is None
    text = str(report)
    assert text.splitlines()[0] == "two devices"
    assert "Passed: the same, to within 1e-12." in text.splitlines()[-1]
    assert "Undetermined: a.bias (1 of 2 elements)." in text
    assert "Note: a note." in text


def test_below_its_title_a_report_is_at_most_100_columns_wide() -> None:
    long = ".".join(["transformer_encoder_layer"] * 6)
    report = make_report(
        "title " * 30,
        [comparison("gradient", 1, 0.1, long), comparison("slot", 1, math.inf, f"{long} exp_avg")],
        [long] * 3,
        ["[bold]" + "words " * 40],
    )
    title, *lines = str(report).splitlines()
    assert title == ("title " * 30).rstrip()  # one line, however long
    assert max(map(len, lines)) <= 100
    assert "\x1b" not in str(report)
    assert "[bold]" in str(report)  # a name is no markup
    assert "no measure" in str(report)


def test_a_report_of_a_difference_where_nothing_was_divided() -> None:
    report = make_report("one", [comparison("loss", 1, 0.5)], [], [], "nothing was divided: one")
    assert not report.passed
    assert "Passed" not in str(report)
