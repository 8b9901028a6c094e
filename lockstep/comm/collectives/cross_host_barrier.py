"""The board of ranks on several hosts.

Every host has a board of its own with lines for all ranks, at which its own ranks meet. Its first
rank, the leader, also exchanges messages with the leaders of the other hosts, and writes them into
the lines of their ranks. A barrier is: all ranks of each host, then all leaders, then all ranks of
each host again, once all data of the barrier have arrived.
"""

import struct
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from lockstep.comm.shared_memory.shared_region import SharedRegion
from lockstep.comm.shared_memory.status_board import StatusBoard

_HALT = struct.Struct("<?")


class Crossing(Protocol):
    """A leader's line to the leaders of the other hosts; all call the same in the same order."""

    def exchange(self, payload: bytes, among: int | None = None) -> list[bytes]:
        """The payloads of the first ``among`` hosts, by default of all, by host."""

    def broadcast(self, payload: bytes | None) -> bytes:
        """Host 0's payload; the others pass None."""


def _nothing() -> bytes:
    return b""


def _ignore(payloads: list[bytes]) -> None:
    return


class MultiHostBoard(StatusBoard):
    """One rank's view of its host's board.

    Args:
        region: see ``StatusBoard``.
        rank: whose view this is, counted over all hosts.
        hosts: the number of ranks of each host.
        look_around: see ``StatusBoard``.
        crossing: to the other leaders; None unless this rank leads its host.
    """

    def __init__(
        self,
        region: SharedRegion,
        *,
        rank: int,
        hosts: Sequence[int],
        look_around: Callable[[float], None],
        crossing: Crossing | None,
    ) -> None:
        super().__init__(region, rank=rank, num_ranks=sum(hosts), look_around=look_around)
        self.crossing = crossing
        starts = [sum(hosts[:host]) for host in range(len(hosts))]
        self._hosts = [
            range(start, start + count) for start, count in zip(starts, hosts, strict=True)
        ]
        self.ranks_here = next(ranks for ranks in self._hosts if rank in ranks)
        self._leading_rank = self.ranks_here.start
        self._leader = self._lines[self._leading_rank]

    def barrier(self) -> None:
        self.meet()

    def barrier_here(self) -> None:
        self._meet_here()

    def meet(
        self, give: Callable[[], bytes] = _nothing, take: Callable[[list[bytes]], None] = _ignore
    ) -> None:
        """A barrier of all ranks, at which leaders exchange their hosts' data.

        Args:
            give: called on leaders once all ranks of the host are here; returns the host's data.
            take: called on leaders with the data of each host.
        """
        self.barrier_here()
        if self.crossing is not None:
            received = self.crossing.exchange(_HALT.pack(self.wants_halt()) + give())
            if any(_HALT.unpack_from(one)[0] for one in received) and not self._own.halt:
                # Before this rank enters the next barrier: see ``StatusBoard.is_halted``.
                self._own.halt = self._own.barriers + 1
            take([payload[_HALT.size :] for payload in received])
        self.barrier_here()

    def all_gather(self, numbers: Sequence[float] | torch.Tensor) -> list[list[float]]:
        count = len(numbers)
        row = struct.Struct(f"<{count}d")

        def give() -> bytes:
            return b"".join(
                row.pack(*self._lines[rank].numbers[:count]) for rank in self.ranks_here
            )

        def take(payloads: list[bytes]) -> None:
            for ranks, payload in zip(self._hosts, payloads, strict=True):
                for rank, values in zip(ranks, row.iter_unpack(payload), strict=True):
                    self._lines[rank].numbers[:count] = values

        self._note(numbers)
        self.meet(give, take)
        return self._gathered(count)

    def announce(self, has_message: bool) -> bool:
        if self.rank == 0 and self.crossing is not None:
            self.crossing.broadcast(_HALT.pack(has_message))
        return super().announce(has_message)

    def announced(self) -> bool:
        if self.crossing is not None:
            return super().announce(bool(_HALT.unpack(self.crossing.broadcast(None))[0]))
        return super().announced()

    def relay(self, tag: int, fetch: Callable[[], None]) -> None:
        """Wait for other hosts' data of ``tag``, which the leader fetches."""
        if self._leader.relayed >= tag:
            return
        if self.crossing is not None:
            fetch()
            self._own.relayed = tag
            self.ring()
            return
        self.wait_until(self._leading_rank, lambda: self._leader.relayed >= tag)
