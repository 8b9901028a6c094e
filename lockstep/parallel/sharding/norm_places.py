"""Places of BatchNorm layers among the units, in the order in which a model uses both.

Ranks exchange statistics of the batch at each such layer, and each waits there for all. A rank
whose samples skip units before the layer takes part in their gathers before it waits: otherwise it
would wait for a rank that waits for its pieces. The places are open until every unit was
used: it is unknown on which side of a layer a parameter lies that no samples have used so far.
"""

from collections.abc import Sequence


class NormPlaces:
    """Before which unit each BatchNorm layer stands.

    Args:
        num_norms: how many there are.
    """

    def __init__(self, num_norms: int) -> None:
        # By layer, the units that a pass of this rank has used before its first use of the layer.
        self._before: list[set[int]] = [set() for _ in range(num_norms)]
        self._noted: set[int] = set()
        self._used: set[int] = set()  # in any pass
        self._units_before = [0] * num_norms  # those that come and go, in the order

    def begin(self) -> None:
        """A forward pass begins."""
        self._noted.clear()

    def note(self, norm: int, used: Sequence[int]) -> None:
        """The pass is at a layer, and has used these units."""
        if norm not in self._noted:
            self._noted.add(norm)
            self._before[norm].update(used)

    def end(self, used: Sequence[int]) -> None:
        """A forward pass ends that has used these units."""
        self._used.update(used)

    def row(self, num_units: int) -> list[int]:
        """What the other ranks need to know of this one: as many numbers on each."""
        sets = (*self._before, self._used)
        flags = [int(unit in units) for units in sets for unit in range(num_units)]
        return [int(bool(self._noted)), *flags]

    def settle(
        self, rows: Sequence[Sequence[int]], order: Sequence[int], staying: set[int]
    ) -> bool:
        """Find the places; returns False if they are open.

        Args:
            rows: of all ranks.
            order: of all units.
            staying: units that are never away.
        """
        has_norms, *flags = (any(column) for column in zip(*rows, strict=True))
        count = len(order)
        for norm in range(len(self._before)):
            units = flags[norm * count : (norm + 1) * count]
            last = max((place for place, unit in enumerate(order) if units[unit]), default=-1)
            self._units_before[norm] = sum(unit not in staying for unit in order[: last + 1])
        is_used = flags[-count:]
        return not has_norms or all(is_used[unit] or unit in staying for unit in order)

    def units_before(self, norm: int) -> int:
        """How many units that come and go stand before a layer."""
        return self._units_before[norm]
