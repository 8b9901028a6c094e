"""The search for a batch size: the sizes to try, and the choice among them.

Sizes double. A step has a fixed cost (barriers, Python, an update of all weights), which a larger
batch divides among more samples, until the cost of the samples dominates: so the time per sample
falls and then stays constant. Memory grows linearly, so a size that cannot fit is predicted and not
tried.

This module is independent of how a size is tried: see ``train.trials``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from lockstep.formatting import format_bytes

Objective = Literal["speed", "memory"]

# The least gain in time per sample; timings of two runs vary by as much.
SMALLEST_GAIN = 0.05
# The part of the free memory to use; the rest is for allocations that a few steps do not show.
LARGEST_PART = 0.9
# The largest size that fits is found to within 1 / _FINENESS of itself.
_FINENESS = 8


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A batch size that works.

    Attributes:
        batch_size: samples of the global batch.
        seconds_per_step: the median.
        peak_bytes: the peak memory of all processes together.
    """

    batch_size: int
    seconds_per_step: float
    peak_bytes: int

    @property
    def seconds_per_sample(self) -> float:
        """The time per sample, which the search minimizes."""
        return self.seconds_per_step / self.batch_size


@dataclass(frozen=True, kw_only=True)
class TooLarge:
    """A batch size that does not fit into memory, and how that was found."""

    batch_size: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A batch size at which the user's own code raises an error.

    Attributes:
        batch_size: samples of the global batch.
        reason: in a line.
        error: the error.
    """

    batch_size: int
    reason: str
    error: BaseException


Trial = Measured | TooLarge | Failed


@dataclass(kw_only=True)
class Doubling:
    """One search.

    Attributes:
        objective: ``"speed"`` is the fastest per sample, ``"memory"`` the largest that fits.
        smallest: the size to begin with.
        floor: the smallest to go down to if that does not fit.
        largest: the last size to try.
        limit_bytes: free memory; None if unknown.
        try_size: trains a few steps with batches of a size.
        report: called with each trial.
    """

    objective: Objective
    smallest: int
    floor: int
    largest: int
    limit_bytes: int | None
    try_size: Callable[[int], Trial]
    report: Callable[[Trial], None]
    _fits: list[Measured] = field(default_factory=list, init=False)
    _obstacle: int | None = field(default=None, init=False)  # the smallest size that did not work

    def __post_init__(self) -> None:
        self.smallest = min(self.smallest, self.largest)
        self.floor = min(self.floor, self.smallest)

    def run(self) -> Measured | TooLarge | Failed:
        """Search; returns a size that does not fit or fails only if no size worked."""
        first = self._begin()
        if not isinstance(first, Measured):
            return first
        self._double()
        self._refine()
        return self._best()

    @property
    def has_reached_largest(self) -> bool:
        """True if the search ended at the largest size allowed."""
        return any(one.batch_size == self.largest for one in self._fits)

    def _begin(self) -> Trial:
        size = self.smallest
        while True:
            trial = self._try(size)
            if not isinstance(trial, TooLarge) or size <= self.floor:
                return trial
            size = max(size // 2, self.floor)

    def _double(self) -> None:
        num_weak = 0
        while self._fits[-1].batch_size < self.largest:
            size = min(2 * self._fits[-1].batch_size, self.largest)
            if self._obstacle is not None and size >= self._obstacle:
                return
            before = min(one.seconds_per_sample for one in self._fits)
            trial = self._try(size)
            if not isinstance(trial, Measured):
                return
            is_weak = trial.seconds_per_sample > (1 - SMALLEST_GAIN) * before
            num_weak = num_weak + 1 if is_weak else 0
            if self.objective == "speed" and num_weak == 2:
                return

    def _refine(self) -> None:
        """Try sizes between the last that fits and the first that does not."""
        rounds = _FINENESS if self.objective == "memory" else int(self._is_still_gaining())
        for _ in range(rounds):
            last = self._fits[-1].batch_size
            if self._obstacle is None or self._obstacle - last <= max(last // _FINENESS, 1):
                return
            middle = (last + self._obstacle) // 2
            self._try(middle - middle % self.floor if middle - last > self.floor else middle)

    def _is_still_gaining(self) -> bool:
        if len(self._fits) < 2:
            return bool(self._fits)
        previous, last = self._fits[-2:]
        return last.seconds_per_sample <= (1 - SMALLEST_GAIN) * previous.seconds_per_sample

    def _best(self) -> Measured:
        if self.objective == "memory":
            return max(self._fits, key=lambda one: one.batch_size)
        fastest = min(one.seconds_per_sample for one in self._fits)
        # Among nearly equal times the smaller batch wins: it makes more updates in an epoch.
        as_fast = [
            one for one in self._fits if (1 - SMALLEST_GAIN) * one.seconds_per_sample <= fastest
        ]
        return min(as_fast, key=lambda one: one.batch_size)

    def _try(self, size: int) -> Trial:
        trial = self._foreseen(size) or self._within_limit(self.try_size(size))
        self.report(trial)
        if isinstance(trial, Measured):
            self._fits.append(trial)
        elif self._obstacle is None or size < self._obstacle:
            self._obstacle = size
        return trial

    def _foreseen(self, size: int) -> TooLarge | None:
        """A size that is too large by linear extrapolation from the last two; else None."""
        if self.limit_bytes is None or len(self._fits) < 2:
            return None
        one, other = self._fits[-2:]
        slope = (other.peak_bytes - one.peak_bytes) / (other.batch_size - one.batch_size)
        expected = other.peak_bytes + slope * (size - other.batch_size)
        if expected <= self.limit_bytes:
            return None
        return TooLarge(
            batch_size=size,
            reason=f"not tried: it would need {format_bytes(expected)} "
            f"of {format_bytes(self.limit_bytes)} free",
        )

    def _within_limit(self, trial: Trial) -> Trial:
        if (
            self.limit_bytes is None
            or not isinstance(trial, Measured)
            or trial.peak_bytes <= LARGEST_PART * self.limit_bytes
        ):
            return trial
        return too_much(trial.batch_size, trial.peak_bytes, self.limit_bytes)


def too_much(batch_size: int, peak_bytes: int, limit_bytes: int, where: str = "") -> TooLarge:
    """A size that needs more than ``LARGEST_PART`` of the free memory."""
    return TooLarge(
        batch_size=batch_size,
        reason=f"it needs {format_bytes(peak_bytes)}, more than {LARGEST_PART:.0%} "
        f"of {format_bytes(limit_bytes)} free {where}".rstrip(),
    )
