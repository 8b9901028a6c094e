"""Parameter servers record their optimizers' slots, so that training continues when one dies.

Slots of a parameter's size are in shared memory. A server records the rest, such as the number of
steps, after each update, in two places in turn, so that the last record is valid until the next
update is complete.
"""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from lockstep.comm.collectives.gradients import TensorSpec
from lockstep.comm.shared_memory.shared_region import SharedRegion
from lockstep.parallel.updater_interface import PieceSlots
from lockstep.plan.layout import align

# Bytes for the slots of a parameter, beside its name.
_NOTE_BYTES = 1024
_UNKNOWN = -1


class SlotJournal:
    """One rank's view.

    Args:
        region: memory of the notes.
        offset: their start there.
        tensors: the parameters.
        num_servers: number of servers.
    """

    def __init__(
        self, region: SharedRegion, offset: int, tensors: Sequence[TensorSpec], num_servers: int
    ) -> None:
        size = _place_bytes(tensors)
        shape, stride = (num_servers, 2, size), (2 * size, size, 1)
        self._places = region.tensor(offset, torch.uint8, shape, stride).numpy()

    def write(self, server: int, slot: int, pieces: Sequence[PieceSlots]) -> None:
        """Record a server's slots, except those in the store."""
        place = self._places[server, slot]
        has_arrays = any(one.has_arrays for one in pieces)
        note = b"" if has_arrays else pickle.dumps([*map(_plain, pieces)])
        is_known = 0 < len(note) <= len(place) - 8
        if is_known:
            place[8 : 8 + len(note)] = np.frombuffer(note, np.uint8)
        place[:8].view(np.int64)[0] = len(note) if is_known else _UNKNOWN

    def lengths(self, slot_of: Callable[[int], int]) -> list[int]:
        """The length of each server's last note: 0 without one, below 0 if unrecordable.

        Args:
            slot_of: which of its two places a server wrote to.
        """
        places = (one[slot_of(server)] for server, one in enumerate(self._places))
        return [int(place[:8].view(np.int64)[0]) for place in places]

    def read(self, slot_of: Callable[[int], int]) -> list[list[PieceSlots]]:
        """Each server's last note."""
        notes = [
            pickle.loads(self._places[server, slot_of(server), 8 : 8 + length].tobytes())
            for server, length in enumerate(self.lengths(slot_of))
        ]
        return [[replace(piece, slots=_slots(piece.slots)) for piece in note] for note in notes]


def num_bytes(tensors: Sequence[TensorSpec], num_servers: int) -> int:
    """Size of all notes."""
    return 2 * num_servers * _place_bytes(tensors)


def _place_bytes(tensors: Sequence[TensorSpec]) -> int:
    return align(_NOTE_BYTES + sum(_NOTE_BYTES + 4 * len(tensor.name) for tensor in tensors))


def _plain(piece: PieceSlots) -> PieceSlots:
    """Numbers in place of tensors, which would be slow to pickle."""
    plain = {
        slot: (value.item(), value.dtype) if isinstance(value, torch.Tensor) else value
        for slot, value in piece.slots.items()
    }
    return replace(piece, slots=plain)


def _slots(plain: dict[str, Any]) -> dict[str, Any]:
    return {
        slot: torch.tensor(value[0], dtype=value[1]) if isinstance(value, tuple) else value
        for slot, value in plain.items()
    }
