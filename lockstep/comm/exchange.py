"""The exchange: where the shares' gradients and losses of one step meet.

One small interface, so that a faster way to move gradients replaces a class and nothing else.

- ``LocalExchange``: one replica and one share; gradients stay where autograd left them.
- ``SharedMemoryExchange``: every share has a row of gradients in memory that all ranks of the host
  map. A rank sums the pieces it owns over all rows, always in the order of the shares, so the sum
  does not depend on who computed which share, or when.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lockstep.comm.board import LINE_BYTES, Board
from lockstep.comm.shared_memory import SharedRegion
from lockstep.errors import ModelError, problem
from lockstep.plan.layout import Extent, Piece, align, flat_offsets
from lockstep.plan.shares import replica_of_share

Gradients = Sequence[torch.Tensor | None]


@dataclass(frozen=True)
class TensorSpec:
    """A dense tensor without its values."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def extent(self) -> Extent:
        """Its size."""
        return Extent(
            num_elements=torch.Size(self.shape).numel(), element_bytes=self.dtype.itemsize
        )


@dataclass(frozen=True)
class ShareTotals:
    """Loss of every filled share: sums over its samples and the weights of these sums."""

    totals: list[float]
    weights: list[float]


class Exchange(ABC):
    """One rank's end of the exchange. Some methods wait for other ranks."""

    board: Board | None = None

    @abstractmethod
    def put(self, share: int, gradients: Gradients, total: float, weight: float) -> None:
        """Hand in a share's gradients, one per parameter, None where it was not used."""

    @abstractmethod
    def collect(self, num_filled: int) -> ShareTotals:
        """Wait until the first ``num_filled`` shares are in; returns their losses."""

    @abstractmethod
    def reduce(self, piece: Piece, num_filled: int) -> torch.Tensor | None:
        """Sum a piece over the shares that used its parameter; None if none did.

        The result is flat, or of the parameter's shape where the piece is the whole parameter.
        """

    @abstractmethod
    def summed(self, parameter: int, num_filled: int) -> torch.Tensor | None:
        """A parameter's whole gradient after every rank has reduced its pieces."""

    @abstractmethod
    def is_any_used(self) -> bool:
        """Whether any share used any parameter, as ``collect`` has found."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks."""

    @abstractmethod
    def begin_pass(self) -> None:
        """Every rank begins its next pass over a batch, with shares of it or without."""

    @abstractmethod
    def offer(self, share: int, row: torch.Tensor, *, last: bool) -> None:
        """Put up a share's row (float64); ``last`` says that this rank has no more shares of it.

        Only filled shares offer rows, all of them the same number of times in a pass.
        """

    @abstractmethod
    def offered(self, share: int, length: int, num_filled: int) -> torch.Tensor:
        """The rows that all filled shares have offered, shape (num_filled, length), by share.

        ``share`` is the one that asks; it has offered its own.
        """


class LocalExchange(Exchange):
    """One replica, one share: nothing moves."""

    def __init__(self) -> None:
        self._gradients: Gradients = ()
        self._totals = ShareTotals([], [])
        self._row = torch.empty(0)

    def put(self, share: int, gradients: Gradients, total: float, weight: float) -> None:
        self._gradients = gradients
        self._totals = ShareTotals([total], [weight])

    def collect(self, num_filled: int) -> ShareTotals:
        return self._totals

    def reduce(self, piece: Piece, num_filled: int) -> torch.Tensor | None:
        return self._gradients[piece.parameter]

    def summed(self, parameter: int, num_filled: int) -> torch.Tensor | None:
        return self._gradients[parameter]

    def is_any_used(self) -> bool:
        return any(gradient is not None for gradient in self._gradients)

    def barrier(self) -> None:
        return

    def begin_pass(self) -> None:
        return

    def offer(self, share: int, row: torch.Tensor, *, last: bool) -> None:
        self._row = row

    def offered(self, share: int, length: int, num_filled: int) -> torch.Tensor:
        return self._row[None]


@dataclass(frozen=True, kw_only=True)
class ExchangeSpec:
    """The layout of a ``SharedMemoryExchange``: the same on every rank.

    The region holds, each part aligned: the board; (total, weight) per share; which parameters a
    share used; two buffers of rows to offer; a row of gradients per share.

    Attributes:
        num_ranks: ranks that map the region.
        num_shares: rows of gradients.
        tensors: the trainable parameters.
        row_capacity: longest row that a share may offer, in float64.
    """

    num_ranks: int
    num_shares: int
    tensors: tuple[TensorSpec, ...]
    row_capacity: int

    @property
    def extents(self) -> list[Extent]:
        """Sizes of the trainable parameters."""
        return [tensor.extent for tensor in self.tensors]

    def offsets(self) -> tuple[int, int, int, int, int]:
        """Byte offsets of losses, used flags, rows to gather, gradients; and the total size."""
        losses = align(self.num_ranks * LINE_BYTES)
        used = align(losses + self.num_shares * 2 * 8)
        rows = align(used + self.num_shares * max(len(self.tensors), 1))
        gradients = align(rows + 2 * self.num_shares * max(self.row_capacity, 1) * 8)
        _, row_bytes = flat_offsets(self.extents)
        return losses, used, rows, gradients, gradients + self.num_shares * row_bytes

    @property
    def num_bytes(self) -> int:
        """Shared memory needed."""
        return self.offsets()[-1]


class SharedMemoryExchange(Exchange):
    """Rows of gradients in memory that all ranks of a host map.

    Args:
        spec: the layout.
        region: shared memory of ``spec.num_bytes``, zero at first.
        rank: whose end this is.
        look_around: see ``Board``.
    """

    def __init__(
        self,
        spec: ExchangeSpec,
        region: SharedRegion,
        *,
        rank: int,
        look_around: Callable[[float], None],
    ) -> None:
        self._spec = spec
        self.board: Board = Board(
            region, rank=rank, num_ranks=spec.num_ranks, look_around=look_around
        )
        losses, used, rows, gradients, _ = spec.offsets()
        shares, tensors = spec.num_shares, max(len(spec.tensors), 1)
        self._losses = region.tensor(losses, torch.float64, (shares, 2), (2, 1))
        self._used = region.tensor(used, torch.uint8, (shares, tensors), (tensors, 1))
        capacity = max(spec.row_capacity, 1)
        self._rows = region.tensor(
            rows, torch.float64, (2, shares, capacity), (shares * capacity, capacity, 1)
        )
        offsets, row_bytes = flat_offsets(spec.extents)
        self._gradients = [
            [
                region.tensor(
                    gradients + share * row_bytes + offset,
                    tensor.dtype,
                    tensor.shape,
                    tensor.stride,
                )
                for offset, tensor in zip(offsets, spec.tensors, strict=True)
            ]
            for share in range(shares)
        ]
        self._users: list[list[int]] = []
        self._pass = 0
        self._offers = [0] * spec.num_shares

    def put(self, share: int, gradients: Gradients, total: float, weight: float) -> None:
        self._losses[share, 0] = total
        self._losses[share, 1] = weight
        rows = self._gradients[share]
        for index, (row, gradient) in enumerate(zip(rows, gradients, strict=True)):
            if gradient is not None:
                if gradient.is_sparse:
                    raise _sparse(self._spec.tensors[index].name)
                row.copy_(gradient)
        self._used[share] = torch.tensor(
            [gradient is not None for gradient in gradients] or [False], dtype=torch.uint8
        )

    def collect(self, num_filled: int) -> ShareTotals:
        self.barrier()
        totals, weights = self._losses[:num_filled].t().tolist()
        used = self._used[:num_filled].t().tolist()
        self._users = [[share for share, flag in enumerate(flags) if flag] for flags in used]
        return ShareTotals(totals, weights)

    def reduce(self, piece: Piece, num_filled: int) -> torch.Tensor | None:
        users = self._users[piece.parameter]
        if not users:
            return None
        pieces = [self._piece(share, piece) for share in users]
        for other in pieces[1:]:
            pieces[0].add_(other)
        return pieces[0]

    def summed(self, parameter: int, num_filled: int) -> torch.Tensor | None:
        users = self._users[parameter]
        return self._gradients[users[0]][parameter] if users else None

    def is_any_used(self) -> bool:
        return any(self._users)

    def barrier(self) -> None:
        self.board.barrier()

    def begin_pass(self) -> None:
        self._pass += 1
        self._offers = [0] * self._spec.num_shares

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
        for other in range(num_filled):
            self.board.wait_for(self._rank_of(other), self._tag(share))
        return self._rows[self._offers[share] & 1, :num_filled, :length].clone()

    def _tag(self, share: int) -> int:
        """Grows with every pass and, within it, with every row that a share offers."""
        assert self._offers[share] < 1 << 20
        return (self._pass << 20) | self._offers[share]

    def _rank_of(self, share: int) -> int:
        return replica_of_share(share, self._spec.num_ranks, self._spec.num_shares)

    def _piece(self, share: int, piece: Piece) -> torch.Tensor:
        return cut_piece(self._gradients[share][piece.parameter], piece)


def cut_piece(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """A piece of a dense tensor, flat in memory order; the tensor itself where it is whole."""
    if piece.start == 0 and piece.stop == tensor.numel():
        return tensor
    return tensor.as_strided(
        (piece.stop - piece.start,), (1,), tensor.storage_offset() + piece.start
    )


def _sparse(name: str) -> ModelError:
    return ModelError(
        problem(
            "Gradients must be dense.",
            received=f"a sparse gradient of {name!r}",
            fix="Make the embedding with sparse=False.",
        )
    )
