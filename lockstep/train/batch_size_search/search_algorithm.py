"""The search for a batch size: which sizes are tried, and which of them is taken.

Sizes double. Every sample costs a part of what a step costs by itself (barriers, Python, an update
of all weights), which a larger batch divides among more samples, until the samples themselves are
all that counts: so times per sample fall and then stay. Memory grows in a straight line, so a size
that could not fit is seen coming and not tried.

Nothing here knows how a size is tried: see ``trials``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from lockstep.units import format_bytes

Objective = Literal["speed", "memory"]

# Of the time per sample. Less is no gain: timings move by as much between two runs.
SMALLEST_GAIN = 0.05
# Of the memory that is free. The rest is for what a few steps do not show.
LARGEST_PART = 0.9
# Sizes by memory are found to within this part of their own.
_FINENESS = 8


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A batch size that works.

    Attributes:
        batch_size: samples of the global batch.
        seconds_per_step: the median.
        peak_bytes: what all processes together have taken at most.
    """

    batch_size: int
    seconds_per_step: float
    peak_bytes: int

    @property
    def seconds_per_sample(self) -> float:
        """What is to be small."""
        return self.seconds_per_step / self.batch_size


@dataclass(frozen=True, kw_only=True)
class TooLarge:
    """A batch size that the memory does not suffice for, and how that showed."""

    batch_size: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A batch size that the user's own code cannot work with.

    Attributes:
        batch_size: samples of the global batch.
        reason: in a line.
        error: what it raised.
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
        floor: how far to go below that where the memory does not suffice for it.
        largest: the last size to try.
        limit_bytes: memory that is free; None where nobody can tell.
        try_size: trains a few steps with batches of a size.
        tell: is told of every size what has become of it.
    """

    objective: Objective
    smallest: int
    floor: int
    largest: int
    limit_bytes: int | None
    try_size: Callable[[int], Trial]
    tell: Callable[[Trial], None]
    _fits: list[Measured] = field(default_factory=list, init=False)
    _obstacle: int | None = field(default=None, init=False)  # the smallest size that did not work

    def __post_init__(self) -> None:
        self.smallest = min(self.smallest, self.largest)
        self.floor = min(self.floor, self.smallest)

    def run(self) -> Measured | TooLarge | Failed:
        """Search; what does not fit or fails is returned only if no size worked."""
        first = self._begin()
        if not isinstance(first, Measured):
            return first
        self._double()
        self._refine()
        return self._best()

    @property
    def has_reached_largest(self) -> bool:
        """Whether the search ended because larger sizes were not to be tried."""
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
        """Between the last size that fits and the first that does not there may be a better one."""
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
        # Within what is no gain the smaller batch wins: it makes more updates of an epoch.
        as_fast = [
            one for one in self._fits if (1 - SMALLEST_GAIN) * one.seconds_per_sample <= fastest
        ]
        return min(as_fast, key=lambda one: one.batch_size)

    def _try(self, size: int) -> Trial:
        trial = self._foreseen(size) or self._within_limit(self.try_size(size))
        self.tell(trial)
        if isinstance(trial, Measured):
            self._fits.append(trial)
        elif self._obstacle is None or size < self._obstacle:
            self._obstacle = size
        return trial

    def _foreseen(self, size: int) -> TooLarge | None:
        """Where the straight line through the last two sizes leaves what is free."""
        if self.limit_bytes is None or len(self._fits) < 2:
            return None
        one, other = self._fits[-2:]
        slope = (other.peak_bytes - one.peak_bytes) / (other.batch_size - one.batch_size)
        expected = other.peak_bytes + slope * (size - other.batch_size)
        if expected <= self.limit_bytes:
            return None
        return TooLarge(
            batch_size=size,
            reason=f"not tried: it would take {format_bytes(expected)} "
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
    """A size that takes more than the largest part of what is free."""
    return TooLarge(
        batch_size=batch_size,
        reason=f"it takes {format_bytes(peak_bytes)}, more than {LARGEST_PART:.0%} "
        f"of {format_bytes(limit_bytes)} free {where}".rstrip(),
    )
