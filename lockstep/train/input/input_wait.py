"""Measures how much of an epoch is spent waiting for data, and warns if it is much."""

import time
import warnings
from collections.abc import Iterator
from typing import TypeVar

import torch

from lockstep.data.map_style.sources import Batch, Source
from lockstep.errors import level_of_user
from lockstep.formatting import format_seconds

_SHORTEST_SECONDS = 1.0
_LARGEST_SHARE = 0.25


_T = TypeVar("_T")


class InputBoundWarning(UserWarning):
    """Training waits for its data."""


class InputClock:
    """Measures how long rank 0 waits for data in an epoch."""

    def __init__(self) -> None:
        self._has_warned = False
        self.begin()

    def begin(self) -> None:
        """An epoch begins."""
        self._began = time.perf_counter()
        self._seconds = 0.0
        self._waited = 0.0
        self._longest = 0.0  # single wait
        self._waits: list[float] = []  # since the last step

    def note_wait(self, began: float) -> None:
        """Count the time since ``began``, of ``time.perf_counter``, as waiting for data."""
        self._waits.append(time.perf_counter() - began)

    def awaited(self, items: Iterator[_T]) -> Iterator[_T]:
        """The items of an iterator; count the time until each one as waiting for data."""
        while True:
            began = time.perf_counter()
            try:
                item = next(items, None)
            finally:
                self.note_wait(began)
            if item is None:
                return
            yield item

    def end_step(self) -> None:
        """A step has ended; waits after the last step do not count."""
        self._seconds = time.perf_counter() - self._began
        if self._waits:
            self._waited += sum(self._waits)
            self._longest = max(self._longest, *self._waits)
            self._waits.clear()

    @property
    def share(self) -> float:
        """The part, from 0 to 1, of the time until the last step that was spent waiting."""
        return min(self._waited / self._seconds, 1.0) if self._seconds else 0.0

    def end_epoch(self) -> None:
        """Warn once if the epoch has waited for its data more than it should.

        The longest single wait does not count: reading ahead would not change that a file was
        opened, or that the machine was held up once.

        Warns:
            InputBoundWarning: it has.
        """
        seconds = self._seconds - self._longest
        if self._has_warned or seconds < _SHORTEST_SECONDS:
            return
        if self._waited - self._longest <= _LARGEST_SHARE * seconds:
            return
        self._has_warned = True
        warnings.warn(
            f"Training waited for its data {self.share:.0%} of the time: "
            f"{format_seconds(self._waited)} of {format_seconds(self._seconds)} in this epoch, on "
            "rank 0. Have it read ahead (lockstep.data.prefetch), keep what was read "
            "(lockstep.data.cache), or give a DataLoader more workers.",
            InputBoundWarning,
            stacklevel=level_of_user(),
        )


class ClockedSource(Source):
    """A source that has a clock count its reads as waiting."""

    def __init__(self, source: Source, clock: InputClock) -> None:
        self._source = source
        self._clock = clock

    def __len__(self) -> int:
        return len(self._source)

    def read(self, indices: torch.Tensor, dtype: torch.dtype | None) -> Batch:
        began = time.perf_counter()
        try:
            return self._source.read(indices, dtype)
        finally:
            self._clock.note_wait(began)
