"""Losses that an accelerator computes, on their way to the lines that ranks share.

To assign a device's tensor to host memory waits until the device has computed it, and all that was
asked of it before. So all that a rank has to tell of its losses goes in one copy, which begins with
the last of them, before backward. It is waited for when all ranks meet, and by then the device has
computed the losses, or is about to, and still has backward to do. A rank alone that needs only the
weights, and knows them, leaves the totals to whoever asks for them.
"""

import math
from collections.abc import Callable

import torch

from lockstep import accelerators
from lockstep.comm.shared_memory.status_board import look_around_of


class LateTotal:
    """The sum of some totals, as a number: who makes one of it waits for the device.

    Args:
        fetch: of the totals.
        known: further ones.
    """

    def __init__(self, fetch: accelerators.Fetch, known: list[float]) -> None:
        self._fetch: accelerators.Fetch | None = fetch
        self._known = known

    def __float__(self) -> float:
        if self._fetch is not None:
            self._known += self._fetch.wait(look_around_of(None)).numpy().tolist()
            self._fetch = None
        return math.fsum(self._known)


class LateLosses:
    """One rank's.

    Args:
        lines: in host memory, by share.
    """

    def __init__(self, lines: torch.Tensor) -> None:
        self._lines = lines
        self._num_due = 0
        self._numbers: dict[tuple[int, int], torch.Tensor] = {}  # by share and place in its line
        self._fetch: accelerators.Fetch | None = None

    def begin(self) -> None:
        """A new pass: nothing has been put yet."""
        self._num_due = 0
        self._numbers.clear()
        self._fetch = None

    def expect(self, num_shares: int) -> None:
        """So many shares are going to put their losses."""
        self._num_due = num_shares

    def put(self, share: int, *numbers: torch.Tensor | float) -> None:
        """What a share's line begins with."""
        for place, number in enumerate(numbers):
            if accelerators.computes(number):
                self._numbers[share, place] = number
            else:
                self._lines[share, place] = number
        self._num_due -= 1
        if self._numbers and not self._num_due:
            self._fetch = self._fetched()

    def settle(self, look_around: Callable[[float], None]) -> None:
        """Have all of it in the lines; for ``look_around`` see ``accelerators.await_event``."""
        if self._numbers:
            found = (self._fetch or self._fetched()).wait(look_around).numpy()
            for place, number in zip(self._numbers, found, strict=True):
                self._lines.numpy()[place] = number
            self._numbers.clear()

    def leave(self, num_shares: int) -> LateTotal | None:
        """The total of the first shares, for later, which ``settle`` then does not wait for.

        None where nothing is on its way, or weights are.
        """
        if not self._numbers or any(place for _, place in self._numbers):
            return None
        known = [share for share in range(num_shares) if (share, 0) not in self._numbers]
        total = LateTotal(self._fetch or self._fetched(), self._lines.numpy()[known, 0].tolist())
        self._numbers.clear()
        return total

    def _fetched(self) -> accelerators.Fetch:
        numbers = [number.reshape(()).double() for number in self._numbers.values()]
        return accelerators.Fetch(torch.stack(numbers))
