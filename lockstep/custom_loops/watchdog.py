"""What a replica looks after while it waits for the others."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from lockstep.comm.shared_memory.status_board import StatusBoard
from lockstep.errors import HostError, WorkerError
from lockstep.launch.workers.external_workers import Attachment
from lockstep.launch.workers.team import Team
from lockstep.train.multihost.hosts import Hosts
from lockstep.units import format_seconds

# The first replica of a host knows best whom all wait for, so it has the first word.
_HEAD_START_SECONDS = 2.0


@dataclass(kw_only=True)
class LoopWatchdog:
    """Raises where waiting on is in vain: time is up, or who is waited for has ended.

    A replica that has ended is no trouble for as long as nobody waits for it: it may have come to
    the end of its script. One that has failed tells so, and then there is nothing to wait for.

    Attributes:
        rank: this replica.
        ranks_here: those of this host.
        timeout_seconds: longest wait.
        team: the other replicas of this host, where this one leads it.
        attachment: to the replica that leads this host, where that is another one.
        hosts: the other hosts, where this replica leads one of several.
        position: says what all replicas must come to, for messages.
    """

    rank: int
    ranks_here: range
    timeout_seconds: float
    team: Team | None
    attachment: Attachment | None
    hosts: Hosts | None
    position: Callable[[], str]
    _board: Callable[[], StatusBoard | None] = field(default=lambda: None)
    _loss: WorkerError | None = None

    def watch(self, board: StatusBoard | None) -> None:
        """Say where waiting takes place."""
        if board is not None:
            # The board knows this object. A cycle would keep its memory until the collector runs.
            self._board = weakref.ref(board)

    def look_around(self, waited_seconds: float) -> None:
        """To be called now and then in any wait.

        Raises:
            WorkerError: another replica of this host does not come, has failed, or has ended.
            HostError: another host has.
        """
        try:
            self._look(waited_seconds)
        except (WorkerError, HostError) as error:
            if self.team is not None:
                self.team.send_failure(error)
            if self.hosts is not None:
                self.hosts.control_group.fail(str(error), error)
            raise

    def _look(self, waited_seconds: float) -> None:
        awaited = self._awaited()
        self._look_at_host(awaited, waited_seconds)
        if self.hosts is not None:
            self.hosts.look_around(waited_seconds)
        patience = self.timeout_seconds + (_HEAD_START_SECONDS if self.team is None else 0.0)
        if waited_seconds > patience and awaited:
            names = " and ".join(map(str, awaited))
            raise WorkerError(
                f"Replica {names} did not come to {self.position()}, at which replica "
                f"{self.rank} waits.",
                received=f"nothing for {format_seconds(waited_seconds)}",
                fix="Every replica must make the same calls equally often: `step` with weight=0 "
                "where it has no samples, and `join` after a loop that ends earlier.",
            )

    def _look_at_host(self, awaited: list[int], waited_seconds: float) -> None:
        """See to the processes of this host."""
        for others in (self.team, self.attachment):
            if others is not None and awaited:
                others.check_answering(waited_seconds)
        if self.team is not None:
            for rank, reason in self.team.ended().items():
                if rank in awaited:
                    raise self._early(rank, reason)
        if self.attachment is not None:
            self._loss = self._loss or self.attachment.leader_loss()
            if self._loss is not None and self.attachment.has_leader_failed:
                raise self._loss
            if self._loss is not None and self.ranks_here.start in awaited:
                raise self._early(self.ranks_here.start, str(self._loss))

    def _awaited(self) -> list[int]:
        """The replicas of this host that this one waits for."""
        board = self._board()
        return [] if board is None else [each for each in self.ranks_here if board.is_awaited(each)]

    def _early(self, rank: int, reason: str) -> WorkerError:
        return WorkerError(
            f"Replica {rank} has ended before it came to {self.position()}.",
            received=reason,
            fix="See what it wrote. Where loops may have different lengths, call `join` of the "
            "optimizer after them.",
        )
