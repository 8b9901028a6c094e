"""Losses that an accelerator computes, on their way to the lines that ranks share.

Assigning a device's tensor to host memory waits until the device has computed it, and all work
queued before. So a rank copies all its losses at once; the copy begins with the last of them,
before backward. The rank waits for it when all ranks meet; by then the device has computed the
losses, or is about to, and still has backward to do. A single rank that needs only the weights, and
knows them, fetches the totals when they are first read.
"""

import math
from collections.abc import Callable

import torch

from lockstep import accelerators
from lockstep.comm.shared_memory.status_board import look_around_of

_OF_NUMPY = (torch.float32, torch.float64)


class LateTotal:
    """The sum of some totals; converting it to a number waits for the device.

    Args:
        fetch: of the totals.
        known: further ones.
        values: the totals, on the device.
    """

    def __init__(self, fetch: accelerators.Fetch, known: list[float], values: torch.Tensor) -> None:
        self._fetch: accelerators.Fetch | None = fetch
        self._known = known
        self.values = values

    def __float__(self) -> float:
        if self._fetch is not None:
            self._known += self._fetch.wait(look_around_of(None)).numpy().tolist()
            self._fetch = None
        return math.fsum(self._known)


class LateLosses:
    """One rank's.

    Args:
        lines: in host memory, by share.

    Attributes:
        coming: numbers that a device computes and that are not in the lines yet, by share and
            place in its line.
    """

    def __init__(self, lines: torch.Tensor) -> None:
        self._lines = lines.numpy()
        self._num_due = 0
        self.coming: dict[tuple[int, int], torch.Tensor] = {}
        self._fetch: accelerators.Fetch | None = None
        self._values = torch.empty(0)  # what it fetches

    def begin(self, num_shares: int) -> None:
        """A new pass, of so many shares in training: nothing has been put yet."""
        self._num_due = num_shares
        self.coming.clear()
        self._fetch = None

    def put(self, share: int, *numbers: torch.Tensor | float) -> None:
        """Put the first numbers of a share's line."""
        for place, number in enumerate(numbers):
            if isinstance(number, torch.Tensor) and accelerators.computes(number):
                self.coming[share, place] = number
            else:
                self._lines[share, place] = float(number)  # takes a tenth of the tensor's time
        self._num_due -= 1
        if self.coming and not self._num_due:
            self._fetch = self._fetched()

    def settle(self, look_around: Callable[[float], None]) -> None:
        """Bring all numbers to the lines; for ``look_around`` see ``accelerators.await_event``."""
        if self.coming:
            found = (self._fetch or self._fetched()).wait(look_around).numpy()
            for place, number in zip(self.coming, found, strict=True):
                self._lines[place] = number
            self.coming.clear()

    def leave(self, num_shares: int) -> LateTotal | None:
        """The total of the first shares, for later, which ``settle`` then does not wait for.

        None if no copy is pending, or one of weights is.
        """
        if not self.coming or any(place for _, place in self.coming):
            return None
        known = [share for share in range(num_shares) if (share, 0) not in self.coming]
        fetch = self._fetch or self._fetched()
        total = LateTotal(fetch, self._lines[known, 0].tolist(), self._values)
        self.coming.clear()
        return total

    def _fetched(self) -> accelerators.Fetch:
        numbers = list(self.coming.values())
        if len(numbers) == 1 and numbers[0].dtype in _OF_NUMPY:
            self._values = numbers[0].reshape(1)
        else:
            self._values = torch.stack([number.reshape(()).double() for number in numbers])
        return accelerators.Fetch(self._values)
