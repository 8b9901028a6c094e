"""Checks helpers while rank 0 waits for them, and describes what a failed call has left."""

import weakref
from collections.abc import Callable
from functools import partial

from lockstep.comm.shared_memory.status_board import StatusBoard
from lockstep.launch.workers.team import Team
from lockstep.train.fit.tasks import Task
from lockstep.train.multihost.hosts import Hosts

# A rank that waits for other hosts learns of a failure on its own host after this time.
_PATIENCE_SECONDS = 1.0
# With other hosts, rank 0 waits this much longer than its helpers.
_HEAD_START_SECONDS = 5.0


# Notes for users who continue after an error of ranks with local steps.
STATE_OF_FIRST = (
    "The weights and the optimizer are those of the first replica. Steps of the other replicas "
    "since the last average are lost."
)

STATE_OF_SERVERS = (
    "The weights have the servers' last updates. Updates of unfinished batches may be in some "
    "of the weights only. The optimizer's slots are initialized again."
)

STATE_AS_SERVERS_HAD_IT = (
    "The weights and the optimizer have the servers' last updates. Updates of unfinished "
    "batches may be in some of the weights only."
)


class HelperWatchdog:
    """Checks helpers and hosts while rank 0 waits at the board."""

    def __init__(self, team: Team, timeout_seconds: float, hosts: Hosts | None) -> None:
        self._team = team
        self.timeout_seconds = timeout_seconds
        self._hosts = hosts
        self._board: Callable[[], StatusBoard | None] = lambda: None

    def watch(self, board: StatusBoard | None) -> None:
        """Set the board at which rank 0 waits."""
        if board is not None:
            # The board knows this object. A cycle would keep its memory until the collector runs.
            self._board = weakref.ref(board)

    def look_around(self, waited_seconds: float) -> None:
        """Raise if there is no use in waiting."""
        self._team.look_around(partial(self._is_awaited, waited_seconds))
        self._team.check_answering(waited_seconds)
        if self._hosts is not None:
            self._hosts.look_around(waited_seconds)
            if self._hosts.control_group.awaited:
                return  # the hosts have a timeout of their own
        # A helper that waits for another host names it, so it must time out first.
        margin = 0.0 if self._hosts is None else _HEAD_START_SECONDS
        if waited_seconds > self.timeout_seconds + margin:
            self._team.raise_timeout(waited_seconds)

    def _is_awaited(self, waited_seconds: float, rank: int) -> bool:
        board = self._board()
        if board is None:
            return False
        if board.is_waiting:
            return board.is_awaited(rank)
        # Rank 0 waits for other hosts, which may wait for any rank of this one. Not at once: rank 0
        # may be about to fail in the same way.
        return waited_seconds > _PATIENCE_SECONDS


class Position:
    """The steps of ranks, for messages."""

    def __init__(self, task: Task, board: StatusBoard | None) -> None:
        self._name = task.name
        self._board = board

    def __call__(self, rank: int) -> str:
        step = -1 if self._board is None else self._board.step_of(rank)
        return f"in {self._name}, step {step}" if step >= 0 else f"in {self._name}"


STATE_OF_AVERAGE = (
    "The weights are the average of all replicas; the optimizer is that of the first replica."
)

PARTS_ARE_LOST = (
    "The parts of the weights that other processes kept are lost, and NaN here. Load saved weights "
    "before you continue; fit(checkpoint=...) saves them, and fit(restarts=...) goes on by itself."
)


def what_is_left(last: int, *, is_put_back: bool = False) -> str:
    """A note for users who continue after an error: the step that made the weights.

    Args:
        last: the step's number; -1 for none.
        is_put_back: the weights are the last copy, made after that step.
    """
    when = f"after step {last}" if last >= 0 else "before fit"
    copy = " They come from the last copy: a later update was partly lost." if is_put_back else ""
    return f"The weights and the optimizer are complete, as they were {when}.{copy}"


def what_is_lost(last: int | None, lost: list[str], *, has_older: bool) -> str:
    """As ``what_is_left``, if a part was lost with the helpers.

    Args:
        last: the step that made the weights; None if some slices are a step ahead.
        lost: parameters whose slots are lost.
        has_older: slots are updated in other memory; this process has older ones.
    """
    if last is None:
        return (
            "The weights were being updated: some slices are one step ahead of the others. "
            "Load saved weights before you continue."
        )
    if last < 0:
        return what_is_left(last)
    if has_older:
        return (
            f"The weights are complete, as they were after step {last}. The optimizer's slots that "
            "other processes update are older: load a saved state, or make a new optimizer."
        )
    names = ", ".join(lost)
    return f"{what_is_left(last)} But the slots of {names} are lost."
