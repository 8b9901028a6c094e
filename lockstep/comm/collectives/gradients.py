"""The gradients of a group of parameters, on their way from passes to the update.

A group's parameters are held by the same ranks. Passes write their gradients, each rank gets the
sum of the pieces that it updates (reduce-scatter), and the updated pieces are brought to all ranks
(all-gather). The implementations:

- ``OwnGradients``: one rank alone has the group; gradients stay where autograd left them.
- ``SharedGradientBuffer`` (``comm.collectives.shm_gradient_buffer``): the ranks of a host exchange
  in shared memory.
- ``ReduceScatter`` (``comm.collectives.reduce_scatter``): ranks that share no memory send each
  other sums; its subclass ``OverlappedReduce`` (``comm.collectives.overlapped_reduce``) does so
  while backward runs, and ``ShardedReduce`` (``comm.collectives.sharded_reduce``) also keeps only
  this rank's part.
- ``CompressedSums`` (``comm.compression.compressed_sums``): the sums are compressed, and not exact.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from lockstep import accelerators
from lockstep.plan.layout import Extent, Piece, flat_offsets
from lockstep.plan.program.sum_tree import additions

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


def views_in(buffer: torch.Tensor, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
    """Tensors one after the other in a buffer of bytes."""
    extents = [spec.extent for spec in specs]
    return [
        buffer[start : start + extent.num_bytes]
        .view(spec.dtype)
        .as_strided(spec.shape, spec.stride)
        for spec, extent, start in zip(specs, extents, flat_offsets(extents)[0], strict=True)
    ]


class GroupGradients(ABC):
    """One rank's end. Parameters are numbered within the group.

    Attributes:
        factor: the sums of the next ``reduce_scatter`` are multiplied by it afterwards.
    """

    factor = 1.0

    @abstractmethod
    def begin_pass(self) -> None:
        """A new batch: nothing has been put yet."""

    @abstractmethod
    def write(self, row: int, gradients: Gradients) -> None:
        """Add gradients to a row of this rank.

        Args:
            row: one of this rank's.
            gradients: one per parameter; None where there is none, or no more.
        """

    @abstractmethod
    def write_product(
        self, row: int, parameter: int, inputs: torch.Tensor, output_gradients: torch.Tensor
    ) -> None:
        """Add ``output_gradients.T @ inputs`` to a row's gradient of a weight, before ``write``.

        Args:
            row: one of this rank's.
            parameter: the weight, of shape (outs, ins).
            inputs: shape (n, ins).
            output_gradients: shape (n, outs).
        """

    def bound(self) -> float:
        """At least the norm of all that this rank has put, each row by itself; infinite if unknown.

        By the triangle inequality no element of the sum over all ranks is larger than the sum of
        their bounds.
        """
        return math.inf

    def expect(self, num_rows: int) -> None:
        """A step begins in which the first ``num_rows`` rows will be filled, if it ``is_early``."""
        return

    @property
    def is_early(self) -> bool:
        """Whether to put gradients by ``arrive``, each as soon as it is complete."""
        return False

    takes_all = False
    """Whether ``arrive`` is for the gradients of all shares, not only of this rank's last one."""

    def arrive(
        self, row: int, parameter: int, gradient: torch.Tensor | None, *, is_last: bool
    ) -> None:
        """Add a gradient to a row.

        Args:
            row: one of this rank's.
            parameter: whose gradient.
            gradient: None if it was put before.
            is_last: no other follows of this parameter from this rank.
        """
        raise NotImplementedError

    def hand_over(self, num_rows: int) -> None:
        """This rank has put what it has; the first ``num_rows`` rows count."""
        return

    @abstractmethod
    def collect(self, num_rows: int) -> None:
        """All ranks have put what they have; the first ``num_rows`` rows count."""

    @abstractmethod
    def reduce_scatter(self, pieces: Sequence[Piece]) -> list[torch.Tensor | None]:
        """Sum each piece over the rows that used its parameter; None if none did.

        The results are flat, or of the parameter's shape where the piece is the whole parameter.
        """

    @abstractmethod
    def summed(self, parameter: int) -> torch.Tensor | None:
        """A parameter's whole gradient, after all ranks have reduced and gathered."""

    def places(self, row: int) -> Sequence[torch.Tensor] | None:
        """Memory in which to form a row's gradients, to be put without a copy; None if none."""
        return None

    def open_places(self, parameters: Iterable[int]) -> None:
        """Have memory for what is formed in ``places`` of these parameters."""
        return

    def commit(self) -> None:
        """The sums of the last ``reduce_scatter`` are used, and not thrown away."""
        return

    def free(self) -> None:
        """Free what is kept of sums until the next step."""
        return

    def weigh(self, factors: Sequence[float] | None) -> None:
        """Before ``reduce_scatter``: set the factor of each row; None for no factors."""
        assert factors is None, "a rank alone has nothing to weigh its gradients against"

    def divide(self, pieces: Mapping[int, Sequence[Piece]]) -> None:
        """From now on each rank updates these pieces, by rank."""
        return

    def gather(self, pieces: Sequence[Piece], sums: Sequence[torch.Tensor | None]) -> None:
        """After ``reduce_scatter``: bring other hosts' pieces to ``summed``. All ranks call it."""
        return

    def all_gather(self, tensors: Mapping[int, torch.Tensor], *, all_pieces: bool) -> None:
        """Bring what each rank has updated to all other hosts.

        Args:
            tensors: parameters, or tensors of their sizes that are divided as they are, by number.
            all_pieces: also those of parameters that no row has used.
        """
        return


class OwnGradients(GroupGradients):
    """One rank alone: nothing moves. Gradients of several shares are added up as they come."""

    def __init__(self) -> None:
        self._gradients: list[torch.Tensor | None] = []

    def begin_pass(self) -> None:
        self._gradients = []

    def write(self, row: int, gradients: Gradients) -> None:
        before = self._gradients
        self._gradients = added(before, gradients) if before else list(gradients)

    def write_product(
        self, row: int, parameter: int, inputs: torch.Tensor, output_gradients: torch.Tensor
    ) -> None:
        raise NotImplementedError("one rank alone keeps the gradients that autograd makes")

    def bound(self) -> float:
        return sum(norms_on_host([one for one in self._gradients if one is not None]))

    def collect(self, num_rows: int) -> None:
        return

    def reduce_scatter(self, pieces: Sequence[Piece]) -> list[torch.Tensor | None]:
        return [self._gradients[piece.parameter] for piece in pieces]

    def summed(self, parameter: int) -> torch.Tensor | None:
        return self._gradients[parameter]


# A norm below 1e37 says that elements of these dtypes, and their sum, are finite.
_BOUND_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def norms_on_host(tensors: list[torch.Tensor]) -> list[float]:
    """The norms of tensors of one device; infinite if they are not plain ones in host memory."""
    is_known = not (tensors and accelerators.computes(tensors[0]))
    for one in tensors:
        is_known &= one.dtype in _BOUND_DTYPES and not (one.is_sparse or one.requires_grad)
    if not (tensors and is_known):
        return [math.inf] * len(tensors)
    return list(map(float, torch._foreach_norm(tensors)))


def added(sums: list[torch.Tensor | None], gradients: Gradients) -> list[torch.Tensor | None]:
    """The sums with further gradients added in place; the first gradient becomes the sum."""
    both = [
        (own, more)
        for own, more in zip(sums, gradients, strict=True)
        if own is not None and more is not None
    ]
    if both:
        torch._foreach_add_([own for own, _ in both], [more for _, more in both])
    return [more if own is None else own for own, more in zip(sums, gradients, strict=True)]


# For each level of the trees: sums, and what is added to them.
Levels = list[tuple[list[torch.Tensor], list[torch.Tensor]]]


def add_up(summands: Sequence[Mapping[int, torch.Tensor]]) -> list[torch.Tensor]:
    """Sums of some rows each, or of subtrees by their first rows; formed in place, in the first."""
    add_levels(levels_of(summands))
    return [each[min(each)] for each in summands]


def add_levels(levels: Levels) -> None:
    """Make the additions."""
    for sums, sources in levels:  # a call per level, and not per tensor
        torch._foreach_add_(sums, sources)


def levels_of(summands: Sequence[Mapping[int, torch.Tensor]]) -> Levels:
    """The additions of ``add_up``."""
    levels: Levels = []
    for each in summands:
        rows = tuple(sorted(each))
        for number, level in enumerate(additions(rows)):
            if number == len(levels):
                levels.append(([], []))
            for into, source in level:
                levels[number][0].append(each[rows[into]])
                levels[number][1].append(each[rows[source]])
    return levels


def cut_piece(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """A piece of a dense tensor, flat in memory order; the tensor itself where it is whole."""
    if piece.start == 0 and piece.stop == tensor.numel():
        return tensor
    return tensor.as_strided(
        (piece.stop - piece.start,), (1,), tensor.storage_offset() + piece.start
    )
