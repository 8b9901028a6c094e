"""The exchange of replicas on several hosts.

Within a host shares meet in shared memory; gradients of several hosts in ``comm.host_sums``. What
ranks must know of other hosts' shares besides (losses, what they have put up, rows that they offer)
the leaders exchange, and write where shares of this host have theirs.
"""

from collections.abc import Mapping, Sequence

import torch

from lockstep.comm.exchange import ShareTotals
from lockstep.comm.host_sums import HostSums
from lockstep.comm.shared_exchange import ExchangeSpec, SharedMemoryExchange
from lockstep.comm.shared_memory import SharedRegion
from lockstep.comm.wide_board import WideBoard
from lockstep.comm.wires import Wires
from lockstep.plan.layout import Piece


class HostExchange(SharedMemoryExchange):
    """One rank's end of the exchange between hosts.

    Args:
        spec: the layout.
        region: this host's.
        board: this host's, in the region.
        hosts: the ranks of each host.
        host: this host.
        wires: this rank's.
        mirrored: tensors in shared memory whose values on host 0 all hosts get in every step.
    """

    board: WideBoard

    def __init__(
        self,
        spec: ExchangeSpec,
        region: SharedRegion,
        *,
        board: WideBoard,
        hosts: Sequence[range],
        host: int,
        wires: Wires,
        mirrored: Sequence[torch.Tensor] = (),
    ) -> None:
        super().__init__(spec, region, board=board, ranks=board.ranks_here)
        self._ranks = hosts
        self._host = host
        self._mirrored = mirrored
        self._sums = HostSums(
            self._gradients,
            rank=board.rank,
            hosts=hosts,
            rows_of=lambda ranks: spec.rows_of(range(ranks[0], ranks[-1] + 1)),
            wires=wires,
            is_everywhere=[limit > 0 for limit in spec.gradients.row_limits],
        )

    def divide(self, pieces: Sequence[Sequence[Piece]]) -> None:
        """From now on each rank of all hosts updates these pieces."""
        self._sums.divide(dict(enumerate(pieces)))

    # --- what leaders exchange -------------------------------------------------------------------

    def collect(self, num_filled: int) -> ShareTotals:
        self.board.meet(self._figures, self._take_figures)
        return self._collected(num_filled)

    def _figures(self) -> bytes:
        """The losses of this host's shares, what they have put up, and host 0's options."""
        shares = self._spec.shares_of(self._ranks[self._host])
        rows = self._spec.rows_of(self._ranks[self._host])
        parts = [self._losses[_slice(shares)], self._gradients.table[_slice(rows)]]
        options = [tensor.numpy() for tensor in self._mirrored if self._host == 0]
        return b"".join(part.tobytes() for part in (*parts, *options))

    def _take_figures(self, payloads: list[bytes]) -> None:
        for host, payload in enumerate(payloads):
            if host == self._host:
                continue
            rest = memoryview(payload)
            table = self._gradients.table
            targets = [
                self._losses[_slice(self._spec.shares_of(self._ranks[host]))],
                table[_slice(self._spec.rows_of(self._ranks[host]))],
                *(tensor.numpy() for tensor in self._mirrored if host == 0),
            ]
            for target in targets:
                target.reshape(-1).view("u1")[:] = rest[: target.nbytes]
                rest = rest[target.nbytes :]

    def _await_offers(self, share: int, length: int, num_filled: int) -> None:
        here = self._spec.shares_of(self._ranks[self._host])
        tag, buffer = self._tag(share), self._offers[share] & 1
        for other in here:
            if other < num_filled:
                self.board.wait_for(self._rank_of(other), tag)
        among = self._host_of(num_filled - 1) + 1

        def fetch() -> None:
            crossing = self.board.crossing
            assert crossing is not None
            rows = self._rows[buffer, _slice(here), :length].contiguous()
            for host, payload in enumerate(crossing.exchange(rows.numpy().tobytes(), among)):
                if host != self._host:
                    found = torch.frombuffer(bytearray(payload), dtype=torch.float64)
                    shares = _slice(self._spec.shares_of(self._ranks[host]))
                    self._rows[buffer, shares, :length] = found.view(-1, length)

        if among > 1:
            self.board.relay(tag, fetch)

    def _host_of(self, share: int) -> int:
        rank = self._rank_of(share)
        return next(host for host, ranks in enumerate(self._ranks) if rank in ranks)

    # --- gradients -------------------------------------------------------------------------------

    def reduce(self, pieces: Sequence[Piece], num_filled: int) -> list[torch.Tensor | None]:
        return self._sums.reduce(pieces, self.board.barrier_here)

    def spread(self, tensors: Mapping[int, torch.Tensor], *, all_pieces: bool) -> None:
        self._sums.spread(tensors, all_pieces=all_pieces)

    def gather_sums(self, pieces: Sequence[Piece], sums: Sequence[torch.Tensor | None]) -> None:
        self._sums.gather(pieces, sums)
        self.barrier()

    def summed(self, parameter: int, num_filled: int) -> torch.Tensor | None:
        rows = self._gradients
        return rows.base(parameter) if rows.is_used(parameter) else None

    def end_step(self) -> None:
        # Other hosts' pieces have come; who has sent them need not be waited for.
        self.board.barrier_here()


def _slice(indices: range) -> slice:
    return slice(indices.start, indices.stop)
