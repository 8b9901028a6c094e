"""Reports losses and metrics within an epoch, after each batch or as often as the screen changes.

To compute a metric, rank 0 needs the states of all ranks. So ranks agree on the batches after which
these are gathered: each time rank 0 decides after how many more. Then each rank has its own states
again, so a report does not change the metrics of the epoch.
"""

import time
from collections.abc import Callable

from lockstep.parallel.exchange.control import Control
from lockstep.train.fit.fit_hooks import ReportTimes
from lockstep.train.logging.metrics import Metrics

# A bar is drawn at most so often.
_SECONDS = 0.05


class Reports:
    """The batches of an epoch or an evaluation after which values are reported.

    They are the same on all ranks: all, or the first and then some regularly, or none.

    Args:
        metrics: this rank's.
        control: its line to the others.
        times: after which batches.
        seconds: from one report to the next, if they are "timed"; equal on all ranks, 0 is never,
            None as often as a bar is drawn.

    Attributes:
        are_wanted: there are any.
    """

    def __init__(
        self,
        metrics: Metrics,
        control: Control,
        times: ReportTimes,
        seconds: float | None = None,
    ) -> None:
        self._metrics = metrics
        self._control = control
        self._is_each = times == "each"
        self._seconds = 0.0
        if times == "timed":
            self._seconds = _SECONDS if seconds is None else seconds
        self.are_wanted = self._is_each or bool(self._seconds)
        self._made, self._next = 0, 1
        self._began = time.perf_counter()

    def end_batch(self, report: Callable[[], None]) -> bool:
        """Report if it is due, while rank 0 has the metrics of all ranks; returns True then."""
        self._made += 1
        if self._is_each:  # callbacks may look at the metrics themselves
            self._metrics.join(self._control)
            report()
            return True
        if not self._seconds or self._made < self._next:
            return False
        with self._metrics.joined(self._control):
            report()
        self._set_next()
        return True

    def _set_next(self) -> None:
        """Agree on the next time, after at most as many batches as there were so far."""
        seconds_per_batch = (time.perf_counter() - self._began) / self._made
        wait = max(min(self._made, int(self._seconds / seconds_per_batch)), 1)
        self._next = self._made + self._control.broadcast(wait)
