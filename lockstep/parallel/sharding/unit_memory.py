"""The memory of units: which are there, whole, and of which this rank has only its part.

The addresses stay the same. So the user's Parameters stay what they are, and what autograd has
saved of them is valid again once the unit has been gathered.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence

import torch

from lockstep.comm.collectives.gradients import cut_piece
from lockstep.comm.shared_memory.shared_region import discard
from lockstep.plan.layout import Piece

# Tensors by the numbers of their parameters.
Numbered = Mapping[int, torch.Tensor]


class UnitMemory:
    """One rank's memory.

    Args:
        parameters: the trainable parameters, in order.
        units: the unit of each; None for one that stays.
        num_units: how many units there are.
        pieces: that this rank keeps.
        gather: begins to bring all ranks' pieces of some parameters to all ranks; what it returns
            waits for them.

    Attributes:
        numbers: of the parameters in units.
        present: the units that are there, whole.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        units: Sequence[int | None],
        num_units: int,
        pieces: Sequence[Piece],
        gather: Callable[[Numbered], Callable[[], None]],
    ) -> None:
        self._gather = gather
        self._coming: dict[int, Callable[[], None]] = {}
        self._tensors: list[dict[int, torch.Tensor]] = [{} for _ in range(num_units)]
        for number, (parameter, unit) in enumerate(zip(parameters, units, strict=True)):
            if unit is not None:
                self._tensors[unit][number] = parameter.detach()
        self.numbers = frozenset(number for own in self._tensors for number in own)
        self.present = set(range(num_units))
        self._kept = [
            [cut_piece(own[one.parameter], one) for one in pieces if one.parameter in own]
            for own in self._tensors
        ]
        self._spans = sorted(
            (one.data_ptr(), one.data_ptr() + one.nbytes, unit, number)
            for unit, own in enumerate(self._tensors)
            for number, one in own.items()
        )
        self._starts = [start for start, *_ in self._spans]

    def __len__(self) -> int:
        """The number of units."""
        return len(self._tensors)

    def begin(self, unit: int) -> None:
        """Begin to gather a unit; every rank does so for the same units in the same order."""
        if unit not in self.present and unit not in self._coming:
            self._coming[unit] = self._gather(self._tensors[unit])

    def gather(self, unit: int) -> None:
        """Have a unit there; every rank calls it, as it does ``begin``."""
        self.begin(unit)
        if unit in self._coming:
            self._coming.pop(unit)()
            self.present.add(unit)

    def free(self, unit: int) -> None:
        """Free all but this rank's pieces of a unit."""
        if unit in self._coming:
            self.gather(unit)
        if unit in self.present:
            self.present.discard(unit)
            for tensor in self._tensors[unit].values():
                discard(tensor, self._kept[unit])

    @torch.no_grad()
    def mark_lost(self) -> bool:
        """After a failure: put NaN where other ranks' pieces are not there; True if any are not."""
        away = {*range(len(self))} - self.present
        for unit in away:
            own = [one.clone() for one in self._kept[unit]]
            for tensor in self._tensors[unit].values():
                tensor.fill_(math.nan)
            for place, value in zip(self._kept[unit], own, strict=True):
                place.copy_(value)
        return bool(away)

    def find(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """The unit in whose memory a tensor lies, and the parameter's number; None outside."""
        if tensor.layout != torch.strided or not tensor.numel():
            return None
        address = tensor.data_ptr()
        place = bisect_right(self._starts, address) - 1
        if place < 0 or address >= self._spans[place][1]:
            return None
        return self._spans[place][2:]
