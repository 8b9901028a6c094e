"""The second copy of what a parameter server updates: to undo an update that it has left half made.

It lies in shared memory, which outlives every process but the script's. A server brings it up to
date after each update, so at any moment one of the two is whole: while the first changes the second
is that before the update, and while the second changes the first is that after it.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import torch

from lockstep.comm.collectives.gradients import TensorSpec, cut_piece
from lockstep.comm.shared_memory.shared_region import SharedRegion
from lockstep.errors import WorkerError
from lockstep.parallel.owned_group import OwnedGroup
from lockstep.parallel.storage.store import tensor_spec
from lockstep.parallel.update import Updater
from lockstep.plan.layout import Piece, align

Named = Sequence[tuple[str, torch.Tensor]]


def copied_bytes(specs: Sequence[TensorSpec]) -> int:
    """Room for the second copies of tensors."""
    return sum(align(_num_bytes(spec)) for spec in specs)


def _num_bytes(spec: TensorSpec) -> int:
    return spec.extent.num_elements * spec.extent.element_bytes


@dataclass(frozen=True)
class _Pair:
    """A part of a parameter or slot, row by row where it is of an embedding, and its copy."""

    name: str
    tensor: torch.Tensor
    copy: torch.Tensor


class SecondCopy:
    """Of the pieces of one server; the pairs are by the parameter's number in its group."""

    def __init__(self, pairs: Mapping[int, Sequence[_Pair]]) -> None:
        self._pairs = pairs

    @classmethod
    def each(
        cls,
        group: OwnedGroup,
        updater: Updater,
        served: Sequence[Sequence[Piece]],
        region: SharedRegion,
        offset: int,
    ) -> list[Self]:
        """Those of all servers.

        Args:
            group: the parameters.
            updater: knows the slots in shared memory.
            served: the pieces of each server.
            region: where the copies lie, and
            offset: where they begin there.
        """
        wholes: Named = [*zip(group.names, group.members, strict=True), *_slots(group, updater)]
        specs = [tensor_spec(name, tensor) for name, tensor in wholes]
        starts = accumulate((align(_num_bytes(spec)) for spec in specs), initial=offset)
        named: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
        for (name, tensor), spec, start in zip(wholes, specs, starts, strict=False):
            view = region.tensor(start, spec.dtype, spec.shape, spec.stride)
            named[name].append((tensor.detach(), view))
        return [
            cls({piece.parameter: list(_cut(group, piece, named)) for piece in pieces})
            for pieces in served
        ]

    @torch.no_grad()
    def take(self) -> None:
        """Copy all."""
        for pair in self._all():
            pair.copy.copy_(pair.tensor)

    @torch.no_grad()
    def follow(self, gradients: Mapping[int, torch.Tensor | None]) -> None:
        """Copy what an update has changed, which had these gradients.

        Without a gradient a weight stays, but its average moves.
        """
        for number, gradient in gradients.items():
            if gradient is not None and gradient.is_sparse:
                rows = gradient.coalesce().indices()[0]
                for pair in self._pairs[number]:
                    pair.copy[rows] = pair.tensor[rows]
            else:
                for pair in self._pairs[number]:
                    pair.copy.copy_(pair.tensor)

    @torch.no_grad()
    def restore(self) -> None:
        """Undo an update."""
        for pair in self._all():
            pair.tensor.copy_(pair.copy)

    def check(self, server: int) -> None:
        """See that both are the same to the last bit.

        Raises:
            WorkerError: they are not.
        """
        differing = sorted({pair.name for pair in self._all() if not _are_equal(pair)})
        if differing:
            raise WorkerError(
                f"The two copies of what server {server} updates differ, in "
                f"{', '.join(differing)}: something else has written to its memory. Load weights "
                "that were saved before."
            )

    def _all(self) -> Iterator[_Pair]:
        for pairs in self._pairs.values():
            yield from pairs


def _slots(group: OwnedGroup, updater: Updater) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, slot) for name, slot in updater.stored() if name in group.names)


def _cut(
    group: OwnedGroup,
    piece: Piece,
    named: Mapping[str, Sequence[tuple[torch.Tensor, torch.Tensor]]],
) -> Iterator[_Pair]:
    name = group.names[piece.parameter]
    for whole in named[name]:
        tensor, copy = (cut_piece(one, piece) for one in whole)
        if group.is_sparse(piece.parameter):
            num_columns = group.members[piece.parameter].shape[1]
            tensor, copy = tensor.view(-1, num_columns), copy.view(-1, num_columns)
        yield _Pair(name, tensor, copy)


def _are_equal(pair: _Pair) -> bool:
    """By their bits: NaNs are equal to themselves, too."""
    tensor, copy = (one.contiguous().view(-1).view(torch.uint8) for one in (pair.tensor, pair.copy))
    return torch.equal(tensor, copy)
