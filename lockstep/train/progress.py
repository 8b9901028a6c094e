"""What the screen shows during ``fit``: a live line on a terminal, plain lines elsewhere."""

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from lockstep.units import format_count, format_seconds

_REFRESH_SECONDS = 0.2


class ProgressDisplay:
    """Shows the epochs of one ``fit``.

    Args:
        epochs: how many there are.
        steps: steps of an epoch.
        console: where to write.
    """

    def __init__(self, epochs: int, steps: int, console: Console | None = None) -> None:
        self._console = console or Console()
        self._epochs = epochs
        self._steps = steps
        self._live: Progress | None = None
        self._epoch = 0
        self._began = 0.0
        self._shown = 0.0
        self._samples = 0
        self._total = 0.0
        self._weight = 0.0

    def begin_epoch(self, epoch: int) -> None:
        """Start the clock and the bar of an epoch."""
        self._epoch = epoch
        self._began = time.perf_counter()
        self._shown = 0.0
        self._samples, self._total, self._weight = 0, 0.0, 0.0
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
        self._samples += samples
        self._total += total
        self._weight += weight
        now = time.perf_counter()
        if self._live is None or now - self._shown < _REFRESH_SECONDS:
            return
        self._shown = now
        elapsed = now - self._began
        left = elapsed / (step + 1) * (self._steps - step - 1)
        loss = self._total / self._weight if self._weight else float("nan")
        self._live.update(
            self._live.task_ids[0],
            completed=step + 1,
            figures=f"loss {loss:.4f}  {self._rate(elapsed)}  {format_seconds(left)} left",
        )
        self._live.refresh()

    def say(self, text: str) -> None:
        """Show what is going on now, such as validation."""
        if self._live is not None:
            self._live.update(self._live.task_ids[0], completed=self._steps, figures=text)
            self._live.refresh()

    def end_epoch(self, logs: dict[str, Any]) -> None:
        """Replace the bar by the epoch's line."""
        elapsed = time.perf_counter() - self._began
        self.close()
        values = "  ".join(f"{name} {_short(value)}" for name, value in logs.items())
        self._console.print(
            f"{self._label()}  {format_seconds(elapsed)}  {self._rate(elapsed)}  {values}",
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

    def _rate(self, seconds: float) -> str:
        return f"{format_count(round(self._samples / max(seconds, 1e-9)))} samples/s"


def _short(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
