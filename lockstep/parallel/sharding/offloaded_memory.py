"""The memory of units whose parameters lie in host memory, from which a device gets copies.

All ranks of the host have one copy of the parameters there. A rank writes the pieces that it
updates, and copies a unit to its device before the unit is used: a thread of its own does so, while
the unit before is used (Ren et al., "ZeRO-Offload", ATC 2021).

Between batches the user's Parameters lie in host memory, so whoever reads them sees them whole.
While a batch is computed they lie on the device, in storages that have memory while their unit is
there.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from lockstep import accelerators
from lockstep.comm.collectives.gradients import cut_piece
from lockstep.comm.collectives.piece_memory import (
    PieceMemory,
    allocate,
    empty_copies,
    release,
    storage_key,
)
from lockstep.parallel.sharding.unit_memory import UnitMemory, place_in_storage
from lockstep.parallel.storage.store import set_data
from lockstep.plan.layout import Piece


class OffloadedMemory(UnitMemory):
    """One rank's memory.

    Args:
        parameters: the model's, the trained ones first; they lie in host memory.
        units: the unit of each; the last unit stays while the Parameters are on the device.
        num_units: how many units there are.
        updated: the pieces that this rank updates.
        device: this rank's.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        units: Sequence[int],
        num_units: int,
        updated: Sequence[Piece],
        device: torch.device,
    ) -> None:
        self._parameters = parameters
        self._hosts = [one.data for one in parameters]
        self._copies_on_device = empty_copies(self._hosts, device)
        self._copier = Copier(device)
        self._coming: dict[int, Callable[[], None]] = {}
        self._is_used = False  # the Parameters lie on the device
        self.present: set[int] = set()
        self.is_held = False
        self._unit_of = dict(enumerate(units))
        self.numbers = frozenset(self._unit_of)
        self.kept = {one: cut_piece(self._hosts[one.parameter], one) for one in updated}
        self._places = self._updated = dict(self.kept)
        self._copies = ({}, {})
        members = [
            [number for number, one in enumerate(units) if one == unit] for unit in range(num_units)
        ]
        self._memories = [
            _Copied([self._copies_on_device[number] for number in own]) for own in members
        ]
        self._pairs = [
            [(self._copies_on_device[number], self._hosts[number]) for number in own]
            for own in members
        ]
        self._spans = sorted(
            (*place_in_storage(one), one.nbytes, units[number], number)
            for number, one in enumerate(self._copies_on_device)
            if units[number] != num_units - 1
        )

    def use(self) -> None:
        """Have the Parameters on the device, where units come and go."""
        if not self._is_used:
            self._is_used = True
            for parameter, copy in zip(self._parameters, self._copies_on_device, strict=True):
                set_data(parameter, copy)

    def hold(self) -> None:
        """Have the Parameters in host memory, whole."""
        if self._is_used:
            self._is_used = False
            self.release()
            places = zip(self._parameters, self._copies_on_device, self._hosts, strict=True)
            for parameter, copy, host in places:
                if storage_key(parameter) == storage_key(copy):  # else the model moved it
                    set_data(parameter, host)

    @property
    def is_used(self) -> bool:
        """Whether the Parameters lie on the device."""
        return self._is_used

    def begin(self, unit: int) -> None:
        if unit not in self.present and unit not in self._coming:
            self._memories[unit].take()
            self._coming[unit] = self._copier.begin(self._pairs[unit])

    def expect(self, unit: int | None) -> None:
        """Begin with a unit, if it is known, and with no other."""
        for other in [one for one in self._coming if one != unit]:
            self.free(other)
        if unit is not None:
            self.begin(unit)

    def gather_again(self, unit: int) -> None:
        self.gather(unit)

    def mark_lost(self) -> bool:
        self.hold()
        return False


class _Copied(PieceMemory):
    """Copies on a device of tensors that lie elsewhere; they have no memory at first."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(tensors, ())
        self.kept = ()

    def take(self) -> None:
        allocate(self._tensors)

    def keep(self) -> None:
        return

    def free(self) -> None:
        release(self._tensors)

    def drop(self) -> None:
        self.free()


class Copier:
    """Copies tensors to a device while this rank computes, one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)
        self._thread = ThreadPoolExecutor(1, "lockstep-stream")

    def begin(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
        """Begin to copy the second of each pair to the first; the result waits for it."""
        ready = torch.Event(self._device.type)  # what had the memory before has been used
        ready.record(torch.accelerator.current_stream(self._device))
        copied: Future[torch.Event] = self._thread.submit(self._copy, pairs, ready)

        def finish() -> None:
            torch.accelerator.current_stream(self._device).wait_event(copied.result())

        return finish

    @torch.no_grad()
    def _copy(
        self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], ready: torch.Event
    ) -> torch.Event:
        accelerators.use(self._device)
        self._stream.wait_event(ready)
        with self._stream:
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        copied = torch.Event(self._device.type)
        copied.record(self._stream)
        return copied
