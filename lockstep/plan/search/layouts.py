"""The layout of stages whose step is shortest, by dynamic programming over units and devices.

A step takes the sum of the stages' turns, and the rest of the stage for which that is most
(``plan.cost.staged``). For a bound on the rest, the least sum is found from the last stage to the
first: of the units from each one on, on each number of devices. Then the bound is set below the
rest that was found, again and again, until even the least rest that is possible with the least sum
found so far would be no better. So the result is the optimum over all layouts considered: for each
number of microbatches all runs of units and all numbers of replicas, on any of the first devices.

Where that would be too many, every stage has as many replicas (``uniform``), and a model of many
units is cut at some places only.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lockstep.plan.cost.placement import Placement
from lockstep.plan.cost.profile import Profile
from lockstep.plan.cost.staged import Layout
from lockstep.plan.search.intervals import Intervals, RunCosts

Vector = NDArray[np.float64]
Indices = NDArray[np.int64]

# Units times devices, squared: up to here any stage may have any number of replicas.
_MOST_UNEVEN = 4_000_000

# So many units, merged from more of them, where replicas are equal.
_MOST_UNITS = 128

# A usual number of stages on many devices.
_MIDDLING_STAGES = 16

# What is longer by less than this is as long: sums in another order differ by rounding.
_SAME = 1e-9


@dataclass(frozen=True)
class Found:
    """A layout and the seconds of its step."""

    seconds: float
    layout: Layout


def best_layouts(
    profile: Profile,
    placement: Placement,
    batch_size: int,
    shares: Iterable[int],
    *,
    recompute: Sequence[bool] = (False,),
) -> dict[tuple[int, bool], Found]:
    """The best layout for each number of microbatches, with and without recomputation.

    Left out are those that cannot be better than one that was found, and those that do not fit
    into memory.
    """
    is_uneven = (profile.num_units * len(placement)) ** 2 <= _MOST_UNEVEN
    if not is_uneven and profile.num_units > _MOST_UNITS:
        return _merged(profile, placement, batch_size, shares, recompute)
    intervals, size = Intervals(profile, placement, batch_size), profile.num_units
    found: dict[tuple[int, bool], Found] = {}
    counts = sorted(set(shares), key=lambda count: (abs(count - len(placement)), count))
    problems = {
        (count, again): _Problem(intervals, placement, size, count, recompute=again)
        for again in recompute
        for count in counts
    }
    # The best of the few layouts with equal replicas bounds the search of all others.
    searches = [_Problem.uniform, _Problem.uneven] if is_uneven else [_Problem.uniform]
    best = math.inf
    for search in searches:
        for key, problem in problems.items():
            one = search(problem, best)
            if one is not None:
                found[key] = one
                best = one.seconds
    return found


def _merged(
    profile: Profile,
    placement: Placement,
    batch_size: int,
    shares: Iterable[int],
    recompute: Sequence[bool],
) -> dict[tuple[int, bool], Found]:
    """The best of layouts that cut a long model at some places only."""
    starts = [profile.num_units * one // _MOST_UNITS for one in range(_MOST_UNITS)]
    few = best_layouts(profile.merged(starts), placement, batch_size, shares, recompute=recompute)
    return {
        key: replace(
            found,
            layout=replace(
                found.layout, starts=tuple(starts[start] for start in found.layout.starts)
            ),
        )
        for key, found in few.items()
    }


def share_counts(batch_size: int, num_devices: int) -> list[int]:
    """Numbers of microbatches worth a try: powers of two, and a whole one for each device."""
    most = min(batch_size, 8 * num_devices)
    powers = {1 << power for power in range(most.bit_length()) if 1 << power <= most}
    few = range(1, min(most, 16) + 1)
    return sorted({*powers, *few, *(one for one in (num_devices,) if one <= most)})


class _Problem:
    """One number of microbatches."""

    def __init__(
        self, intervals: Intervals, placement: Placement, size: int, shares: int, *, recompute: bool
    ) -> None:
        self._intervals = intervals
        self._num_devices = len(placement)
        self._size = size
        self._shares = shares
        self._recompute = recompute

    def uneven(self, best: float) -> Found | None:
        """The best of all layouts; None if none is better than ``best`` seconds."""
        return self._searched(_Table(self._size, self._uneven_places(), self._costs), best)

    def uniform(self, best: float) -> Found | None:
        """The best of layouts with as many replicas of every stage."""
        found = None
        for replicas in self._replica_counts():
            table = _Table(self._size, self._uniform_places(replicas), self._costs)
            one = self._searched(table, best)
            if one is not None:
                found, best = one, one.seconds
        return found

    def _replica_counts(self) -> list[int]:
        """Those with a middling number of stages first: a good layout prunes the others."""
        most = min(self._num_devices, self._shares)
        counts = {1 << power for power in range(most.bit_length())} | {most}
        middling = self._num_devices / _MIDDLING_STAGES
        return sorted(counts, key=lambda count: (abs(math.log(count / middling)), count))

    def _uneven_places(self) -> list[tuple[int, int]]:
        return [
            (behind, replicas)
            for behind in range(self._num_devices)
            for replicas in range(1, min(self._num_devices - behind, self._shares) + 1)
        ]

    def _uniform_places(self, replicas: int) -> list[tuple[int, int]]:
        stages = min(self._num_devices // replicas, self._size)
        return [(stage * replicas, replicas) for stage in range(stages)]

    def _costs(self, behind: int, replicas: int) -> RunCosts:
        return self._intervals.of(behind, replicas, self._shares, recompute=self._recompute)

    def _searched(self, table: "_Table", best: float) -> Found | None:
        """Bound the rest by less and less."""
        least_turn, found = self._least_turn(), None
        if max(least_turn, least_turn * self._shares / table.num_devices) >= best:
            return None
        least_rest = table.least_rests()
        if least_turn + min(least_rest.values(), default=math.inf) >= best:
            return None
        bound = best - least_turn
        while True:
            table.fill(bound)
            rests = []
            for used in table.reached():
                turns = table.least_turns(used)
                if turns + least_rest[used] >= best * (1 - _SAME):
                    continue
                path = table.path(used)
                rests.append(path.rest)
                if turns + path.rest < best * (1 - _SAME):
                    best = turns + path.rest
                    found = Found(best, self._layout(path))
            if not rests:
                return found
            bound = max(rests)

    def _least_turn(self) -> float:
        return self._intervals.least_turn(self._shares, recompute=self._recompute)

    def _layout(self, path: "_Path") -> Layout:
        return Layout(path.starts, path.replicas, self._shares, self._recompute)


@dataclass(frozen=True)
class _Path:
    """A way through the table, and the rest of the stage for which that is most."""

    starts: tuple[int, ...]
    replicas: tuple[int, ...]
    rest: float


class _Table:
    """The least sum of turns of the units from each one on, by the number of devices.

    Args:
        size: units of the model.
        places: of stages: ranks of later stages, and replicas; the former rise.
        costs: of the runs of units at a place.
    """

    def __init__(
        self, size: int, places: Sequence[tuple[int, int]], costs: Callable[[int, int], RunCosts]
    ) -> None:
        self._size = size
        self._places = places
        self._costs = costs
        self._sums: dict[int, Vector] = {}
        self._stops: dict[int, Indices] = {}
        self._replicas: dict[int, Indices] = {}

    def least_rests(self) -> dict[int, float]:
        """For each number of devices the least rest that the longest stage can have."""
        least = {0: self._ending()}
        for behind, replicas in self._places:
            if behind in least:
                joined = np.maximum(self._costs(behind, replicas).rest, least[behind][None, :])
                values = joined.min(axis=1)
                known = least.get(behind + replicas)
                least[behind + replicas] = values if known is None else np.minimum(known, values)
        return {used: float(values[0]) for used, values in least.items() if used}

    @property
    def num_devices(self) -> int:
        """At most so many are in use."""
        return sum(self._places[-1])

    def fill(self, bound: float) -> None:
        """Fill the table with runs whose rest is less than ``bound``."""
        self._sums = {0: self._ending()}
        for behind, replicas in self._places:
            if behind in self._sums:
                self._extend(behind, replicas, bound)

    def _extend(self, behind: int, replicas: int, bound: float) -> None:
        costs, used = self._costs(behind, replicas), behind + replicas
        allowed = (
            costs.turn if bound == math.inf else np.where(costs.rest < bound, costs.turn, np.inf)
        )
        sums = allowed + self._sums[behind][None, :]
        stops = sums.argmin(axis=1)
        values = sums[np.arange(self._size + 1), stops]
        if used not in self._sums:
            self._sums[used] = np.full(self._size + 1, np.inf)
            self._stops[used] = np.zeros(self._size + 1, np.int64)
            self._replicas[used] = np.zeros(self._size + 1, np.int64)
        better = values < self._sums[used]
        self._sums[used][better] = values[better]
        self._stops[used][better] = stops[better]
        self._replicas[used][better] = replicas

    def _ending(self) -> Vector:
        """No unit is left, and no device in use."""
        ending = np.full(self._size + 1, np.inf)
        ending[self._size] = 0.0
        return ending

    def reached(self) -> list[int]:
        """Numbers of devices on which the whole model is."""
        return [used for used, sums in self._sums.items() if used and sums[0] < math.inf]

    def least_turns(self, used: int) -> float:
        """The least turn of the whole model on so many devices."""
        return float(self._sums[used][0])

    def path(self, used: int) -> _Path:
        """The stages of the least sum on so many devices."""
        start, starts, replicas, rests = 0, [], [], []
        while used:
            stop, count = int(self._stops[used][start]), int(self._replicas[used][start])
            used -= count
            starts.append(start)
            replicas.append(count)
            rests.append(float(self._costs(used, count).rest[start, stop]))
            start = stop
        return _Path(tuple(starts), tuple(replicas), max(rests))
