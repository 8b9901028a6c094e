"""What is shown during ``fit``: what is done before the first step, then how far the epochs are."""

import time
from typing import Any

from rich.console import Console

from lockstep.train.output_console import OutputConsole
from lockstep.train.screen import make_screen
from lockstep.units import format_count, format_seconds

_SHOWN_WAIT = 0.1  # of an epoch's time


class ProgressDisplay:
    """Shows the epochs of one ``fit``.

    Args:
        epochs: how many there are.
        steps: steps of an epoch; None where nobody knows before the first has ended.
        console: where to write.
    """

    def __init__(self, epochs: int, steps: int | None, console: Console | None = None) -> None:
        self._screen = make_screen(console or OutputConsole())
        self._epochs = epochs
        self._steps = steps
        self._has_begun = False
        self._epoch = 0
        self._began = 0.0
        self._made = 0  # steps of the epoch
        self._samples = 0
        self._total = 0.0
        self._weight = 0.0

    def announce(self, doing: str) -> None:
        """Show what is being done before the first step."""
        self._screen.announce(doing)

    def begin_epoch(self, epoch: int) -> None:
        """Start the clock and the bar of an epoch."""
        self._epoch = epoch
        self._began = time.perf_counter()
        self._made, self._samples, self._total, self._weight = 0, 0, 0.0, 0.0
        self._screen.begin(self._label(), self._steps, "" if self._has_begun else "First step")
        self._has_begun = True

    def end_step(self, step: int, total: float, weight: float, samples: int) -> None:
        """Count a step, and show it if the last time is long enough ago."""
        self._made = step + 1
        self._samples += samples
        self._total += total
        self._weight += weight
        if self._screen.end_step():
            elapsed = time.perf_counter() - self._began
            loss = self._total / self._weight if self._weight else float("nan")
            figures = f"loss {loss:.4f}  {self._rate(elapsed)}{self._left(elapsed)}"
            self._screen.show(self._made, self._steps, figures)

    def say(self, text: str) -> None:
        """Show what is going on now, such as validation."""
        self._screen.say(self._made, text)

    def notice(self, text: str) -> None:
        """Show what has happened, in a line that stays."""
        self._screen.print(text)

    def end_epoch(self, logs: dict[str, Any], *, input_wait: float = 0.0) -> None:
        """Replace the bar by the epoch's line.

        Args:
            logs: the epoch's values.
            input_wait: how much of its time was spent waiting for data, from 0 to 1.
        """
        elapsed = time.perf_counter() - self._began
        self._steps = self._steps or self._made  # the next may well be as long
        wait = f"input wait {input_wait:.0%}  " if input_wait > _SHOWN_WAIT else ""
        values = "  ".join(f"{name} {_short(value)}" for name, value in logs.items())
        self._screen.print(
            f"{self._label()}  {format_seconds(elapsed)}  {self._rate(elapsed)}  {wait}{values}"
        )

    def close(self) -> None:
        """Take off the screen what was shown in place."""
        self._screen.close()

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
