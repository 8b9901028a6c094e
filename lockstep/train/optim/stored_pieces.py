"""Pieces of stored tensors, where an optimizer steps on them.

A store that all ranks map is in host memory. Ranks on devices have copies of their pieces of it, in
their device's memory, and write them back when others read the store.
"""

from typing import Any

import torch

from lockstep.comm.collectives.gradients import cut_piece
from lockstep.parallel.updater_interface import BoundPiece
from lockstep.plan.layout import Piece


def place_of(whole: torch.Tensor, bound: BoundPiece) -> torch.Tensor:
    """A piece of a stored tensor, in its place."""
    return cut_piece(whole, bound.piece)


class StoredPieces:
    """One rank's pieces."""

    def __init__(self) -> None:
        # By the whole tensor's id: the copy, its place, and the whole, which keeps its id.
        self._copies: dict[tuple[int, Piece], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def __reduce__(self) -> Any:
        return StoredPieces, ()  # copies are of this process's device

    def of(self, whole: torch.Tensor, bound: BoundPiece) -> torch.Tensor:
        """A piece of a stored tensor: in its place, or a copy on the device of the parameter's."""
        place = place_of(whole, bound)
        if place.device == bound.tensor.device:
            return place
        key = id(whole), bound.piece
        if key not in self._copies:
            self._copies[key] = place.to(bound.tensor.device), place, whole
        return self._copies[key][0]

    @torch.no_grad()
    def write_back(self) -> None:
        """Bring the copies' values to the store."""
        for copy, place, _ in self._copies.values():
            place.copy_(copy)
