"""Schedules: the order of passes, to be read beside the papers' figures."""

import pytest

from lockstep.errors import PlanError
from lockstep.plan.pipeline.schedules import SCHEDULES, forward_schedule, make_schedule
from lockstep.plan.pipeline.stage_graph import StageGraph
from lockstep.plan.program.rank_program import Backward, Forward, Pass, RankProgram
from tests.programs import format_program

# Stage 0 has three replicas, on ranks 0 to 2; stage 1 has one.
FUNNEL = StageGraph(ranks=((0, 1, 2), (3,)), edges=((0, 1),))
# Two towers, of stages 0 to 2 and of stage 3, meet in stage 4.
TOWERS = StageGraph(ranks=((0,), (1,), (2,), (3,), (4,)), edges=((0, 1), (1, 2), (2, 4), (3, 4)))


def lines(programs: tuple[RankProgram, ...]) -> list[str]:
    return [format_program(program) for program in programs]


def without_stages(programs: tuple[RankProgram, ...]) -> list[str]:
    """Programs of ranks that hold the stage of their own number, which is then left out."""
    return [
        " ".join(word.removeprefix(str(rank)) for word in line.split())
        for rank, line in enumerate(lines(programs))
    ]


# --- ranks of one stage ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (
            "gpipe",
            [
                "F0 F1 F2 F3 B0 B1 B2 B3",
                "F0 F1 F2 F3 B0 B1 B2 B3",
                "F0 F1 F2 F3 B0 B1 B2 B3",
            ],
        ),
        (
            "1f1b",
            [
                "F0 F1 F2 B0 F3 B1 B2 B3",
                "F0 F1 B0 F2 B1 F3 B2 B3",
                "F0 B0 F1 B1 F2 B2 F3 B3",
            ],
        ),
        (
            "zb-h1",
            [
                "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
                "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
                "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
            ],
        ),
        (
            "zb-h2",
            [
                "F0 F1 F2 F3 I0 W0 I1 W1 I2 W2 I3 W3",
                "F0 F1 F2 I0 F3 I1 I2 W0 I3 W1 W2 W3",
                "F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3",
            ],
        ),
    ],
)
def test_a_chain_of_three_stages_runs_in_this_order(kind: str, expected: list[str]) -> None:
    assert without_stages(make_schedule(kind, StageGraph.chain(3), 4)) == expected


def test_with_fewer_microbatches_than_stages_all_go_forward_first() -> None:
    programs = make_schedule("1f1b", StageGraph.chain(4), 2)
    assert without_stages(programs) == ["F0 F1 B0 B1"] * 3 + ["F0 B0 F1 B1"]


def test_replicas_take_microbatches_in_turn() -> None:
    # A replica needs 1 + 1/3 microbatches, rounded up, until its first is back.
    assert lines(make_schedule("1f1b", FUNNEL, 7)) == [
        "0F0 0F3 0B0 0F6 0B3 0B6",
        "0F1 0F4 0B1 0B4",
        "0F2 0F5 0B2 0B5",
        "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1F4 1B4 1F5 1B5 1F6 1B6",
    ]


def test_a_single_rank_feeds_its_replicas() -> None:
    graph = StageGraph(ranks=((0,), (1, 2, 3)), edges=((0, 1),))
    assert lines(make_schedule("1f1b", graph, 5)) == [
        "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0B2 0B3 0B4",
        "1F0 1B0 1F3 1B3",
        "1F1 1B1 1F4 1B4",
        "1F2 1B2",
    ]


def test_each_tower_warms_up_as_long_as_its_own_path_is() -> None:
    programs = without_stages(make_schedule("1f1b", TOWERS, 5))
    assert [line.split().index("B0") for line in programs] == [4, 3, 2, 2, 1]


def test_the_longest_path_decides_how_long_a_stage_warms_up() -> None:
    skip = StageGraph(ranks=((0,), (1,), (2,)), edges=((0, 2), (0, 1), (1, 2)))
    assert make_schedule("1f1b", skip, 5) == make_schedule("1f1b", StageGraph.chain(3), 5)


def test_a_rank_without_a_stage_has_nothing_to_do() -> None:
    graph = StageGraph(ranks=((0,), (2,)), edges=((0, 1),))
    for kind in SCHEDULES:
        assert make_schedule(kind, graph, 3)[1] == ()


# --- ranks of several stages ----------------------------------------------------------------------


def megatron(num_ranks: int, chunks: int, num_microbatches: int) -> tuple[RankProgram, ...]:
    """The order of Narayanan et al. 2021 in their own terms, for whole groups of microbatches."""
    total = num_microbatches * chunks
    turns = [
        (chunk, first + index)
        for first in range(0, num_microbatches, num_ranks)
        for chunk in range(chunks)
        for index in range(num_ranks)
    ]
    programs = []
    for rank in range(num_ranks):
        forwards = [Forward(chunk * num_ranks + rank, index) for chunk, index in turns]
        backwards = [
            Backward((chunks - 1 - chunk) * num_ranks + rank, index) for chunk, index in turns
        ]
        warm_up = min((num_ranks - rank - 1) * 2 + (chunks - 1) * num_ranks, total)
        passes: list[Pass] = list(forwards[:warm_up])
        for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
            passes += [forward, backward]
        programs.append((*passes, *backwards[total - warm_up :]))
    return tuple(programs)


@pytest.mark.parametrize(("num_ranks", "chunks"), [(1, 3), (2, 2), (4, 2), (3, 3), (8, 2), (2, 4)])
@pytest.mark.parametrize("num_groups", [1, 2, 5])
def test_interleaved_is_the_order_of_its_paper(
    num_ranks: int, chunks: int, num_groups: int
) -> None:
    graph = StageGraph.chain(num_ranks * chunks, num_ranks)
    num_microbatches = num_ranks * num_groups
    programs = make_schedule("interleaved", graph, num_microbatches)
    assert lines(programs) == lines(megatron(num_ranks, chunks, num_microbatches))


def test_a_remainder_of_microbatches_makes_groups_longer() -> None:
    rank_0, _ = make_schedule("interleaved", StageGraph.chain(4, 2), 5)
    forwards = [str(action) for action in rank_0 if isinstance(action, Forward)]
    assert " ".join(forwards) == "0F0 0F1 0F2 2F0 2F1 2F2 0F3 0F4 2F3 2F4"


def test_interleaved_and_1f1b_are_one_schedule() -> None:
    for graph in (StageGraph.chain(4), StageGraph.chain(4, 2), FUNNEL, TOWERS):
        assert make_schedule("interleaved", graph, 7) == make_schedule("1f1b", graph, 7)


def test_stages_next_to_one_another_on_a_rank_run_as_one() -> None:
    graph = StageGraph(ranks=((0,), (0,), (1,), (1,)), edges=((0, 1), (1, 2), (2, 3)))
    assert lines(make_schedule("1f1b", graph, 3)) == [
        "0F0 1F0 0F1 1F1 0F2 1F2 1B0 0B0 1B1 0B1 1B2 0B2",
        "2F0 3F0 3B0 2F1 2B0 3F1 3B1 2F2 2B1 3F2 3B2 2B2",
    ]


def test_gpipe_goes_all_the_way_forward_on_ranks_of_several_stages_too() -> None:
    for program in make_schedule("gpipe", StageGraph.chain(6, 2), 5):
        kinds = [type(action) for action in program]
        assert kinds == [Forward] * 15 + [Backward] * 15


def test_evaluation_takes_each_microbatch_through_all_stages_of_a_rank() -> None:
    assert lines(forward_schedule(StageGraph.chain(4, 2), 2)) == [
        "0F0 2F0 0F1 2F1",
        "1F0 3F0 1F1 3F1",
    ]
    assert lines(forward_schedule(FUNNEL, 4)) == ["0F0 0F3", "0F1", "0F2", "1F0 1F1 1F2 1F3"]


# --- what cannot be -------------------------------------------------------------------------------


def test_an_unknown_schedule_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(
        PlanError, match=r"Received: '2f2b'.*gpipe, 1f1b, interleaved, zb-h1, zb-h2"
    ):
        make_schedule("2f2b", StageGraph.chain(2), 2)


def test_no_microbatch_is_refused() -> None:
    with pytest.raises(PlanError, match="num_microbatches=0"):
        make_schedule("1f1b", StageGraph.chain(2), 0)
    with pytest.raises(PlanError, match="num_microbatches=-1"):
        forward_schedule(StageGraph.chain(2), -1)


@pytest.mark.parametrize("kind", ["zb-h1", "zb-h2"])
def test_zero_bubble_schedules_are_for_ranks_of_one_stage(kind: str) -> None:
    with pytest.raises(PlanError, match=rf"{kind}.*stages \(1, 3\) on rank 1.*interleaved"):
        make_schedule(kind, StageGraph(ranks=((0,), (1,), (2,), (1,)), edges=()), 4)


@pytest.mark.parametrize(
    ("ranks", "edges", "received"),
    [
        ((), (), r"ranks=\(\)"),
        (((0,), ()), (), r"Stage 1.*ranks \(\)"),
        (((0, 0),), (), r"ranks \(0, 0\)"),
        (((0,), (-1,)), (), r"ranks \(-1,\)"),
        (((0,), (1,)), ((1, 0),), r"edge \(1, 0\)"),
        (((0,), (1,)), ((1, 1),), r"edge \(1, 1\)"),
        (((0,), (1,)), ((0, 2),), r"edge \(0, 2\)"),
        (((0,), (1,)), ((-1, 1),), r"edge \(-1, 1\)"),
        (((0,), ()), ((1, 0),), "2 problems"),
    ],
)
def test_a_graph_that_cannot_be_is_refused(
    ranks: tuple[tuple[int, ...], ...], edges: tuple[tuple[int, int], ...], received: str
) -> None:
    with pytest.raises(PlanError, match=received):
        StageGraph(ranks=ranks, edges=edges)


@pytest.mark.parametrize(("num_stages", "num_ranks"), [(0, None), (3, 0), (-1, 2)])
def test_a_chain_needs_stages_and_ranks(num_stages: int, num_ranks: int | None) -> None:
    with pytest.raises(PlanError, match=f"{num_stages} stages on"):
        StageGraph.chain(num_stages, num_ranks)
