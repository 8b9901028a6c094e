"""Residency of small units: a rank gathers all of them in a batch once, and has them until its end.

All are on their way as soon as the batch begins, in one order on all ranks. A forward pass waits
for a unit where it uses it before it has come. So units cost one gather, whatever the number of
passes; a model may use them in any order, and again; and backward needs no hooks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lockstep.parallel.sharding.read_hook import entering, reading
from lockstep.parallel.sharding.residency import Residency


class StepResidency(Residency):
    """One rank's end; for arguments see ``Residency``."""

    def begin(self, num_rounds: int, *, is_training: bool, **_: Any) -> None:
        if is_training:
            self.release()
        for unit in range(len(self.memory)):  # callbacks may have set parameters
            self.memory.free(unit)
        self._begin_all()

    def _begin_all(self) -> None:
        for unit in range(len(self.memory)):
            self.memory.begin(unit)

    def finish(self) -> None:
        for unit in range(len(self.memory)):
            self._use(unit)

    @contextmanager
    def forward(self) -> Iterator[None]:
        if len(self.memory.present) == len(self.memory):
            yield
            return
        with reading(self._before_read, self._device), entering(self._enter):
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        self.finish()
        yield

    @contextmanager
    def by_request(self) -> Iterator[None]:
        self._begin_all()
        with self.forward():
            yield
        self.finish()

    def _use(self, unit: int, *, is_entered: bool = False) -> None:
        self._is_moving = True
        self.memory.gather(unit)
        self._is_moving = False

    def before_statistics(self, norm: int, *, is_backward: bool) -> None:
        """Nothing: no rank waits for another one to use a unit."""

    def meet(self) -> None:
        """Nothing, likewise."""

    def finish_forward(self) -> None:
        """Nothing, likewise."""
