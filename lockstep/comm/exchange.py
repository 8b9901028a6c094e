"""The exchange: where the shares' gradients and losses of one step meet.

One small interface, so that a faster way to move gradients replaces a class and nothing else.

- ``LocalExchange``: one replica; gradients stay where autograd left them.
- ``SharedMemoryExchange`` (``comm.shared_exchange``): shares meet in memory that all ranks of the
  host map.
- ``HostExchange`` (``comm.host_exchange``): so they do on each of several hosts, whose sums meet
  over the network.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from lockstep.comm.board import Board
from lockstep.plan.layout import Extent, Piece

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
    """Loss of every filled share: sums over its samples and the weights of these sums.

    Attributes:
        totals: the sums.
        weights: their weights.
        is_refused: some share could not be computed in the Plan's memory format.
    """

    totals: list[float]
    weights: list[float]
    is_refused: bool = False


class Exchange(ABC):
    """One rank's end of the exchange. Some methods wait for other ranks."""

    board: Board | None = None

    @abstractmethod
    def put(
        self,
        share: int,
        gradients: Gradients,
        total: float,
        weight: float,
        is_refused: bool = False,
    ) -> None:
        """Hand in what a share has come to.

        Args:
            share: one of this rank's.
            gradients: one per parameter; None where there is none, or no more.
            total: weighted sum of the losses of its samples.
            weight: the sum of their weights.
            is_refused: see ``ShareTotals``.
        """

    @abstractmethod
    def put_product(
        self, share: int, parameter: int, inputs: torch.Tensor, output_gradients: torch.Tensor
    ) -> None:
        """Add ``output_gradients.T @ inputs`` to a share's gradient of a weight, before ``put``.

        Args:
            share: one of this rank's.
            parameter: the weight, of shape (outs, ins).
            inputs: shape (n, ins).
            output_gradients: shape (n, outs).
        """

    @abstractmethod
    def collect(self, num_filled: int) -> ShareTotals:
        """Wait until the first ``num_filled`` shares are in; returns their losses."""

    @abstractmethod
    def reduce(self, pieces: Sequence[Piece], num_filled: int) -> list[torch.Tensor | None]:
        """Sum each piece over the shares that used its parameter; None if none did.

        The results are flat, or of the parameter's shape where the piece is the whole parameter.
        """

    @abstractmethod
    def summed(self, parameter: int, num_filled: int) -> torch.Tensor | None:
        """A parameter's whole gradient after every rank has reduced its pieces."""

    def divide(self, pieces: Sequence[Sequence[Piece]]) -> None:
        """From now on each rank updates these pieces, by rank."""
        return

    def spread(self, tensors: Mapping[int, torch.Tensor], *, all_pieces: bool) -> None:
        """Bring what each rank has updated to all other hosts.

        Args:
            tensors: trainable parameters, or tensors of their sizes that are divided as they are,
                by the parameter's number.
            all_pieces: also those of parameters that no share has used.
        """
        return

    @abstractmethod
    def is_any_used(self) -> bool:
        """Whether any share used any parameter, as ``collect`` has found."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks."""

    def gather_sums(self, pieces: Sequence[Piece], sums: Sequence[torch.Tensor | None]) -> None:
        """Have ``summed`` know of the pieces of other hosts; every rank calls it with its own."""
        return

    def end_step(self) -> None:
        """Wait until all that this step has updated is there."""
        self.barrier()

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
    """One replica: nothing moves. Gradients of several shares are added up as they come."""

    def __init__(self) -> None:
        self._gradients: list[torch.Tensor | None] = []
        self._totals = ShareTotals([], [])
        self._rows: dict[int, list[torch.Tensor]] = {}  # by share: all that it has offered

    def put(
        self,
        share: int,
        gradients: Gradients,
        total: float,
        weight: float,
        is_refused: bool = False,
    ) -> None:
        self._gradients = _added(self._gradients, gradients) if share else list(gradients)
        totals = self._totals if share else ShareTotals([], [])
        self._totals = ShareTotals(
            [*totals.totals, total], [*totals.weights, weight], totals.is_refused or is_refused
        )

    def put_product(
        self, share: int, parameter: int, inputs: torch.Tensor, output_gradients: torch.Tensor
    ) -> None:
        raise NotImplementedError("one replica alone keeps the gradients that autograd makes")

    def collect(self, num_filled: int) -> ShareTotals:
        return self._totals

    def reduce(self, pieces: Sequence[Piece], num_filled: int) -> list[torch.Tensor | None]:
        return [self._gradients[piece.parameter] for piece in pieces]

    def summed(self, parameter: int, num_filled: int) -> torch.Tensor | None:
        return self._gradients[parameter]

    def is_any_used(self) -> bool:
        return any(gradient is not None for gradient in self._gradients)

    def barrier(self) -> None:
        return

    def begin_pass(self) -> None:
        self._gradients = []
        self._rows = {}

    def offer(self, share: int, row: torch.Tensor, *, last: bool) -> None:
        self._rows.setdefault(share, []).append(row)

    def offered(self, share: int, length: int, num_filled: int) -> torch.Tensor:
        turn = len(self._rows[share]) - 1  # a share that has gone on may have offered another
        return torch.stack([self._rows[other][turn] for other in range(num_filled)])


def _added(sums: list[torch.Tensor | None], gradients: Gradients) -> list[torch.Tensor | None]:
    """The sums with further gradients added in place; what was not used before is taken over."""
    both = [
        (own, more)
        for own, more in zip(sums, gradients, strict=True)
        if own is not None and more is not None
    ]
    if both:
        torch._foreach_add_([own for own, _ in both], [more for _, more in both])
    return [more if own is None else own for own, more in zip(sums, gradients, strict=True)]


def cut_piece(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """A piece of a dense tensor, flat in memory order; the tensor itself where it is whole."""
    if piece.start == 0 and piece.stop == tensor.numel():
        return tensor
    return tensor.as_strided(
        (piece.stop - piece.start,), (1,), tensor.storage_offset() + piece.start
    )
