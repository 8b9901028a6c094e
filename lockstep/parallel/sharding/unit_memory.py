"""The memory of units: which are there, whole, and of which this rank has only its part.

The tensors stay the same (``comm.collectives.piece_memory``). So the user's Parameters stay what
they are, and what autograd has saved of them is valid again once the unit has been gathered.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch

from lockstep.comm.collectives.gradients import cut_piece
from lockstep.comm.collectives.overlapped_reduce import side_by_side
from lockstep.comm.collectives.piece_memory import PieceMemory, piece_memory, storage_key
from lockstep.comm.collectives.sharded_reduce import ShardedReduce
from lockstep.comm.shared_memory.status_board import StatusBoard
from lockstep.comm.transport import Buffers
from lockstep.plan.layout import Piece


class UnitMemory:
    """One rank's memory.

    Args:
        parameters: the trainable parameters, in order. On a device those of a unit share their
            storage with no others.
        units: the unit of each; None for one that stays.
        num_units: how many units there are.
        kept: the pieces that this rank keeps, in order.
        updated: those that it updates.
        others: the ranks that keep the other pieces, and these.
        copies: the other ranks that keep the same pieces, and what each of them updates.
        gradients: of the parameters; brings pieces from rank to rank.
        board: where this rank publishes that it gathers.

    Attributes:
        numbers: of the parameters in units.
        present: the units that are there, whole; none at first.
        is_held: this rank also has all others, since they were there last: free none.
        kept: this rank's pieces that lie elsewhere than in their parameters. These have the values
            while their unit is away.
    """

    _board: StatusBoard | None = None

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        units: Sequence[int | None],
        num_units: int,
        kept: Sequence[Piece],
        updated: Sequence[Piece],
        others: Mapping[int, Sequence[Piece]],
        copies: Mapping[int, Sequence[Piece]],
        gradients: ShardedReduce,
        board: StatusBoard,
    ) -> None:
        self._gradients = gradients
        self._board = board
        self._coming: dict[int, Callable[[], None]] = {}
        tensors: list[dict[int, torch.Tensor]] = [{} for _ in range(num_units)]
        for number, (parameter, unit) in enumerate(zip(parameters, units, strict=True)):
            if unit is not None:
                tensors[unit][number] = parameter.data  # its version is not the parameter's
        self.present: set[int] = set()
        self.is_held = True
        self.kept: dict[Piece, torch.Tensor] = {}
        self._memories: list[PieceMemory] = []
        self._places: dict[Piece, torch.Tensor] = {}  # of the pieces that it keeps
        self._unit_of = {number: unit for unit, own in enumerate(tensors) for number in own}
        self.numbers = frozenset(self._unit_of)
        self._moves: list[tuple[Buffers, Buffers]] = []
        for own in tensors:
            cuts = _cuts(own, kept)
            memory = piece_memory(list(own.values()), list(cuts.values()))
            self.kept |= {
                piece: place
                for (piece, cut), place in zip(cuts.items(), memory.kept, strict=True)
                if place is not cut
            }
            self._memories.append(memory)
            self._places |= zip(cuts, memory.kept, strict=True)
            receives = {
                rank: side_by_side([*_cuts(own, theirs).values()])
                for rank, theirs in others.items()
            }
            self._moves.append((dict.fromkeys(receives, side_by_side(memory.kept)), receives))
        self._updated = self._places_of(updated)
        places = [*self._updated.values()]
        self._copies = (
            dict.fromkeys(copies, places),
            {rank: [*self._places_of(theirs).values()] for rank, theirs in copies.items()},
        )
        self._spans = sorted(
            (*place_in_storage(one), one.nbytes, unit, number)
            for unit, own in enumerate(tensors)
            for number, one in own.items()
        )

    def __len__(self) -> int:
        """The number of units."""
        return len(self._memories)

    def _places_of(self, pieces: Iterable[Piece]) -> dict[Piece, torch.Tensor]:
        return {one: self._places[one] for one in pieces if one in self._places}

    def places(self) -> Iterable[tuple[Piece, torch.Tensor]]:
        """The pieces that this rank keeps, and their memory, while their units are away."""
        return self._places.items()

    @torch.no_grad()
    def copy_pieces(self, values: Sequence[torch.Tensor]) -> None:
        """Copy this rank's pieces from the values of all parameters; it has no others."""
        for piece, place in self._places.items():
            place.copy_(cut_piece(values[piece.parameter], piece))
        self.is_held = False

    @torch.no_grad()
    def write_pieces(self, targets: Sequence[torch.Tensor]) -> None:
        """Copy what this rank updates to where it belongs in whole tensors, of all parameters."""
        for piece, place in self._updated.items():
            cut_piece(targets[piece.parameter], piece).copy_(place)

    def exchange_copies(self) -> None:
        """After an update: get what other ranks have updated of the pieces that this one keeps."""
        if self._copies[0]:
            self._gradients.begin_move(*self._copies)()

    def keep_parts(self, numbers: Iterable[int]) -> None:
        """Keep only this rank's pieces of parameters that have been set; it has no others."""
        self.is_held = False
        for unit in {self._unit_of[number] for number in numbers}:
            self._memories[unit].keep()
            self._memories[unit].free()

    def begin(self, unit: int) -> None:
        """Begin to gather a unit; every rank does so for the same units in the same order."""
        if unit not in self.present and unit not in self._coming:
            self._coming[unit] = self._gradients.begin_move(*self._moves[unit])

    def gather(self, unit: int) -> None:
        """Have a unit there; every rank calls it, as it does ``begin``."""
        self.begin(unit)
        if unit in self._coming:
            self._memories[unit].take()
            with nullcontext() if self._board is None else self._board.gathering():
                self._coming.pop(unit)()
            self.present.add(unit)

    def gather_again(self, unit: int) -> None:
        """The same where the unit may be there on some ranks only."""
        self.present.discard(unit)
        self.gather(unit)

    def free(self, unit: int) -> None:
        """Free all but this rank's pieces of a unit."""
        if unit in self._coming:
            self.gather(unit)
        if unit in self.present:
            self.present.discard(unit)
            if not self.is_held:
                self._memories[unit].free()

    def release(self) -> None:
        """Free all but this rank's pieces of all units."""
        was_held, self.is_held = self.is_held, False
        for unit in range(len(self)):
            self.free(unit)
            if was_held:
                self._memories[unit].free()

    @contextmanager
    def written(self, numbers: Iterable[int]) -> Iterator[None]:
        """Within the block parameters can be set, also of units that are away."""
        away = set() if self.is_held else {self._unit_of[one] for one in numbers} - self.present
        for unit in away:
            self._memories[unit].take()
        yield
        for unit in away:
            self._memories[unit].keep()
            self._memories[unit].free()

    def keep_pieces(self) -> None:
        """After a change of parameters that are there: the kept pieces have the new values."""
        for unit in range(len(self)):
            if self.is_held or unit in self.present:
                self._memories[unit].keep()

    def mark_lost(self) -> bool:
        """After a failure: put NaN where other ranks' pieces are not there; True if any are not."""
        away = set() if self.is_held else {*range(len(self))} - self.present
        for unit in away:
            self._memories[unit].fill_rest(math.nan)
        return bool(away)

    def find(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """The unit in whose memory a tensor lies, and the parameter's number; None outside."""
        if tensor.layout != torch.strided or not tensor.numel():
            return None
        base, start = place_in_storage(tensor)
        number = bisect_right(self._spans, (base, start, math.inf)) - 1
        if number < 0:
            return None
        own_base, own_start, num_bytes, *found = self._spans[number]
        return (found[0], found[1]) if base == own_base and start < own_start + num_bytes else None


def _cuts(
    tensors: Mapping[int, torch.Tensor], pieces: Iterable[Piece]
) -> dict[Piece, torch.Tensor]:
    """The places of pieces in some tensors, which are given by number."""
    return {
        one: cut_piece(tensors[one.parameter], one) for one in pieces if one.parameter in tensors
    }


def place_in_storage(tensor: torch.Tensor) -> tuple[int, int]:
    """A storage, and where a tensor begins in it.

    In host memory all storages are one: several may be of the same memory. On a device a unit's
    storages stay, and their addresses do not.
    """
    if tensor.device.type == "cpu":
        return 0, tensor.data_ptr()
    return storage_key(tensor), int(tensor.storage_offset()) * tensor.element_size()
