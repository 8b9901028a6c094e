"""A second copy of a parameter server's weights and slots, to undo an interrupted update.

It is in shared memory, which lives as long as the script's process. A server copies after each
update, so one of the two is always complete: the copy is from before the update while the server
updates, and the weights are from after it while the server copies.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from lockstep.comm.collectives.gradients import TensorSpec, cut_piece
from lockstep.comm.shared_memory.shared_region import SharedRegion
from lockstep.errors import WorkerError
from lockstep.parallel.owned_group import OwnedGroup
from lockstep.parallel.storage.store import TensorStore, tensor_spec
from lockstep.parallel.updater_interface import Updater
from lockstep.plan.layout import Piece, flat_offsets

Named = Sequence[tuple[str, torch.Tensor]]


def copied_bytes(specs: Sequence[TensorSpec]) -> int:
    """Size of the second copies of tensors."""
    return flat_offsets([spec.extent for spec in specs])[1]


@dataclass(frozen=True)
class _Pair:
    """A piece of a parameter or slot and its copy; pieces of embeddings have rows."""

    name: str
    tensor: torch.Tensor
    copy: torch.Tensor


class SecondCopy:
    """The copy of one server's pieces; pairs are by the parameter's number in its group."""

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
        """The copies of all servers.

        Args:
            group: the parameters.
            updater: has the slots in shared memory.
            served: the pieces of each server.
            region: memory of the copies.
            offset: their start there.
        """
        wholes: Named = [*zip(group.names, group.members, strict=True), *_slots(group, updater)]
        specs = [tensor_spec(name, tensor) for name, tensor in wholes]
        store = TensorStore(specs, region.part(offset, copied_bytes(specs)))
        named: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
        for (name, tensor), view in zip(wholes, store.views, strict=True):
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
        """Copy the values that an update with these gradients has changed.

        Without a gradient a weight stays the same, but its average changes.
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
        """Check that both have the same bits.

        Raises:
            WorkerError: they differ.
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
    """True if the bits are equal, including those of NaNs."""
    tensor, copy = (one.contiguous().view(-1).view(torch.uint8) for one in (pair.tensor, pair.copy))
    return torch.equal(tensor, copy)
