"""Residency of parameters that lie in host memory: a rank copies units to its device by itself.

No rank waits for another one to have a unit. Before the order of the units is known, the one that
followed in an earlier pass is copied while a unit is used. Parameters in no unit, and buffers, are
on the device as long as a batch is computed.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from lockstep.parallel.sharding.offloaded_memory import OffloadedMemory
from lockstep.parallel.sharding.read_hook import is_in_backward
from lockstep.parallel.sharding.residency import Residency
from lockstep.parallel.storage.store import set_data

_NO_UNIT = -1


class ParameterOffload(Residency):
    """One rank's end; its memory has one unit more, of the parameters in no unit.

    Args:
        memory: of the units.
        options: see ``Residency``.
    """

    memory: OffloadedMemory

    def __init__(self, *args: Any, memory: OffloadedMemory, **options: Any) -> None:
        super().__init__(*args, memory=memory, meet=None, **options)
        self._following: dict[int, int] = {}  # by unit, the one that was used after it
        self._before = _NO_UNIT  # the unit that was used last

    @property
    def _present_always(self) -> Collection[int]:
        return {*super()._present_always, len(self._names)}

    def show(self, *, everywhere: bool = False) -> None:
        self.memory.hold()
        for buffer in self._model.buffers():
            set_data(buffer, buffer.cpu())

    @contextmanager
    def whole(self) -> Iterator[None]:
        with self.by_request():
            yield

    def begin(self, *args: Any, **options: Any) -> None:
        self._go_to_device()
        super().begin(*args, **options)

    def finish(self) -> None:
        super().finish()
        self.memory.hold()

    def _go_to_device(self) -> None:
        self.memory.use()
        for buffer in self._model.buffers():
            set_data(buffer, buffer.to(self._device))

    @contextmanager
    def by_request(self) -> Iterator[None]:
        was_used, self._before = self.memory.is_used, _NO_UNIT
        self._go_to_device()
        self._gather_staying()
        with super().by_request():
            yield
        if not was_used:
            self.memory.hold()

    def _gather_requested(self, wanted: int, kept: Collection[int]) -> set[int]:
        if wanted >= 0:
            self.memory.gather(wanted)
        return {_NO_UNIT}

    def _need(self, units: Collection[int]) -> None:
        super()._need(units)
        for unit in units:
            if unit != self._before and not is_in_backward():
                self._following[self._before] = unit
                self._before = unit
                self.memory.expect(self._following.get(unit))
