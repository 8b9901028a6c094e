"""Plans as files and tables: what is read back, what is refused, what a person sees."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import LockstepError, PlanError
from lockstep.plan.decision import PLAN_VERSION, LayerPlacement, LocalUpdate, SlicedUpdate
from lockstep.plan.mesh import Axis
from lockstep.plan.spec import Plan

Raw = dict[str, Any]


def make_plan(**changes: Any) -> Plan:
    fields = {
        "strategy": "mirrored",
        "mesh": (Axis(name="data", size=2),),
        "devices": ("cpu:0", "cpu:1"),
        "threads_per_device": 1,
        "num_shares": 2,
        "interleaved": False,
        "layers": (make_layer("first"),),
        "update": SlicedUpdate(),
        "precision": "fp32",
    }
    return Plan(**{**fields, **changes})


def make_layer(name: str, **changes: Any) -> LayerPlacement:
    fields = {"name": name, "kind": "Linear", "num_parameters": 12, "stage": 0}
    return LayerPlacement(**{**fields, **changes})


def edited(change: Callable[[Raw], object]) -> bytes:
    raw = json.loads(make_plan().to_json())
    change(raw)
    return json.dumps(raw).encode()


def test_a_saved_plan_is_loaded_unchanged(tmp_path: Path) -> None:
    plan = make_plan(notes=("2 replicas share 1 cores",))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert Plan.load(str(tmp_path / "plan.json")) == plan


def test_a_saved_plan_is_json_for_people(tmp_path: Path) -> None:
    make_plan().save(tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text()
    assert '\n  "num_shares": 2,\n' in text
    assert text.endswith("}\n")
    assert json.loads(text)["version"] == PLAN_VERSION


def test_a_plan_of_another_version_says_which() -> None:
    text = edited(lambda raw: raw.update(version=PLAN_VERSION + 1))
    with pytest.raises(PlanError, match=f"version {PLAN_VERSION}.*version {PLAN_VERSION + 1}"):
        Plan.from_json(text)


def test_a_plan_of_another_version_is_told_before_its_other_fields() -> None:
    text = edited(lambda raw: raw.update(version=PLAN_VERSION + 1, new_field=1))
    with pytest.raises(PlanError, match="Make the Plan again"):
        Plan.from_json(text)


MALFORMED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "truncated"),
    "no JSON": (b"plan", "malformed"),
    "not UTF-8": (b'{"version": 1, "strategy": "\xff"}', "This is not a Plan"),
    "cut short": (make_plan().to_json()[:-20], "This is not a Plan"),
    "a list": (b"[]", "Expected `object`"),
    "no version": (edited(lambda raw: raw.pop("version")), "version"),
    "a version in words": (edited(lambda raw: raw.update(version="one")), "Expected `int`"),
    "a field missing": (edited(lambda raw: raw.pop("devices")), "devices"),
    "a field too many": (edited(lambda raw: raw.update(schedule="1f1b")), "unknown field `sched"),
    "a field of an axis": (edited(lambda raw: raw["mesh"][0].update(kind="x")), "unknown field"),
    "a field of a layer": (edited(lambda raw: raw["layers"][0].update(cut=1)), "unknown field"),
    "a field of the update": (edited(lambda raw: raw["update"].update(every=2)), "unknown field"),
    "another update": (edited(lambda raw: raw["update"].update(type="gossip")), "gossip"),
    "a number in words": (edited(lambda raw: raw.update(num_shares="2")), "num_shares"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_no_plan_is_refused_with_its_place(name: str) -> None:
    text, message = MALFORMED[name]
    with pytest.raises(PlanError, match=message) as caught:
        Plan.from_json(text)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, LockstepError)


CONTRADICTIONS: dict[str, tuple[Raw, str]] = {
    "too few devices": ({"devices": ("cpu:0",)}, r"axes of \[2\] with 1 devices"),
    "no device": ({"mesh": (), "devices": ()}, "with 0 devices"),
    "an axis of nothing": ({"mesh": (Axis(name="data", size=0),), "devices": ()}, r"\[0\]"),
    "negative axes": (
        {"mesh": (Axis(name="data", size=-1), Axis(name="pipe", size=-2))},
        r"axes of \[-1, -2\]",
    ),
    "fewer shares than replicas": ({"num_shares": 1}, "num_shares=1 with 2 replicas"),
    "no thread": ({"threads_per_device": 0}, "threads_per_device=0"),
    "a local update of two ranks": ({"update": LocalUpdate()}, "2 ranks, num_shares=2"),
    "a local update of two shares": (
        {"update": LocalUpdate(), "mesh": (), "devices": ("cpu:0",)},
        "1 ranks, num_shares=2",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_plan_that_contradicts_itself_is_refused(name: str) -> None:
    changes, message = CONTRADICTIONS[name]
    with pytest.raises(PlanError, match=message):
        make_plan(**changes)


def test_a_contradiction_in_a_file_has_the_same_message() -> None:
    with pytest.raises(PlanError) as made:
        make_plan(num_shares=1)
    with pytest.raises(PlanError) as read:
        Plan.from_json(edited(lambda raw: raw.update(num_shares=1)))
    assert str(read.value) == str(made.value)


def test_all_contradictions_are_told_at_once() -> None:
    with pytest.raises(PlanError, match=r"(?s)3 problems:\n  1\. .*2\. .*3\. "):
        make_plan(devices=("cpu:0",), num_shares=1, threads_per_device=0)


@pytest.mark.parametrize(
    ("mesh", "devices", "num_replicas"),
    [
        ((), ("cpu:0",), 1),
        ((Axis(name="data", size=2),), ("cpu:0", "cpu:1"), 2),
        ((Axis(name="pipe", size=2),), ("cpu:0", "cpu:1"), 1),
        ((Axis(name="pipe", size=1), Axis(name="data", size=2)), ("cpu:0", "cpu:1"), 2),
    ],
)
def test_replicas_are_counted_along_the_data_axis(
    mesh: tuple[Axis, ...], devices: tuple[str, ...], num_replicas: int
) -> None:
    plan = make_plan(mesh=mesh, devices=devices)
    assert plan.num_replicas == num_replicas
    assert plan.num_ranks == len(devices)


def test_a_plan_prints_what_it_decides() -> None:
    text = str(make_plan(layers=(make_layer("blocks.0"), make_layer("")), notes=("Mind the gap.",)))
    for part in ("mirrored", "data 2", "fp32", "cpu:0, cpu:1 (1 thread each)", "blocks.0"):
        assert part in text
    assert "(model)" in text
    assert text.splitlines()[-1] == "Note: Mind the gap."


def test_names_are_no_markup() -> None:
    text = str(make_plan(layers=(make_layer("a[bold]", kind="[red]K"),), notes=("see [0]",)))
    assert "a[bold]" in text
    assert "[red]K" in text
    assert "see [0]" in text


def test_of_many_layers_the_first_are_shown_and_the_rest_summed() -> None:
    layers = tuple(make_layer(f"layer{number}.") for number in range(45))
    lines = str(make_plan(layers=layers)).splitlines()
    shown = [line.split()[0] for line in lines if line.startswith("layer") and "." in line]
    assert shown == [f"layer{number}." for number in range(40)]
    assert "and 5 more layers" in lines[-1]
    assert lines[-1].split()[-1] == "60"


def test_a_notebook_shows_a_plan_as_its_table() -> None:
    plan = make_plan(layers=(make_layer("<first>"), make_layer("second")), notes=("a & b",))
    shown = plan._repr_mimebundle_()
    assert shown["text/plain"] == str(plan)
    html = shown["text/html"]
    assert "<p>Plan: mirrored, data 2, fp32<br>Devices: cpu:0, cpu:1" in html
    assert "<th>layer</th><th>kind</th><th>parameters</th>" in html
    assert '<td style="text-align: left">&lt;first&gt;</td>' in html
    assert '<td style="text-align: right">12</td>' in html
    assert html.endswith("<p>Note: a &amp; b</p>")
