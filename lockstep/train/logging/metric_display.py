"""Shows metrics within an epoch, about as often as the screen changes.

To compute a metric, rank 0 needs the states of all ranks. So ranks agree on the steps after which
these are gathered: each time rank 0 decides after how many more steps. Ranks keep their states, so
showing metrics does not change them.
"""

import time

from lockstep.parallel.exchange.control import Control
from lockstep.train.callbacks.rank_sync import RankSync
from lockstep.train.logging.metrics import Metrics


class ShowTimes:
    """The steps after which values are shown that need all ranks: the first, and then regularly.

    They are the same on all ranks.

    Args:
        control: this rank's line to the others.
        seconds: from one time to the next, equal on all ranks; 0 is never.
    """

    def __init__(self, control: Control, seconds: float) -> None:
        self._control = control
        self._seconds = seconds
        self._made, self._next = 0, 1
        self._began = time.perf_counter()

    def is_due(self) -> bool:
        """Count a step; True if values are shown after it."""
        self._made += 1
        return self._seconds > 0 and self._made >= self._next

    def set_next(self) -> None:
        """Agree on the next time, after at most as many steps as were made so far."""
        seconds_per_step = (time.perf_counter() - self._began) / self._made
        wait = max(min(self._made, int(self._seconds / seconds_per_step)), 1)
        self._next = self._made + self._control.broadcast(wait)


class MetricShows:
    """The metrics of one epoch, as rank 0 shows them.

    Args:
        rank_sync: the ranks.
        metrics: this rank's.
    """

    def __init__(self, rank_sync: RankSync, metrics: Metrics) -> None:
        self._control, self._driver = rank_sync.control, rank_sync.driver
        self._metrics = metrics
        seconds = 0.0
        if metrics and not rank_sync.worker.has_local_steps:  # they meet at an epoch's end
            seconds = self._control.broadcast(self._driver.seconds_between_metrics)
        self._times = ShowTimes(self._control, seconds)

    def end_step(self) -> None:
        """Called after each step of all ranks."""
        if not self._times.is_due():
            return
        found = self._metrics.values_so_far(self._control)
        if self._control.rank == 0:
            self._driver.show_metrics(found)
        self._times.set_next()
