"""Simulated time: published figures, closed forms, and what a rank waits for."""

import pytest

from lockstep.errors import PlanError
from lockstep.plan import simulate
from lockstep.plan.pipeline.schedules import SCHEDULES, forward_schedule, make_schedule
from lockstep.plan.pipeline.simulation import (
    StageCosts,
    Timeline,
    format_grid,
    run_programs,
)
from lockstep.plan.pipeline.stage_graph import StageGraph
from lockstep.plan.program.rank_program import RankProgram
from tests.programs import check_programs, parse_program

UNIT = StageCosts(forward=1, backward_input=1, backward_weight=1)
PAIR = StageGraph.chain(2)


def simulate_units(schedule: str, stages: int, microbatches: int) -> Timeline:
    """Every forward pass and either part of a backward pass takes 1."""
    return simulate(
        schedule=schedule,
        stages=stages,
        microbatches=microbatches,
        forward=1,
        backward_input=1,
        backward_weight=1,
    )


def parse(*programs: str) -> tuple[RankProgram, ...]:
    return tuple(parse_program(program) for program in programs)


def starts(timeline: Timeline) -> list[dict[str, float]]:
    return [{str(event.action): event.start for event in events} for events in timeline.events]


# --- figures and closed forms ---------------------------------------------------------------------


# Qi et al. 2023: measured times of a 1.5B and a 28.3B model, and the rates their simulation gives.
@pytest.mark.parametrize(
    ("stages", "microbatches", "times", "rates"),
    [
        (8, 24, (18.522, 18.086, 9.337, 0.601), {"1f1b": 0.2431, "zb-h1": 0.1585, "zb-h2": 0.1083}),
        (
            32,
            256,
            (10.402, 10.248, 7.698, 0.460),
            {"1f1b": 0.1352, "zb-h1": 0.0594, "zb-h2": 0.0257},
        ),
    ],
)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-h2"])
def test_bubble_rates_are_those_published(
    stages: int,
    microbatches: int,
    times: tuple[float, float, float, float],
    rates: dict[str, float],
    schedule: str,
) -> None:
    forward, backward_input, backward_weight, transfer = times
    timeline = simulate(
        schedule=schedule,
        stages=stages,
        microbatches=microbatches,
        forward=forward,
        backward_input=backward_input,
        backward_weight=backward_weight,
        transfer=transfer,
    )
    ideal = microbatches * (forward + backward_input + backward_weight)
    assert timeline.bubble_rate == pytest.approx(rates[schedule], abs=1e-4)
    assert timeline.bubble_rate == pytest.approx(1 - ideal / timeline.makespan, abs=1e-12)


@pytest.mark.parametrize(
    ("stages", "microbatches"), [(1, 1), (1, 5), (2, 2), (4, 4), (4, 9), (8, 24)]
)
class TestEqualStages:
    """Makespans of chains whose stages take the same time each, without transfers."""

    FORWARD, INPUT, WEIGHT = 3.0, 4.0, 2.0
    ALL = FORWARD + INPUT + WEIGHT

    def run(self, schedule: str, stages: int, microbatches: int, chunks: int = 2) -> Timeline:
        return simulate(
            schedule=schedule,
            stages=stages,
            microbatches=microbatches,
            forward=self.FORWARD,
            backward_input=self.INPUT,
            backward_weight=self.WEIGHT,
            chunks=chunks,
        )

    @pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
    def test_the_pipeline_fills_and_drains_once(
        self, schedule: str, stages: int, microbatches: int
    ) -> None:
        timeline = self.run(schedule, stages, microbatches)
        assert timeline.makespan == (microbatches + stages - 1) * self.ALL
        assert timeline.bubble_rate == pytest.approx((stages - 1) / (microbatches + stages - 1))

    @pytest.mark.parametrize("chunks", [1, 2, 3])
    def test_interleaving_divides_the_bubble_by_the_chunks(
        self, stages: int, microbatches: int, chunks: int
    ) -> None:
        timeline = self.run("interleaved", stages, microbatches, chunks)
        bubble = (stages - 1) * self.ALL / chunks
        assert timeline.makespan == pytest.approx(microbatches * self.ALL + bubble)

    def test_zb_h1_fills_part_of_the_bubble_with_gradients_of_weights(
        self, stages: int, microbatches: int
    ) -> None:
        timeline = self.run("zb-h1", stages, microbatches)
        bubble = (stages - 1) * (self.FORWARD + self.INPUT - self.WEIGHT)
        assert timeline.makespan == pytest.approx(microbatches * self.ALL + bubble)

    def test_gpipe_holds_all_microbatches(self, stages: int, microbatches: int) -> None:
        timeline = self.run("gpipe", stages, microbatches)
        assert timeline.peak_activations == (microbatches,) * stages

    def test_1f1b_holds_one_for_each_stage_from_its_own_on(
        self, stages: int, microbatches: int
    ) -> None:
        peaks = self.run("1f1b", stages, microbatches).peak_activations
        assert peaks == tuple(min(stages - stage, microbatches) for stage in range(stages))

    def test_zb_h1_holds_no_more_than_1f1b(self, stages: int, microbatches: int) -> None:
        peaks = self.run("zb-h1", stages, microbatches).peak_activations
        assert set(peaks) == {min(stages, microbatches)}

    def test_zb_h2_holds_less_than_twice_as_many(self, stages: int, microbatches: int) -> None:
        peaks = self.run("zb-h2", stages, microbatches).peak_activations
        assert set(peaks) == {min(2 * stages - 1, microbatches)}


def test_zb_h2_has_no_bubble_where_all_passes_are_equally_long() -> None:
    timeline = simulate_units("zb-h2", 4, 8)
    assert timeline.makespan == 24
    assert timeline.bubble_rate == 0
    assert timeline.ends == (24.0, 25.0, 26.0, 27.0)


def test_a_remainder_of_microbatches_costs_interleaving_nothing() -> None:
    for microbatches in range(4, 13):
        timeline = simulate_units("interleaved", 4, microbatches)
        assert timeline.makespan == microbatches * 3 + 3 * 3 / 2


def test_the_slowest_stage_decides() -> None:
    timeline = simulate(
        schedule="1f1b",
        stages=3,
        microbatches=10,
        forward=[1, 5, 1],
        backward_input=[1, 5, 1],
        backward_weight=0,
    )
    assert timeline.makespan == 1 + 10 * 10 + 1  # to it, its own work, and back
    assert timeline.bubble_rate == pytest.approx(1 - (20 + 100 + 20) / 3 / 102)


def test_a_time_per_chunk_is_taken_as_it_is() -> None:
    def run(forward: float | list[float]) -> Timeline:
        return simulate(
            schedule="interleaved",
            stages=2,
            microbatches=4,
            forward=forward,
            backward_input=2,
            backward_weight=2,
            chunks=2,
        )

    assert run([1.0, 2.0, 1.0, 2.0]) == run([2.0, 4.0])
    assert run([1.0, 1.0, 1.0, 1.0]) == run(2)
    assert run([1.0, 1.0, 1.0, 9.0]) != run([1.0, 9.0])


# --- what a pass waits for ------------------------------------------------------------------------


def test_a_pass_waits_for_its_rank_and_for_what_arrives() -> None:
    costs = [UNIT, StageCosts(forward=2, backward_input=3, backward_weight=4)]
    programs = parse("0F0 0F1 0I0 0W0 0B1 STEP", "1F0 1F1 1I0 1W0 1B1 STEP")
    timeline = run_programs(programs, PAIR, costs, 0.5)
    assert starts(timeline) == [
        {"0F0": 0, "0F1": 1, "0I0": 9, "0W0": 10, "0B1": 20},
        # The whole backward pass on rank 1 sends when both of its parts have ended, at 19.5.
        {"1F0": 1.5, "1F1": 3.5, "1I0": 5.5, "1W0": 8.5, "1B1": 12.5},
    ]
    assert timeline.ends == (22.0, 19.5)
    assert timeline.makespan == 22
    assert timeline.peak_activations == (2, 2)


def test_what_stays_on_a_rank_takes_no_transfer() -> None:
    programs = parse("0F0 1F0 1B0 0B0")
    alone = StageGraph.chain(2, 1)
    assert run_programs(programs, alone, [UNIT] * 2, 100.0).makespan == 6


def test_transfers_may_differ_by_edge() -> None:
    towers = StageGraph(ranks=((0,), (1,), (2,)), edges=((0, 2), (1, 2)))
    programs = parse("0F0 0B0", "1F0 1B0", "2F0 2B0")
    timeline = run_programs(programs, towers, [UNIT] * 3, {(0, 2): 1, (1, 2): 4})
    assert starts(timeline) == [{"0F0": 0, "0B0": 9}, {"1F0": 0, "1B0": 12}, {"2F0": 5, "2B0": 6}]


def test_steps_that_need_not_start_together_count_from_a_ranks_first_pass() -> None:
    programs = parse("0F0 0B0", "1F0 1B0")
    together = run_programs(programs, PAIR, [UNIT] * 2)
    apart = run_programs(programs, PAIR, [UNIT] * 2, steps_together=False)
    assert (together.makespan, apart.makespan) == (6, 6)
    programs = parse("0F0", "1F0")
    assert run_programs(programs, PAIR, [UNIT] * 2).makespan == 2
    assert run_programs(programs, PAIR, [UNIT] * 2, steps_together=False).makespan == 1


def test_evaluation_holds_no_activations() -> None:
    timeline = run_programs(forward_schedule(PAIR, 5), PAIR, [UNIT] * 2)
    assert timeline.peak_activations == (1, 1)
    assert timeline.makespan == 6


def test_a_rank_without_passes_ends_at_once() -> None:
    graph = StageGraph(ranks=((1,),), edges=())
    timeline = run_programs(parse("", "0F0 0B0"), graph, [UNIT])
    assert timeline.ends == (0.0, 3.0)
    assert timeline.peak_activations == (0, 1)
    assert timeline.bubble_rate == 0.5


def test_passes_that_take_no_time_leave_no_bubble() -> None:
    free = StageCosts(forward=0, backward_input=0, backward_weight=0)
    assert run_programs(parse("0F0 0B0"), StageGraph.chain(1), [free]).bubble_rate == 0


# --- the grid -------------------------------------------------------------------------------------


def test_the_grid_is_the_papers_figure() -> None:
    assert format_grid(simulate_units("zb-h1", 3, 3)).splitlines() == [
        "rank 0 | F0 F1 F2       I0 W0 I1 W1 I2 W2",
        "rank 1 |    F0 F1    I0 F2 I1 W0 I2 W1 W2",
        "rank 2 |       F0 I0 F1 I1 F2 I2 W0 W1 W2",
    ]


def test_the_grid_shows_long_passes_and_the_stage_where_a_rank_has_several() -> None:
    assert format_grid(simulate_units("interleaved", 2, 2), unit=0.5).splitlines() == [
        "rank 0 | 0F0 0F1 2F0 2F1         2B0 ---     2B1 --- 0B0 --- 0B1 ---",
        "rank 1 |     1F0 1F1 3F0 3B0 --- 3F1 3B1 --- 1B0 --- 1B1 ---",
    ]


def test_a_cell_shows_what_runs_in_its_middle() -> None:
    costs = StageCosts(forward=1.4, backward_input=0.2, backward_weight=1.0)
    timeline = run_programs(parse("0F0 0I0 0W0"), StageGraph.chain(1), [costs])
    assert format_grid(timeline) == "rank 0 | F0 I0 W0"
    assert format_grid(timeline, unit=2) == "rank 0 | F0"


def test_a_grid_of_nothing_is_empty() -> None:
    assert format_grid(Timeline(events=((), ()))) == "rank 0 |\nrank 1 |"


# --- what cannot be -------------------------------------------------------------------------------


def test_a_deadlock_says_which_rank_waits_for_what() -> None:
    programs = parse("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    with pytest.raises(
        PlanError, match="rank 0 at 0B0 for 1B0 of rank 1; rank 1 at 1F1 for 0F1 of rank 0"
    ):
        run_programs(programs, PAIR, [UNIT] * 2)


def test_a_deadlock_of_many_ranks_names_the_first() -> None:
    programs = parse(*(f"{rank}B0 {rank}F0" for rank in range(12)))
    with pytest.raises(PlanError, match=r"rank 0 at 0B0 for 0F0 of rank 0; rank 1 .*; and 6 more"):
        run_programs(programs, StageGraph.chain(12), [UNIT] * 12)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_programs_that_schedules_make_are_right(kind: str) -> None:
    check_programs(make_schedule(kind, PAIR, 3), PAIR)
    check_programs(forward_schedule(PAIR, 3), PAIR)


def test_a_backward_pass_may_be_in_one_part_on_one_stage_and_in_two_on_another() -> None:
    check_programs(parse("0F0 0F1 0B0 0I1 0W1", "1F0 1I0 1W0 1F1 1B1"), PAIR)


@pytest.mark.parametrize(
    ("programs", "message"),
    [
        (("0F0 0B0", "1F0"), "missing. Received: 1B0"),
        (("0F0 0B0", "1F0 1I0"), "missing. Received: 1W0"),
        (("0F0 0F1 0B0 0B1", "1F0 1B0 1B1"), "missing. Received: 1F1"),
        (("0F0 0B0 0B0", "1F0 1B0"), "too often. Received: 0B0"),
        (("0F0 0B0 0W0", "1F0 1B0"), "too often. Received: 0W0"),
        (("0F0 0B0 1F0", "1B0"), "do not hold.* Received: 1F0 on rank 0"),
        (("0F0 0B0 2F0", "1F0 1B0"), "do not hold.* Received: 2F0 on rank 0"),
        (("0F0 0B0 1F0 1F0", "1F0"), "3 problems"),
        (("0F0 1F0",), "1 programs for 2 ranks"),
        (("0F0 0B0", "1B0 1F0"), "deadlock.* rank 1 at 1B0 for 1F0 of rank 1"),
    ],
)
def test_wrong_programs_are_refused(programs: tuple[str, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_programs(parse(*programs), PAIR)


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ({"forward": [1, 2, 3]}, "forward.* 3 times for 2 stages.* sequence of 2"),
        ({"backward_weight": -1}, "Received: -1"),
        ({"backward_input": float("nan")}, "Received: nan"),
        ({"transfer": float("inf")}, "Received: inf"),
        ({"stages": 0}, "0 stages"),
        ({"microbatches": 0}, "num_microbatches=0"),
        ({"schedule": "best"}, "'best'"),
        ({"schedule": "interleaved", "chunks": 0}, "0 stages on 2 ranks"),
        ({"schedule": "interleaved", "chunks": 3, "forward": [1] * 4}, "sequence of 2 or 6"),
    ],
)
def test_arguments_that_cannot_be_are_refused(times: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "schedule": "1f1b",
        "stages": 2,
        "microbatches": 4,
        "forward": 1,
        "backward_input": 1,
        "backward_weight": 1,
    }
    with pytest.raises(PlanError, match=message):
        simulate(**{**arguments, **times})  # type: ignore[arg-type]


def test_costs_and_transfers_must_fit_the_graph() -> None:
    programs = parse("0F0 0B0", "1F0 1B0")
    with pytest.raises(PlanError, match="1 costs for 2 stages"):
        run_programs(programs, PAIR, [UNIT])
    with pytest.raises(PlanError, match=r"none for \(0, 1\)"):
        run_programs(programs, PAIR, [UNIT] * 2, {(0, 2): 1.0})
