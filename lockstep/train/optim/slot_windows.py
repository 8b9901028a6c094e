"""Windows of pieces, stepped one after the other: their slots are in memory in their turn only.

A window has a bounded number of elements, so pieces are cut, and small ones are stepped together.
An optimizer that treats each element separately computes the same: cuts are at multiples of the
number of elements that a processor takes at once.

Slots in host memory beside an accelerator are copied to it, stepped there, and copied back.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import optim

from lockstep.comm.collectives.gradients import cut_piece
from lockstep.comm.shared_memory.file_region import in_turn, is_in_file
from lockstep.comm.shared_memory.shared_region import is_dense
from lockstep.parallel.updater_interface import BoundPiece
from lockstep.plan.layout import Piece

_MOST_ELEMENTS = 1 << 19

Store = Mapping[str, Mapping[str, torch.Tensor]]


class SlotWindows:
    """One rank's pieces, in windows.

    Args:
        pieces: the rank's.
        may_cut: pieces may be cut; else a window has at least one.
        device: on which they are stepped; None where they lie.

    Attributes:
        pieces: what is stepped: the same elements, cut.
    """

    def __init__(
        self, pieces: Sequence[BoundPiece], *, may_cut: bool, device: torch.device | None = None
    ) -> None:
        self._device = device
        self._cuts = [
            (bound, _cut(bound) if may_cut and is_dense(bound.tensor) else [bound])
            for bound in pieces
        ]
        self.pieces = [cut for _, cuts in self._cuts for cut in cuts]
        self._windows: list[list[BoundPiece]] = []
        filled = _MOST_ELEMENTS
        for cut in self.pieces:
            filled += cut.tensor.numel()
            if filled > _MOST_ELEMENTS:
                self._windows.append([])
                filled = cut.tensor.numel()
            self._windows[-1].append(cut)

    @classmethod
    def of(
        cls,
        pieces: Sequence[BoundPiece],
        store: Store,
        *,
        may_cut: bool,
        device: torch.device | None,
    ) -> "SlotWindows | None":
        """None if all slots are in memory where they are stepped."""
        slots = (slot for bound in pieces for slot in store.get(bound.name, {}).values())
        is_needed = device is not None or any(map(is_in_file, slots))
        return cls(pieces, may_cut=may_cut, device=device) if is_needed else None

    @classmethod
    def of_new(
        cls, pieces: Sequence[BoundPiece], new: Sequence[BoundPiece]
    ) -> "SlotWindows | None":
        """Windows of whole pieces, for a step that makes slots; None if it makes few.

        The slots of a window are moved to the store before the next ones are made.

        Args:
            pieces: the rank's.
            new: those of them whose slots are not in the store.
        """
        made = sum(one.tensor.numel() for one in new if one.tensor.grad is not None)
        is_here = all(one.tensor.device.type == "cpu" for one in pieces)
        return cls(pieces, may_cut=False) if made > _MOST_ELEMENTS and is_here else None

    def turns(
        self,
        optimizer: optim.Optimizer,
        places_of: Callable[[BoundPiece], Mapping[str, torch.Tensor]],
    ) -> Iterator[list[BoundPiece]]:
        """For each window: have the optimizer step its pieces only, with its slots in memory.

        Args:
            optimizer: its parameters are tensors of pieces; others are not stepped.
            places_of: where a piece's slots are.
        """
        self._give_gradients()
        members = {id(one) for group in optimizer.param_groups for one in group["params"]}
        stepped = [[one for one in own if id(one.tensor) in members] for own in self._windows]
        windows = [own for own in stepped if any(one.tensor.grad is not None for one in own)]
        places = [[place for one in own for place in places_of(one).values()] for own in windows]
        try:
            with _stepping_in_part(optimizer, windows) as choose:
                for number in in_turn(places):
                    choose(number)
                    if self._device is None:
                        yield windows[number]
                        continue
                    with _on_device(optimizer, windows[number], places_of, self._device):
                        yield []
        finally:
            for bound, cuts in self._cuts:
                for cut in cuts if cuts[0] is not bound else ():
                    cut.tensor.grad = None

    def _give_gradients(self) -> None:
        """Give the cuts their parts of the pieces' gradients."""
        for bound, cuts in self._cuts:
            gradient = bound.tensor.grad
            if cuts[0] is bound:
                continue
            if gradient is not None and gradient.stride() != bound.tensor.stride():
                gradient = torch.empty_like(bound.tensor).copy_(gradient)
            for cut in cuts:
                cut.tensor.grad = None if gradient is None else _part(gradient, bound, cut)


@contextmanager
def _on_device(
    optimizer: optim.Optimizer,
    window: Sequence[BoundPiece],
    places_of: Callable[[BoundPiece], Mapping[str, torch.Tensor]],
    device: torch.device,
) -> Iterator[None]:
    """Within the block the optimizer has a window on a device; afterwards its slots are in place.

    The window is all that it has.
    """
    used = {id(one.tensor): one for one in window if one.tensor.grad is not None}
    moved: dict[int, torch.Tensor] = {}
    for key, bound in used.items():
        own = moved[key] = bound.tensor.detach().to(device).requires_grad_()
        own.grad = None if bound.tensor.grad is None else bound.tensor.grad.to(device)
        places = places_of(bound)
        optimizer.state[own] = {
            slot: value.to(device) if slot in places else value
            for slot, value in optimizer.state.pop(bound.tensor, {}).items()
        }
    members = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [moved[id(one)] for one in group["params"] if id(one) in moved]
    yield
    for group, own_members in zip(optimizer.param_groups, members, strict=True):
        group["params"] = own_members
    for key, bound in used.items():
        slots, places = optimizer.state.pop(moved[key]), places_of(bound)
        optimizer.state[bound.tensor] = {
            slot: places[slot].copy_(value) if slot in places else _beside(bound, value)
            for slot, value in slots.items()
        }
        if bound.tensor.device != device:
            bound.tensor.detach().copy_(moved[key].detach())


def _beside(bound: BoundPiece, value: Any) -> Any:
    """A slot that is in no store, such as a count: where its piece is."""
    return value.to(bound.tensor.device) if isinstance(value, torch.Tensor) else value


def _cut(bound: BoundPiece) -> list[BoundPiece]:
    piece, tensor = bound.piece, bound.tensor
    if tensor.numel() <= _MOST_ELEMENTS:
        return [bound]
    found = []
    for start in range(piece.start, piece.stop, _MOST_ELEMENTS):
        stop = min(start + _MOST_ELEMENTS, piece.stop)
        own = Piece(parameter=piece.parameter, start=start, stop=stop)
        cut = BoundPiece(name=bound.name, piece=own, tensor=tensor)
        part = _part(tensor.detach(), bound, cut).requires_grad_()
        found.append(BoundPiece(name=bound.name, piece=own, tensor=part))
    return found


def _part(tensor: torch.Tensor, bound: BoundPiece, cut: BoundPiece) -> torch.Tensor:
    """A cut's elements of a tensor of the whole piece."""
    first = bound.piece.start
    own = Piece(parameter=0, start=cut.piece.start - first, stop=cut.piece.stop - first)
    return cut_piece(tensor, own)


@contextmanager
def _stepping_in_part(
    optimizer: optim.Optimizer, windows: Sequence[Sequence[BoundPiece]]
) -> Iterator[Callable[[int], None]]:
    """Within the block, a function chooses the window whose pieces the optimizer has."""
    groups = optimizer.param_groups
    members = [group["params"] for group in groups]
    group_of = {id(one): number for number, own in enumerate(members) for one in own}

    def choose(number: int) -> None:
        own: dict[int, list[torch.Tensor]] = {}
        for bound in windows[number]:
            own.setdefault(group_of[id(bound.tensor)], []).append(bound.tensor)
        chosen: list[dict[str, Any]] = []
        for index in sorted(own):
            groups[index]["params"] = own[index]
            chosen.append(groups[index])
        optimizer.param_groups = chosen

    try:
        yield choose
    finally:
        optimizer.param_groups = groups
        for group, own in zip(groups, members, strict=True):
            group["params"] = own
