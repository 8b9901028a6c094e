"""The exchange of ranks on several hosts.

Ranks of a host exchange in shared memory; gradients of several hosts are summed by
``comm.collectives.reduce_scatter``. The leaders exchange the other data (losses, tables of
gradients, rows that shares offer) and write them into the shared memory of their hosts.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lockstep.comm.collectives.cross_host_barrier import MultiHostBoard
from lockstep.comm.collectives.reduce_scatter import members_by_domain
from lockstep.comm.exchange import Exchange
from lockstep.comm.exchange_spec import ExchangeSpec
from lockstep.comm.shared_memory.shared_region import SharedRegion

# Part of what ranks share, and the lines of it that a host's ranks write.
_Lines = tuple[Any, Sequence[int]]


class HostExchange(Exchange):
    """One rank's end.

    Args:
        spec: the layout.
        region: this host's.
        board: this host's, in the region.
        hosts: the ranks of each host.
        host: this host.
        mirrored: tensors in shared memory whose values on host 0 all hosts get in every step.
        options: see ``Exchange``.
    """

    board: MultiHostBoard

    def __init__(
        self,
        spec: ExchangeSpec,
        region: SharedRegion,
        *,
        board: MultiHostBoard,
        hosts: Sequence[range],
        host: int,
        mirrored: Sequence[torch.Tensor],
        **options: Any,
    ) -> None:
        super().__init__(
            spec, region, board=board, rank=board.rank, ranks_here=hosts[host], **options
        )
        self._hosts = hosts
        self._host = host
        self._mirrored = mirrored
        # Groups on several hosts, by number: the ranks of each host that hold it.
        self._multi_host_groups = {
            number: members
            for number, group in enumerate(spec.groups)
            if len(members := members_by_domain(group.ranks, hosts)) > 1
        }

    # --- exchanged by leaders --------------------------------------------------------------------

    def _meet(self) -> None:
        self.board.meet(self._host_values, self._store_host_values)

    def _host_values(self) -> bytes:
        """The values of this host's ranks, and the mirrored tensors of host 0."""
        return b"".join(part[list(lines)].tobytes() for part, lines in self._lines_of(self._host))

    def _store_host_values(self, payloads: list[bytes]) -> None:
        for host, payload in enumerate(payloads):
            rest = memoryview(payload)
            for part, lines in self._lines_of(host) if host != self._host else ():
                shape = (len(lines), *part.shape[1:])
                num_bytes = int(np.prod(shape)) * part.itemsize
                part[list(lines)] = np.frombuffer(rest[:num_bytes], part.dtype).reshape(shape)
                rest = rest[num_bytes:]

    def _lines_of(self, host: int) -> list[_Lines]:
        """The lines that a host sends, in the same order on all hosts."""
        ranks = self._hosts[host]
        lines: list[_Lines] = [(self._losses, self._spec.shares_of(ranks)), (self._bounds, ranks)]
        if host == 0:
            flat = (one.view(-1).numpy() for one in self._mirrored)
            lines += [(one, range(len(one))) for one in flat]
        for number in self._multi_host_groups:
            group = self._spec.groups[number]
            lines.append((self._table(number), group.rows_of(ranks)))
        return lines

    def _table(self, number: int) -> Any:
        """A group's table; an unused one if this host does not hold the group."""
        rows = self._gradient_rows.get(number)
        spec = self._spec.groups[number].gradients
        return np.zeros(spec.table_shape, np.int64) if rows is None else rows.table

    def _await_offers(self, share: int, length: int, num_filled: int) -> None:
        ranks = self._offering_ranks(num_filled)
        tag, buffer = self._tag(share), self._offers[share] & 1
        self._await_ranks([rank for rank in ranks if rank in self.ranks_here], tag)
        hosts = self._offering_hosts(num_filled)
        among = max(hosts) + 1

        def fetch() -> None:
            crossing = self.board.crossing
            assert crossing is not None
            own = self._spec.shares_of(self.ranks_here)
            payload = self._rows[buffer, own, :length].contiguous().numpy().tobytes()
            for host, received in enumerate(crossing.exchange(payload, among)):
                if host != self._host and received:
                    found = torch.frombuffer(bytearray(received), dtype=torch.float64)
                    shares = self._spec.shares_of(self._hosts[host])
                    self._rows[buffer, shares, :length] = found.view(-1, length)

        if hosts != {self._host}:
            self.board.relay(tag, fetch)

    def relays(self, num_filled: int) -> bool:
        hosts = self._offering_hosts(num_filled)
        is_among = len(hosts) > 1 and self._host <= max(hosts)
        return is_among and self.board.crossing is not None

    def _offering_hosts(self, num_filled: int) -> set[int]:
        """The hosts of the filled shares."""
        ranks = set(self._spec.share_ranks[:num_filled])
        return {host for host, each in enumerate(self._hosts) if not ranks.isdisjoint(each)}
