"""Barriers, posts and halts between real processes, whatever delays there are."""

from collections.abc import Iterator

import pytest

from lockstep.comm.shared_memory.shared_region import SharedRegion
from lockstep.comm.shared_memory.status_board import LINE_BYTES, StatusBoard
from lockstep.launch.workers.team import Team
from tests.parallel import calls
from tests.thorough import core_of

NUM_BYTES = 4096


@pytest.fixture(params=core_of([2, 4], [2]))
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    team = calls.start_team(request.param)
    yield team
    team.close()


def test_nobody_passes_a_barrier_before_all_have_entered(team: Team) -> None:
    assert (team.num_helpers + 1) * LINE_BYTES + 64 < NUM_BYTES
    for seed in range(3):
        wrong = calls.run_on_all(team, calls.cross_barriers, NUM_BYTES, 300, seed)
        assert wrong == [0] * (team.num_helpers + 1)


def test_what_goes_with_a_post_is_there(team: Team) -> None:
    wrong = calls.run_on_all(team, calls.post_and_read, NUM_BYTES, 300)
    assert wrong == [0] * (team.num_helpers + 1)


def test_all_ranks_hear_whether_a_message_follows(team: Team) -> None:
    for seed in range(3):
        wrong = calls.run_on_all(team, calls.announce_and_hear, NUM_BYTES, 200, seed)
        assert wrong == [0] * (team.num_helpers + 1)


def test_all_ranks_halt_after_the_same_barrier(team: Team) -> None:
    for seed in range(10):
        crossed = calls.run_on_all(team, calls.halt_at, NUM_BYTES, seed)
        assert len(set(crossed)) == 1
        assert 0 < crossed[0] <= 51


def test_who_is_awaited() -> None:
    """While rank 0 waits, those count that have not entered; afterwards nobody does."""
    region = SharedRegion.create(NUM_BYTES)
    seen = []

    def look_around(waited_seconds: float) -> None:
        seen.append([boards[0].is_awaited(rank) for rank in range(3)])
        if len(seen) == 2:
            raise TimeoutError

    boards = [
        StatusBoard(region, rank=rank, num_ranks=3, look_around=look_around) for rank in range(3)
    ]
    assert not boards[0].is_awaited(1)
    boards[1]._own.barriers = 1  # rank 1 has entered, rank 2 has not
    with pytest.raises(TimeoutError):
        boards[0].barrier()
    assert seen == [[False, False, True]] * 2
    assert not any(boards[1].is_awaited(rank) for rank in range(3))
