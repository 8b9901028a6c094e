"""What the screen shows during ``fit``: a live line on a terminal, plain lines elsewhere."""

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from lockstep.train.screen import Screen
from lockstep.units import format_count, format_seconds

REFRESH_SECONDS = 0.2
_SHOWN_WAIT = 0.1  # of an epoch's time


class ProgressDisplay:
    """Shows the epochs of one ``fit``.

    Args:
        epochs: how many there are.
        steps: steps of an epoch; None where nobody knows before the first has ended.
        console: where to write.
    """

    def __init__(self, epochs: int, steps: int | None, console: Console | None = None) -> None:
        self._console = console or Screen()
        self._epochs = epochs
        self._steps = steps
        self._live: Progress | None = None
        self._epoch = 0
        self._began = 0.0
        self._shown = 0.0
        self._made = 0  # steps of the epoch
        self._samples = 0
        self._total = 0.0
        self._weight = 0.0

    def begin_epoch(self, epoch: int) -> None:
        """Start the clock and the bar of an epoch."""
        self._epoch = epoch
        self._began = time.perf_counter()
        self._shown = 0.0
        self._made, self._samples, self._total, self._weight = 0, 0, 0.0, 0.0
        if self._console.is_terminal:
            self._live = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                console=self._console,
                auto_refresh=False,
                transient=True,
            )
            self._live.add_task(self._label(), total=self._steps, figures="")
            self._live.start()

    def end_step(self, step: int, total: float, weight: float, samples: int) -> None:
        """Count a step, and show it if the last time is long enough ago."""
        self._made = step + 1
        self._samples += samples
        self._total += total
        self._weight += weight
        now = time.perf_counter()
        if self._live is None or now - self._shown < REFRESH_SECONDS:
            return
        self._shown = now
        elapsed = now - self._began
        loss = self._total / self._weight if self._weight else float("nan")
        self._live.update(
            self._live.task_ids[0],
            completed=self._made,
            figures=f"loss {loss:.4f}  {self._rate(elapsed)}{self._left(elapsed)}",
        )
        self._live.refresh()

    def say(self, text: str) -> None:
        """Show what is going on now, such as validation."""
        if self._live is not None:
            self._live.update(
                self._live.task_ids[0], completed=self._made, total=self._made, figures=text
            )
            self._live.refresh()

    def end_epoch(self, logs: dict[str, Any], *, input_wait: float = 0.0) -> None:
        """Replace the bar by the epoch's line.

        Args:
            logs: the epoch's values.
            input_wait: how much of its time was spent waiting for data, from 0 to 1.
        """
        elapsed = time.perf_counter() - self._began
        self._steps = self._steps or self._made  # the next may well be as long
        self.close()
        wait = f"input wait {input_wait:.0%}  " if input_wait > _SHOWN_WAIT else ""
        values = "  ".join(f"{name} {_short(value)}" for name, value in logs.items())
        self._console.print(
            f"{self._label()}  {format_seconds(elapsed)}  {self._rate(elapsed)}  {wait}{values}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )

    def close(self) -> None:
        """Take the bar off the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _label(self) -> str:
        width = len(str(self._epochs))
        return f"Epoch {self._epoch + 1:>{width}}/{self._epochs}"

    def _left(self, elapsed: float) -> str:
        """How long the rest of the epoch takes, where anybody can tell."""
        if self._steps is None or self._steps < self._made:
            return ""
        return f"  {format_seconds(elapsed / self._made * (self._steps - self._made))} left"

    def _rate(self, seconds: float) -> str:
        return f"{format_count(round(self._samples / max(seconds, 1e-9)))} samples/s"


def _short(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.2e}" if 0 < abs(value) < 1e-3 else f"{value:.4f}"
