"""Cuts: by names and by scopes, what cannot be cut, and how many stages are worth it."""

import math

import pytest

from lockstep.errors import OptionError, PlanError
from lockstep.graph.layer_graph import Flow
from lockstep.plan.pipeline.cut_places import stages_from_names, stages_from_scopes
from lockstep.plan.pipeline.cuts import Cut, CutProblem, LayerCost, best_cut, describe_cut
from lockstep.plan.pipeline.stage_counts import choose_num_stages

NAMES = (
    "embed",
    "blocks.0.attention",
    "blocks.0.mlp",
    "blocks.1.attention",
    "blocks.1.mlp",
    "blocks.10.mlp",
    "embed@2",
    "head",
)


def chain(
    *seconds: float,
    num_bytes: int = 0,
    memory_bytes: int = 0,
    seconds_per_byte: float = 0.0,
    memory_limit_bytes: int | None = None,
) -> CutProblem:
    """Layers that take so long, each with a tensor for the next."""
    return CutProblem(
        layers=tuple(LayerCost(seconds=each, memory_bytes=memory_bytes) for each in seconds),
        flows=tuple(
            Flow(source=i, num_bytes=num_bytes, users=(i + 1,)) for i in range(len(seconds) - 1)
        ),
        seconds_per_byte=seconds_per_byte,
        memory_limit_bytes=memory_limit_bytes,
    )


def test_a_chain_is_cut_where_its_stages_take_equally_long() -> None:
    cut = best_cut(chain(1, 2, 3, 1, 1, 1, 3), 3)
    assert cut.starts == (0, 2, 4)
    assert cut.stage_seconds == (3.0, 4.0, 5.0)
    assert cut.slowest == 5


def test_a_tensor_is_sent_once_and_received_by_each_stage_that_uses_it() -> None:
    layers = tuple(LayerCost(seconds=1, memory_bytes=10 + i) for i in range(5))
    skip = Flow(source=0, num_bytes=100, users=(1, 2, 3, 4))
    problem = CutProblem(layers=layers, flows=(skip,), seconds_per_byte=0.25)
    assert describe_cut(problem, [0, 2, 4]) == Cut(
        starts=(0, 2, 4),
        stage_seconds=(2 + 50, 2 + 50, 1 + 50),
        stage_bytes_received=(0, 100, 100),
        stage_bytes_sent=(100, 0, 0),
    )


def test_equal_blocks_are_cut_alike_whatever_their_time_rounds_to() -> None:
    for seconds in (0.1, 0.7, 1e-3 / 3, math.pi):
        assert best_cut(chain(*[seconds] * 30), 3).starts == (0, 10, 20)


def test_of_equally_long_stages_those_that_send_less_are_chosen() -> None:
    layers = tuple(LayerCost(seconds=each, memory_bytes=0) for each in (4, 1, 1, 1, 1))
    flows = tuple(
        Flow(source=i, num_bytes=num_bytes, users=(i + 1,))
        for i, num_bytes in enumerate((9, 8, 3, 8))
    )
    # The first layer takes 4 by itself, so the others may be cut anywhere.
    cut = best_cut(CutProblem(layers=layers, flows=flows, seconds_per_byte=0.0), 3)
    assert cut.starts == (0, 1, 3)
    assert sum(cut.stage_bytes_sent) == 12


def test_communication_moves_a_cut_to_where_tensors_are_small() -> None:
    layers = tuple(LayerCost(seconds=1, memory_bytes=0) for _ in range(4))
    flows = tuple(
        Flow(source=i, num_bytes=num_bytes, users=(i + 1,))
        for i, num_bytes in enumerate((1, 100, 100))
    )
    free = CutProblem(layers=layers, flows=flows, seconds_per_byte=0.0)
    assert best_cut(free, 2).starts == (0, 2)
    assert best_cut(CutProblem(layers=layers, flows=flows, seconds_per_byte=0.01), 2).starts == (
        0,
        1,
    )


def test_the_memory_limit_overrules_time() -> None:
    layers = tuple(
        LayerCost(seconds=seconds, memory_bytes=memory)
        for seconds, memory in ((1, 5), (1, 5), (9, 1), (1, 1))
    )
    assert best_cut(CutProblem(layers=layers, flows=(), seconds_per_byte=0.0), 2).starts == (0, 2)
    tight = CutProblem(layers=layers, flows=(), seconds_per_byte=0.0, memory_limit_bytes=7)
    assert best_cut(tight, 2).starts == (0, 1)


def test_a_model_that_takes_no_time_is_cut() -> None:
    cut = best_cut(chain(0, 0, 0), 2)
    assert (cut.starts, cut.slowest) == ((0, 1), 0)


def test_a_large_model_is_cut_evenly() -> None:
    num_layers = 2000
    problem = chain(*[1e-3] * num_layers, num_bytes=1 << 20, seconds_per_byte=1e-10)
    cut = best_cut(problem, 8)
    # The stages at both ends have one transfer less, but that is not worth a layer.
    assert cut.starts == tuple(range(0, num_layers, num_layers // 8))


@pytest.mark.parametrize(
    ("num_stages", "received", "fix"),
    [
        (4, "4 stages of 3 layers", "Use 1 to 3 stages."),
        (0, "0 stages of 3 layers", "Use 1 to 3 stages."),
    ],
)
def test_every_stage_needs_a_layer(num_stages: int, received: str, fix: str) -> None:
    with pytest.raises(PlanError) as caught:
        best_cut(chain(1, 1, 1), num_stages)
    assert str(caught.value) == (
        f"Every stage needs at least one layer. Received: {received}. {fix}"
    )


def test_a_model_that_does_not_fit_says_how_many_stages_do() -> None:
    problem = chain(1, 1, 1, 1, 1, memory_bytes=1 << 20, memory_limit_bytes=(2 << 20) - 1)
    with pytest.raises(PlanError) as caught:
        best_cut(problem, 3)
    assert str(caught.value) == (
        "3 stages of this model, however cut, need 2097152 bytes (2.0 MiB) of memory on some "
        "device. Received: memory_limit_bytes=2097151 (2.0 MiB). "
        "Use 5 stages or more, on a device each."
    )
    assert best_cut(problem, 5).starts == (0, 1, 2, 3, 4)


def test_a_layer_that_does_not_fit_alone_is_not_helped_by_stages() -> None:
    with pytest.raises(PlanError, match=r"One layer alone needs 8 bytes \(8 B\).*microbatches"):
        best_cut(chain(1, 1, memory_bytes=8, memory_limit_bytes=7), 2)


@pytest.mark.parametrize("starts", [(), (1,), (0, 0), (0, 2, 1), (0, 3), (0, -1)])
def test_starts_rise_from_the_first_layer(starts: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match=r"rising indices of the 3 layers, from 0\. Received"):
        describe_cut(chain(1, 1, 1), starts)


def test_all_that_is_wrong_with_a_problem_is_said_at_once() -> None:
    with pytest.raises(PlanError) as caught:
        CutProblem(
            layers=(
                LayerCost(seconds=math.nan, memory_bytes=0),
                LayerCost(seconds=1, memory_bytes=-3),
            ),
            flows=(Flow(source=1, num_bytes=0, users=(1,)),),
            seconds_per_byte=math.inf,
        )
    text = str(caught.value)
    assert text.startswith("2 problems:")
    assert "Received: nan, -3, inf." in text
    assert "Flow(source=1, num_bytes=0, users=(1,))" in text


@pytest.mark.parametrize(("source", "users"), [(-1, (1,)), (2, ()), (0, (2,)), (1, (0,))])
def test_tensors_go_from_a_layer_to_later_ones(source: int, users: tuple[int, ...]) -> None:
    layer = LayerCost(seconds=1, memory_bytes=0)
    with pytest.raises(PlanError, match=r"from a layer to later ones, of 2\."):
        CutProblem(
            layers=(layer, layer),
            flows=(Flow(source=source, num_bytes=1, users=users),),
            seconds_per_byte=0.0,
        )


def test_a_model_without_layers_cannot_be_cut() -> None:
    with pytest.raises(PlanError, match="without layers"):
        CutProblem(layers=(), flows=(), seconds_per_byte=0.0)


# --- by names -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cuts", "starts"),
    [
        ([], (0,)),
        (["head"], (0, 7)),
        (["blocks"], (0, 1)),
        (["blocks.0.mlp", "blocks.1"], (0, 2, 3)),
        (["blocks.1", "blocks.10"], (0, 3, 5)),
        (["embed@2"], (0, 6)),
    ],
)
def test_a_stage_begins_at_the_first_layer_of_what_is_named(
    cuts: list[str], starts: tuple[int, ...]
) -> None:
    assert stages_from_names(NAMES, cuts) == starts


def test_a_module_that_is_called_twice_begins_a_stage_at_its_first_call() -> None:
    names = ("a", "b.conv", "c", "b.conv@2", "d@2")
    assert stages_from_names(names, ["b.conv", "d"]) == (0, 1, 4)
    assert stages_from_names(names, ["b"]) == (0, 1)


def test_a_name_that_only_begins_like_another_is_not_in_it() -> None:
    assert stages_from_names(("a", "conv10", "conv1", "conv1.b"), ["conv1"]) == (0, 2)


def test_the_nearest_names_are_offered_for_one_that_is_unknown() -> None:
    with pytest.raises(OptionError) as caught:
        stages_from_names(NAMES, ["blocks.1.atention"])
    assert str(caught.value) == (
        "A cut names a module in which layers compute. Received: 'blocks.1.atention'. "
        "Did you mean 'blocks.1.attention' or 'blocks.0.attention' or 'blocks.1'?"
    )


def test_names_are_listed_where_none_is_near() -> None:
    with pytest.raises(OptionError) as caught:
        stages_from_names(NAMES, ["zzz"])
    assert str(caught.value).endswith(
        "Received: 'zzz'. There are 'embed', 'blocks', 'blocks.0', 'blocks.0.attention', "
        "'blocks.0.mlp' and 6 more."
    )


@pytest.mark.parametrize(
    ("names", "undivided", "cut"),
    [(("",), "", "b"), (("a", "gate@2"), "gate@2", "gate.b")],
)
def test_a_cut_within_what_runs_as_one_piece_is_refused_with_the_reason(
    names: tuple[str, ...], undivided: str, cut: str
) -> None:
    reason = "uses a tensor's values outside torch (net.py:8)"
    with pytest.raises(OptionError, match=r"runs as one piece \(.*net\.py:8\).*torch\.where"):
        stages_from_names(names, [cut], {undivided: reason})
    with pytest.raises(OptionError, match=r"runs as one piece \(.*net\.py:8\)") as caught:
        stages_from_scopes(names, [None] * len(names), [True] * len(names), {undivided: reason})
    assert str(caught.value).count("outside of every device scope") == len(names)


def test_the_first_stage_has_no_cut() -> None:
    with pytest.raises(OptionError) as caught:
        stages_from_names(NAMES, ["embed"])
    assert str(caught.value) == (
        "The first stage begins at the first layer, 'embed', without a cut. "
        "Received: 'embed'. Leave this cut out."
    )


def test_two_cuts_at_one_layer_are_refused() -> None:
    with pytest.raises(OptionError) as caught:
        stages_from_names(NAMES, ["blocks.1", "blocks.1.attention"])
    assert str(caught.value) == (
        "Two cuts are at one layer, 'blocks.1.attention'. "
        "Received: 'blocks.1' and 'blocks.1.attention'. Leave one of them out."
    )


def test_cuts_in_another_order_are_refused_with_the_right_one() -> None:
    with pytest.raises(OptionError) as caught:
        stages_from_names(NAMES, ["head", "blocks.1", "blocks.10"])
    assert str(caught.value) == (
        "Cuts must be in the order in which the model computes. "
        "Received: ['head', 'blocks.1', 'blocks.10']. Use ['blocks.1', 'blocks.10', 'head']."
    )


def test_all_that_is_wrong_with_cuts_is_said_at_once() -> None:
    with pytest.raises(OptionError) as caught:
        stages_from_names(NAMES, ["embed", "haed", "head", "blocks", "blocks.0"])
    text = str(caught.value)
    assert text.startswith("4 problems:\n  1. The first stage")
    assert "\n  2. A cut names a module in which layers compute. Received: 'haed'. Did" in text
    assert "\n  3. Two cuts are at one layer, 'blocks.0.attention'." in text
    assert "\n  4. Cuts must be in the order" in text


# --- by scopes ----------------------------------------------------------------------------------


def from_scopes(*devices: int | None, without_parameters: str = "") -> tuple[int, ...]:
    """Layers a, b, c ... on these devices, of which some own no parameters."""
    names = "abcdefghijkl"[: len(devices)]
    return stages_from_scopes(names, devices, [name not in without_parameters for name in names])


@pytest.mark.parametrize(
    ("devices", "without_parameters", "starts"),
    [
        ((0, 0, 0), "", (0,)),
        ((0, 0, 1, 2, 2), "", (0, 2, 3)),
        ((0, None, 1, None, 2), "bd", (0, 2, 4)),  # with the layer before
        ((None, None, 0, 1), "ab", (0, 3)),
        ((0, 1, 2), "b", (0, 1, 2)),  # a scope holds for layers without parameters too
    ],
)
def test_each_device_is_a_stage(
    devices: tuple[int | None, ...], without_parameters: str, starts: tuple[int, ...]
) -> None:
    assert from_scopes(*devices, without_parameters=without_parameters) == starts


def test_layers_with_parameters_lie_in_scopes() -> None:
    with pytest.raises(OptionError) as caught:
        from_scopes(0, None, 1, *[None] * 7, without_parameters="e")
    assert str(caught.value) == (
        "Layers with parameters are outside of every device scope. "
        "Received: 'b', 'd', 'f', 'g', 'h' and 2 more. "
        "Build them, too, within `with lockstep.device(...):`."
    )


def test_devices_do_not_go_backwards() -> None:
    with pytest.raises(OptionError) as caught:
        from_scopes(0, 1, None, 0, 0, 1, 0, without_parameters="c")
    assert str(caught.value) == (
        "Device numbers must not decrease in the order in which the model computes. "
        "Received: 'd' on device 0 after 'b' on device 1, 'g' on device 0 after 'f' on device 1. "
        "Build 'd' on device 1 or a later one, or 'b' on device 0 or an earlier one."
    )


@pytest.mark.parametrize(
    ("devices", "received", "fix"),
    [
        ((0, 2), "devices 0, 2", "Number them 0 to 1."),
        ((-1, 0, 1), "devices -1, 0, 1", "Number them 0 to 2."),
        ((1, 1), "devices 1", "Use `with lockstep.device(0):` for the first stage."),
        ((None,), "no layer in a scope", "Use `with lockstep.device(0):` for the first stage."),
    ],
)
def test_devices_are_numbered_without_gaps(
    devices: tuple[int | None, ...], received: str, fix: str
) -> None:
    with pytest.raises(OptionError) as caught:
        from_scopes(*devices, without_parameters="abc")
    assert str(caught.value) == (
        "Devices of scopes are numbered 0, 1, 2 and so on, without gaps. "
        f"Received: {received}. {fix}"
    )


def test_all_that_is_wrong_with_scopes_is_said_at_once() -> None:
    with pytest.raises(OptionError, match=r"^3 problems:") as caught:
        from_scopes(0, 3, None, 0)
    assert all(part in str(caught.value) for part in ("'c'", "'d' on device 0", "devices 0, 3"))


# --- how many stages ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_devices", "num_microbatches", "chosen", "reason"),
    [
        # 12 layers of 10 ms, so with m microbatches and k stages (m + k - 1) * 120 / k ms.
        (1, 4, 1, "1 stage: 480 ms a step; there is 1 device."),
        (2, 4, 2, "2 stages: 300 ms a step; 1 stage would take 480 ms and there are 2 devices."),
        # 4 stages: 11 * 30 ms; 5 need 3 layers for some stage as well.
        (5, 8, 4, "4 stages: 330 ms a step; 3 stages would take 400 ms and "
            "5 stages would take 360 ms."),
        # One microbatch leaves all stages but one idle.
        (3, 1, 1, "1 stage: 120 ms a step; 2 stages would take 120 ms."),
        (99, 400, 12, "12 stages: 4,110 ms a step; 11 stages would take 8,200 ms and "
            "the model has 12 layers."),
        (2, 4000, 2, "2 stages: 4:00 a step; 1 stage would take 8:00 and there are 2 devices."),
    ],
)  # fmt: skip
def test_as_many_stages_are_used_as_make_a_step_shortest(
    num_devices: int, num_microbatches: int, chosen: int, reason: str
) -> None:
    problem = chain(*[0.01] * 12)
    assert choose_num_stages(problem, num_devices, num_microbatches) == (chosen, reason)


def test_a_stage_that_communication_eats_up_is_not_used() -> None:
    problem = chain(0.01, 0.01, 0.01, 0.01, num_bytes=1000, seconds_per_byte=4e-6)
    # 2 stages: 5 * (20 + 8) ms; 4 stages: 7 * (10 + 16) ms; 3 stages: 6 * (10 + 16 or 20 + 8) ms.
    assert choose_num_stages(problem, 4, 4) == (
        2,
        "2 stages: 140 ms a step (40 ms of it communication); 1 stage would take 160 ms and "
        "3 stages would take 168 ms (48 ms of it communication).",
    )


@pytest.mark.parametrize(("second", "chosen"), [(0.0301, 1), (0.0303, 2)])
def test_a_stage_is_worth_more_than_a_percent(second: float, chosen: int) -> None:
    # One stage takes 50 (1 + second) seconds, which is 1.01 times the 51 of two at second=0.0302.
    assert choose_num_stages(chain(1.0, second), 2, 50)[0] == chosen


def test_numbers_of_stages_that_do_not_fit_in_memory_are_left_out() -> None:
    problem = chain(2, 2, 1, memory_bytes=4, memory_limit_bytes=8)
    assert choose_num_stages(problem, 3, 1) == (
        2,
        "2 stages: 6,000 ms a step; 1 stage would not fit in memory and 3 stages would take "
        "6,000 ms.",
    )


def test_a_model_too_large_for_all_devices_is_refused() -> None:
    with pytest.raises(PlanError, match=r"^2 stages .* need 8 bytes.*Use 3 stages or more"):
        choose_num_stages(chain(1, 1, 1, memory_bytes=4, memory_limit_bytes=7), 2, 4)


def test_devices_and_microbatches_are_counted_from_one() -> None:
    with pytest.raises(OptionError, match=r"(?s)^2 problems.*num_devices=0.*num_microbatches=-1"):
        choose_num_stages(chain(1, 1), 0, -1)
