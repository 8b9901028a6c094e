"""Gradients and rows that meet in shared memory, between real processes."""

from collections.abc import Iterator

import pytest
import torch

from lockstep.launch.workers.team import Team
from tests.parallel import calls
from tests.sums import tree_sum


@pytest.fixture(params=[2, 4])
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    team = calls.start_team(request.param)
    yield team
    team.close()


def expected_sums(num_shares: int, step: int) -> list[torch.Tensor | None]:
    """The gradients, summed in the tree over the shares."""
    gradients = [calls.make_gradients(share, step) for share in range(num_shares)]
    return [tree_sum(column) for column in zip(*gradients, strict=True)]


@pytest.mark.parametrize("num_shares", [4, 5])
def test_sums_have_the_same_bits_whoever_comes_first(team: Team, num_shares: int) -> None:
    """Also where some shares, or all, do not use a parameter."""
    num_ranks, num_steps = team.num_helpers + 1, 5
    num_bytes = calls.make_spec(num_ranks, num_shares).num_bytes
    expected = [expected_sums(num_shares, step) for step in range(num_steps)]
    assert any(total is None for total in expected[0])
    assert any(total is not None for total in expected[0])
    for seed in range(3):
        found = calls.run_on_all(
            team, calls.exchange_gradients, num_bytes, num_shares, num_steps, seed
        )
        for ranks in found:
            torch.testing.assert_close(ranks, expected, rtol=0, atol=0)


def test_the_order_of_the_shares_matters() -> None:
    """Else the test above would prove nothing."""
    gradients = [calls.make_gradients(share, 0)[1] for share in range(5)]
    used = [gradient for gradient in gradients if gradient is not None]
    assert not torch.equal(sum(used), sum(reversed(used)))  # type: ignore[arg-type]


def test_rows_come_in_the_order_of_the_shares(team: Team) -> None:
    num_ranks = team.num_helpers + 1
    num_bytes = calls.make_spec(num_ranks, num_ranks).num_bytes
    for seed in range(3):
        wrong = calls.run_on_all(team, calls.exchange_rows, num_bytes, 200, seed)
        assert wrong == [0] * num_ranks
