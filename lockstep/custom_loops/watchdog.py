"""The watchdog of a replica of a custom loop that waits for the others.

Helpers of a Trainer are watched by rank 0 (``train.runtime.helper_watchdog``).
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from lockstep.comm.shared_memory.status_board import StatusBoard
from lockstep.errors import HostError, WorkerError
from lockstep.formatting import format_seconds
from lockstep.launch.workers.external_workers import Attachment
from lockstep.launch.workers.team import Team
from lockstep.train.multihost.hosts import Hosts

# The first replica of a host knows best which replicas are late, so it raises first.
_HEAD_START_SECONDS = 2.0


@dataclass(kw_only=True)
class LoopWatchdog:
    """Raises if the wait is longer than the timeout, or if an awaited replica has ended or failed.

    A replica that has ended is an error only if another one waits for it: its script may be
    complete. A replica that has failed reports it, which ends the wait.

    Attributes:
        rank: this replica.
        ranks_here: those of this host.
        timeout_seconds: longest wait.
        team: the other replicas of this host, if this one leads it.
        attachment: to the replica that leads this host, if that is another one.
        hosts: the other hosts, if this replica leads one of several.
        position: returns the call that all replicas must make, for messages.
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
        """Set the board at which replicas wait."""
        if board is not None:
            # The board refers to this object: a cycle would keep its memory until a collection.
            self._board = weakref.ref(board)

    def look_around(self, waited_seconds: float) -> None:
        """Call it repeatedly in every wait.

        Raises:
            WorkerError: another replica of this host is too late, has failed, or has ended.
            HostError: another host has failed or is lost.
        """
        try:
            self._check(waited_seconds)
        except (WorkerError, HostError) as error:
            if self.team is not None:
                self.team.send_failure(error)
            if self.hosts is not None:
                self.hosts.control_group.fail(str(error), error)
            raise

    def _check(self, waited_seconds: float) -> None:
        awaited = self._awaited()
        self._check_host(awaited, waited_seconds)
        if self.hosts is not None:
            self.hosts.look_around(waited_seconds)
        limit = self.timeout_seconds + (_HEAD_START_SECONDS if self.team is None else 0.0)
        if waited_seconds > limit and awaited:
            names = " and ".join(map(str, awaited))
            raise WorkerError(
                f"Replica {names} did not reach {self.position()}, at which replica "
                f"{self.rank} waits.",
                received=f"nothing for {format_seconds(waited_seconds)}",
                fix="Every replica must make the same calls equally often: `step` with weight=0 "
                "without samples, and `join` after a loop that ends earlier.",
            )

    def _check_host(self, awaited: list[int], waited_seconds: float) -> None:
        """Check the processes of this host."""
        for others in (self.team, self.attachment):
            if others is not None and awaited:
                others.check_answering(waited_seconds)
        if self.team is not None:
            for rank, reason in self.team.ended().items():
                if rank in awaited:
                    raise self._ended_early(rank, reason)
        if self.attachment is not None:
            self._loss = self._loss or self.attachment.leader_loss()
            if self._loss is not None and self.attachment.has_leader_failed:
                raise self._loss
            if self._loss is not None and self.ranks_here.start in awaited:
                raise self._ended_early(self.ranks_here.start, str(self._loss))

    def _awaited(self) -> list[int]:
        """The replicas of this host that this one waits for."""
        board = self._board()
        return [] if board is None else [each for each in self.ranks_here if board.is_awaited(each)]

    def _ended_early(self, rank: int, reason: str) -> WorkerError:
        return WorkerError(
            f"Replica {rank} has ended before {self.position()}.",
            received=reason,
            fix="Read its output. If loops may have different lengths, call the optimizer's `join` "
            "after them.",
        )
