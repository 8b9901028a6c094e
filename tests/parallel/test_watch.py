"""What rank 0 hears of its helpers while it waits: at once where it needs one, else soon."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch

from lockstep.comm.p2p.tcp_p2p import MailChannels
from lockstep.comm.shared_memory.shared_region import SharedRegion
from lockstep.comm.shared_memory.status_board import StatusBoard
from lockstep.comm.transports.tensor_channels import TensorChannels
from lockstep.errors import WorkerError
from lockstep.launch.workers.team import Team
from lockstep.train.runtime.helper_watchdog import HelperWatchdog
from tests.channels import channel_pair
from tests.faults.processes import wait_until
from tests.parallel import calls
from tests.thorough import core_of

SECONDS = 60.0
RANK_ABROAD = 2
NAMES = {RANK_ABROAD: "Host 1"}


@pytest.fixture
def failed_team() -> Iterator[Team]:
    """Rank 1 has failed, and has told so."""
    team = calls.start_team(2)
    team.call(calls.raise_error, b"", position=lambda rank: "in fit", timeout_seconds=SECONDS)
    wait_until(team._helpers[0].has_failed, SECONDS)
    yield team
    team.close()


def waits(
    board: StatusBoard, mail_channels: MailChannels, channels: TensorChannels
) -> dict[str, Callable[[], Any]]:
    return {
        "the mail thread": lambda: mail_channels.take(0, 1, RANK_ABROAD),
        "a channel": lambda: channels.transfer({}, {RANK_ABROAD: [torch.zeros(4)]}),
        "the board": lambda: board.wait_for(1, 1),
    }


@pytest.mark.parametrize(
    "where", core_of(["the mail thread", "a channel", "the board"], ["a channel"])
)
def test_a_failure_is_heard_wherever_rank_0_waits(where: str, failed_team: Team) -> None:
    """Another host may wait for the rank that has failed, and rank 0 for that host."""
    watch = HelperWatchdog(failed_team, SECONDS, None)
    region = SharedRegion.create(4096)
    board = StatusBoard(region, rank=0, num_ranks=2, look_around=watch.look_around)
    watch.watch(board)
    here, there = channel_pair()
    with closing(here), closing(there):
        mail_channels = MailChannels({RANK_ABROAD: here}, NAMES, watch.look_around, 60.0)
        channels = TensorChannels({RANK_ABROAD: here}, NAMES, watch.look_around, SECONDS)
        if where == "a channel":
            mail_channels.abandon()  # one of the two reads
        began = time.monotonic()
        with pytest.raises(WorkerError, match="Rank 1 failed"):
            waits(board, mail_channels, channels)[where]()
        assert time.monotonic() - began < SECONDS / 2
        mail_channels.abandon()


class _OtherHosts:
    """Nothing is awaited of them."""

    class control_group:  # noqa: N801  # stands in for an attribute
        awaited = False

    def look_around(self, waited_seconds: float) -> None:
        pass


def test_a_helper_that_waits_for_another_host_is_the_first_to_say_so() -> None:
    """It knows which host is gone; rank 0, which waits for the helper, does not."""
    team = calls.start_team(2)
    team.wait_until_ready()
    alone, among = HelperWatchdog(team, 2.0, None), HelperWatchdog(team, 2.0, _OtherHosts())  # type: ignore[arg-type]
    among.look_around(3.0)
    for watch, waited_seconds in ((alone, 3.0), (among, 8.0)):
        with pytest.raises(WorkerError, match="has waited"):
            watch.look_around(waited_seconds)
    team.close()
