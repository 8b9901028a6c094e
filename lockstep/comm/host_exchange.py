"""The exchange of several hosts: within a host through shared memory, between them over wires.

Every host sums the gradients of its own shares, in their order. Each piece of a parameter is
updated by one rank of one host: all other hosts send it their sums of that piece, and it adds them
up in the order of the hosts. After the update it sends the piece to all other hosts. So per step
a host of n sends, and receives, 2 (n - 1) / n of the parameters' bytes; that is the least for
gradients that are summed, and every wire carries its part at once.

Of weights whose factors are exchanged (``comm.gradient_rows``) no host sends a gradient at all. The
factors of all shares come to every host, which forms the whole gradient and updates the whole
weight. All hosts multiply blocks of the same sizes, and come to the same bits.

What ranks must know of other hosts' shares (losses, what they have put up, rows that they offer)
the leaders exchange, and write where shares of this host have theirs.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch

from lockstep.comm.exchange import ShareTotals, cut_piece
from lockstep.comm.gradient_rows import GradientRows
from lockstep.comm.shared_exchange import ExchangeSpec, SharedMemoryExchange
from lockstep.comm.shared_memory import SharedRegion
from lockstep.comm.wide_board import WideBoard
from lockstep.comm.wires import Wire, Wires, wire_end
from lockstep.plan.layout import Piece

_Tensors = dict[Wire, list[torch.Tensor]]


class HostExchange(SharedMemoryExchange):
    """One rank's end of the exchange between hosts.

    Args:
        spec: the layout.
        region: this host's.
        board: this host's, in the region.
        hosts: the number of ranks of each host.
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
        hosts: Sequence[int],
        host: int,
        wires: Wires,
        mirrored: Sequence[torch.Tensor] = (),
    ) -> None:
        super().__init__(spec, region, board=board, ranks=board.ranks_here)
        self._hosts = hosts
        self._host = host
        self._wires = wires
        self._mirrored = mirrored
        self._ranks = [
            range(sum(hosts[:each]), sum(hosts[: each + 1])) for each in range(len(hosts))
        ]
        self._own_rank = board.rank - self._ranks[host].start  # on this host
        self._pieces: Sequence[Sequence[Piece]] = [[] for _ in range(spec.num_ranks)]

    def divide(self, pieces: Sequence[Sequence[Piece]]) -> None:
        """From now on each rank of all hosts updates these pieces."""
        self._pieces = pieces

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
        rows = self._gradients
        with torch.no_grad():
            sends, receives, partials = self._partial_sums(pieces)
            self._add_factors(sends, receives)
            self._wires.transfer(sends, receives)
            self.board.barrier_here()  # the factors that other ranks have received
            results = [
                self._total(piece, partials.get(index, {})) for index, piece in enumerate(pieces)
            ]
            rows.add_products(pieces, results)
        return results

    def _partial_sums(
        self, pieces: Sequence[Piece]
    ) -> tuple[_Tensors, _Tensors, dict[int, dict[int, torch.Tensor]]]:
        """What to send and receive of gradients; and by piece and host, the sums of that host.

        Sums are formed in place, but for those of a weight that all hosts update: others may form
        the same at this moment.
        """
        rows = self._gradients
        rows.sum_rows([piece for piece in pieces if not self._is_everywhere(piece)])
        sends: _Tensors = defaultdict(list)
        receives: _Tensors = defaultdict(list)
        partials: dict[int, dict[int, torch.Tensor]] = defaultdict(dict)
        for wire in self._wires:
            theirs = self._pieces_at(wire)
            given = [piece for piece in theirs if self._hands_in(self._host, piece)]
            rows.sum_rows([piece for piece in given if not self._is_everywhere(piece)])
            for piece in given:
                apart = self._is_everywhere(piece)
                sends[wire].append(rows.sum_apart(piece) if apart else rows.target(piece))
        for index, piece in enumerate(pieces):
            if self._hands_in(self._host, piece):
                apart = self._is_everywhere(piece)
                partials[index][self._host] = rows.sum_apart(piece) if apart else rows.target(piece)
            for host in self._others():
                if self._hands_in(host, piece):
                    buffer = torch.empty_like(rows.target(piece))
                    partials[index][host] = buffer
                    receives[host, self._own_rank].append(buffer)
        return sends, receives, partials

    def _total(self, piece: Piece, partials: dict[int, torch.Tensor]) -> torch.Tensor | None:
        """The sum of all hosts' sums of a piece, in the order of the hosts."""
        rows = self._gradients
        if not rows.is_used(piece.parameter):
            return None
        if not partials:
            return rows.target(piece)  # products alone come to lie there
        in_order = [partials[host] for host in sorted(partials)]
        total = in_order[0]
        for partial in in_order[1:]:
            # a + b has the bits of b + a: so the sum can stay where this host's own is.
            if partial is partials.get(self._host):
                partial += total
                total = partial
            else:
                total += partial
        return total

    def _hands_in(self, host: int, piece: Piece) -> bool:
        """Whether shares of a host have put up a gradient of a piece."""
        rows = self._spec.rows_of(self._ranks[host])
        return bool(self._gradients.gradient_rows(piece.parameter, rows))

    def _is_everywhere(self, piece: Piece) -> bool:
        """Whether every host updates all of the piece's parameter."""
        return self._spec.gradients.row_limits[piece.parameter] > 0

    def _add_factors(self, sends: _Tensors, receives: _Tensors) -> None:
        """Have the factors that this host's shares have put up go to all hosts, and come from them.

        A rank's own go over the wire with its number, to whoever has the other end.
        """
        rows: GradientRows = self._gradients
        for host, number in self._wires:
            wire = host, number
            if number == self._own_rank:
                own = self._spec.rows_of(_one(self.board.rank))
                sends[wire] += [each for pair in rows.factors_put_up(own) for each in pair]
            if number < self._hosts[host]:
                theirs = self._spec.rows_of(_one(self._ranks[host].start + number))
                rows.make_room(theirs)
                receives[wire] += [each for pair in rows.factors_put_up(theirs) for each in pair]

    # --- after the update ------------------------------------------------------------------------

    def spread(self, tensors: Mapping[int, torch.Tensor], *, all_pieces: bool) -> None:
        def pieces_of(rank: int) -> Iterable[torch.Tensor]:
            for piece in self._pieces[rank]:
                is_changed = all_pieces or self._gradients.is_used(piece.parameter)
                if piece.parameter in tensors and is_changed and not self._is_everywhere(piece):
                    yield cut_piece(tensors[piece.parameter], piece)

        sends = {
            (host, number): list(pieces_of(self.board.rank))
            for host, number in self._wires
            if number == self._own_rank
        }
        receives = {
            (host, number): list(pieces_of(self._ranks[host].start + number))
            for host, number in self._wires
            if number < self._hosts[host]
        }
        self._wires.transfer(sends, receives)

    @torch.no_grad()
    def gather_sums(self, pieces: Sequence[Piece], sums: Sequence[torch.Tensor | None]) -> None:
        rows = self._gradients
        used = [
            number for number in range(len(self._spec.gradients.tensors)) if rows.is_used(number)
        ]
        wholes = {number: rows.base(number) for number in used}
        for piece, total in zip(pieces, sums, strict=True):
            if total is not None:
                cut_piece(wholes[piece.parameter], piece).copy_(total)
        self.spread(wholes, all_pieces=True)
        self.barrier()

    def summed(self, parameter: int, num_filled: int) -> torch.Tensor | None:
        rows = self._gradients
        return rows.base(parameter) if rows.is_used(parameter) else None

    def end_step(self) -> None:
        # Other hosts' pieces have come; who has sent them need not be waited for.
        self.board.barrier_here()

    # --- who has what ----------------------------------------------------------------------------

    def _others(self) -> Iterable[int]:
        return (host for host in range(len(self._hosts)) if host != self._host)

    def _pieces_at(self, wire: Wire) -> Sequence[Piece]:
        """The pieces that the rank at the other end of a wire updates, if it is its first."""
        host, number = wire
        return self._pieces[self._ranks[host].start + number] if number < self._hosts[host] else ()


def wires_of(hosts: Sequence[int], rank: int, wires: Iterable[Wire]) -> list[Wire]:
    """Those of a host's wires that one of its ranks has; ``rank`` counts from 0 on that host.

    Args:
        hosts: the number of ranks of each host.
        rank: on its host.
        wires: of the host.
    """
    return [(host, number) for host, number in wires if wire_end(hosts, host, number) == rank]


def _slice(indices: range) -> slice:
    return slice(indices.start, indices.stop)


def _one(rank: int) -> range:
    return range(rank, rank + 1)
