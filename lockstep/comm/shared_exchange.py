"""The exchange of one host: gradients, losses and rows meet in memory that all ranks map."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lockstep.comm.board import LINE_BYTES, Board
from lockstep.comm.exchange import Exchange, Gradients, ShareTotals
from lockstep.comm.gradient_rows import GradientRows, GradientSpec
from lockstep.comm.shared_memory import SharedRegion
from lockstep.errors import ModelError, problem
from lockstep.plan.layout import Piece, align
from lockstep.plan.shares import replica_of_share, shares_of_replica


@dataclass(frozen=True, kw_only=True)
class ExchangeSpec:
    """The layout of a ``SharedMemoryExchange``: the same on every rank.

    The region holds, each part aligned: the board; a line of losses per share; two buffers of rows
    to offer; the gradients. Every host has one; they are alike but for what has memory.

    Attributes:
        num_ranks: ranks of all hosts.
        num_shares: of a batch.
        shares_per_row: shares whose gradients are added up in one row.
        gradients: of the trainable parameters.
        row_capacity: longest row that a share may offer, in float64.
    """

    num_ranks: int
    num_shares: int
    shares_per_row: int
    gradients: GradientSpec
    row_capacity: int

    def offsets(self) -> tuple[int, int, int]:
        """Byte offsets of losses, rows to offer, gradients."""
        losses = align(self.num_ranks * LINE_BYTES)
        rows = align(losses + self.num_shares * 3 * 8)
        return losses, rows, align(rows + 2 * self.num_shares * max(self.row_capacity, 1) * 8)

    @property
    def num_bytes(self) -> int:
        """Size of the region."""
        return self.offsets()[-1] + self.gradients.num_bytes

    def shares_of(self, ranks: range) -> range:
        """The consecutive shares of consecutive ranks."""
        of = [
            shares_of_replica(rank, self.num_ranks, self.num_shares, self.shares_per_row)
            for rank in (ranks[0], ranks[-1])
        ]
        return range(of[0].start, of[-1].stop)

    def rows_of(self, ranks: range) -> range:
        """The rows of gradients of consecutive ranks."""
        shares = self.shares_of(ranks)
        return range(shares.start // self.shares_per_row, shares.stop // self.shares_per_row)

    def create(self, ranks: range | None = None) -> SharedRegion:
        """Make the region of the host with these ranks, by default all.

        Raises:
            DeviceError: the host has not that much memory to share.
        """
        start = self.offsets()[-1]
        here = self.rows_of(range(self.num_ranks) if ranks is None else ranks)
        holes = [(start + low, start + high) for low, high in self.gradients.holes(here)]
        return SharedRegion.create(self.num_bytes, holes)


class SharedMemoryExchange(Exchange):
    """Rows of gradients in memory that all ranks of a host map.

    Args:
        spec: the layout.
        region: what ``spec.create`` has made.
        board: the ranks' board, in the region.
        ranks: those of this host; None for all.
    """

    board: Board

    def __init__(
        self,
        spec: ExchangeSpec,
        region: SharedRegion,
        *,
        board: Board,
        ranks: range | None = None,
    ) -> None:
        self._spec = spec
        self.board = board
        losses, rows, gradients = spec.offsets()
        shares, capacity = spec.num_shares, max(spec.row_capacity, 1)
        self._losses = region.tensor(losses, torch.float64, (shares, 3), (3, 1)).numpy()
        self._rows = region.tensor(
            rows, torch.float64, (2, shares, capacity), (shares * capacity, capacity, 1)
        )
        here = None if ranks is None else spec.rows_of(ranks)
        self._gradients = GradientRows(spec.gradients, region, gradients, here)
        self._pass = 0
        self._offers = [0] * spec.num_shares

    def put(
        self,
        share: int,
        gradients: Gradients,
        total: float,
        weight: float,
        is_refused: bool = False,
    ) -> None:
        self._losses[share] = total, weight, is_refused
        self._gradients.put(share // self._spec.shares_per_row, gradients)

    def put_product(
        self, share: int, parameter: int, inputs: torch.Tensor, output_gradients: torch.Tensor
    ) -> None:
        row = share // self._spec.shares_per_row
        self._gradients.put_product(row, parameter, inputs, output_gradients)

    def collect(self, num_filled: int) -> ShareTotals:
        self.barrier()
        return self._collected(num_filled)

    def _collected(self, num_filled: int) -> ShareTotals:
        """What all shares have put up."""
        totals, weights, refused = self._losses[:num_filled].T.tolist()
        self._gradients.collect(-(-num_filled // self._spec.shares_per_row))
        return ShareTotals(totals, weights, any(refused))

    def reduce(self, pieces: Sequence[Piece], num_filled: int) -> list[torch.Tensor | None]:
        return self._gradients.reduce(pieces)

    def summed(self, parameter: int, num_filled: int) -> torch.Tensor | None:
        return self._gradients.summed(parameter)

    def is_any_used(self) -> bool:
        return self._gradients.is_any_used()

    def barrier(self) -> None:
        self.board.barrier()

    def begin_pass(self) -> None:
        self._pass += 1
        self._offers = [0] * self._spec.num_shares
        self._gradients.begin_pass()

    def offer(self, share: int, row: torch.Tensor, *, last: bool) -> None:
        if len(row) > self._rows.shape[2]:
            raise ModelError(
                problem(
                    "A functional batch_norm has more channels than any BatchNorm layer.",
                    received=f"{(len(row) - 2) // 2} channels",
                    fix="Use a BatchNorm layer instead.",
                )
            )
        self._offers[share] += 1
        self._rows[self._offers[share] & 1, share, : len(row)].copy_(row)
        if last:
            self.board.post(self._tag(share))

    def offered(self, share: int, length: int, num_filled: int) -> torch.Tensor:
        self._await_offers(share, length, num_filled)
        return self._rows[self._offers[share] & 1, :num_filled, :length].clone()

    def _await_offers(self, share: int, length: int, num_filled: int) -> None:
        """Wait until all filled shares have offered as many rows as ``share``."""
        for other in range(num_filled):
            self.board.wait_for(self._rank_of(other), self._tag(share))

    def _tag(self, share: int) -> int:
        """Grows with every pass and, within it, with every row that a share offers."""
        assert self._offers[share] < 1 << 20
        return (self._pass << 20) | self._offers[share]

    def _rank_of(self, share: int) -> int:
        spec = self._spec
        return replica_of_share(share, spec.num_ranks, spec.num_shares, spec.shares_per_row)
