"""The display of ``fit``: the preparation before the first step, then the progress of epochs.

A ``Screen`` shows it: in place on a terminal and in a notebook, as occasional lines elsewhere. Text
that is shown in place does not stay. In a pipe or a file every line stays: there preparation is
reported only if it takes long, and an epoch's progress at growing intervals.

The console is standard output until writing fails, and then nothing: the display must not end the
training. A closed pipe (``| head -1``), a full disk behind a file, a closed descriptor, a lost
terminal: the rest is not shown, and Python reports the loss when the script ends.
"""

import io
import math
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, SupportsFloat, TextIO, cast

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lockstep.formatting import format_count, format_seconds, format_value


class OutputConsole(Console):
    """A console on the present standard output.

    Args:
        quiet: show nothing.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        super().__init__(file=cast(TextIO, _Output()), quiet=quiet)

    def show_line(self, line: str) -> None:
        """Write a line as it is."""
        self.print(line, highlight=False, markup=False, soft_wrap=True)


class _Output(io.TextIOBase):
    """``sys.stdout``, until it fails."""

    def __init__(self) -> None:
        self._has_failed = False

    @property
    def _stream(self) -> TextIO | None:
        stream = None if self._has_failed else sys.stdout
        # While a live line is shown, rich has replaced the stream.
        return getattr(stream, "rich_proxied_file", stream)

    @property
    def encoding(self) -> str:  # type: ignore[override]  # an attribute in the base
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        try:
            return self._stream is not None and self._stream.isatty()
        except (AttributeError, ValueError):  # a stream of the user's own, or one that is closed
            return False

    def write(self, text: str) -> int:
        """Write if possible; characters that the stream cannot encode become question marks."""
        known = text.encode(self.encoding, "replace").decode(self.encoding)
        self._try("write", known)
        return len(text)

    def flush(self) -> None:
        self._try("flush")

    def _try(self, method: str, *args: Any) -> None:
        stream = self._stream
        if stream is None:
            return
        try:
            getattr(stream, method)(*args)
        except (OSError, ValueError):  # the second if Python has closed the stream
            self._has_failed = True


REFRESH_SECONDS = 0.2

# In a pipe or a file: shorter preparation is not shown; the pause between two lines doubles.
LONG_SECONDS = 2.0
FIRST_PAUSE_SECONDS = 10.0
LONGEST_PAUSE_SECONDS = 640.0


def make_screen(console: Console) -> "Screen":
    """The kind of screen that a console is."""
    if console.is_jupyter:
        return NotebookScreen(console)
    return TerminalScreen(console) if console.is_terminal else LineScreen(console)


class Screen(ABC):
    """Where progress is shown.

    Args:
        console: where to write.
    """

    seconds_between_values = REFRESH_SECONDS
    """How often to compute more than the loss for the display."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown = 0.0
        self._label = ""

    @abstractmethod
    def announce(self, doing: str) -> None:
        """Show what is being done, until something else is shown."""

    def begin(self, label: str, steps: int | None, doing: str) -> None:
        """Show that an epoch begins.

        Args:
            label: of the epoch.
            steps: of the epoch; None if unknown.
            doing: a text to show until its first step has ended.
        """
        self._label = label
        self.show(0, steps, [doing] if doing else [])
        self._shown = 0.0

    def end_step(self) -> bool:
        """Called after a step; True if it is time to show the epoch's progress."""
        return time.perf_counter() - self._shown >= REFRESH_SECONDS

    @abstractmethod
    def show(self, made: int, steps: int | None, figures: Sequence[str]) -> None:
        """Show the epoch's progress.

        Args:
            made: steps made in the epoch.
            steps: of the epoch; None if unknown.
            figures: the most important first: the last ones are left out if they do not fit.
        """

    def say(self, made: int, doing: str) -> None:
        """Show what is being done after the last step."""
        self.show(made, made, [doing])

    def print(self, line: str) -> None:
        """Write a line that stays, in place of what was shown."""
        self.close()
        self._write(line)

    def _write(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    @abstractmethod
    def close(self) -> None:
        """Remove the text that is shown in place."""


class TerminalScreen(Screen):
    """A line at the bottom of a terminal."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live: Live | None = None

    def announce(self, doing: str) -> None:
        self._display(_one_line(f"{doing} ..."))

    def show(self, made: int, steps: int | None, figures: Sequence[str]) -> None:
        self._shown = time.perf_counter()
        self._display(_line(self._console.width, self._label, made, steps, figures))

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _display(self, line: RenderableType) -> None:
        if self._live is None:
            self._live = Live(line, console=self._console, auto_refresh=False, transient=True)
            self._live.start(refresh=True)
        else:
            self._live.update(line, refresh=True)


_WIDEST_BAR, _NARROWEST_BAR = 20, 10
_LEAST_WIDTH_FOR_BAR = 70


def _line(
    width: int, label: str, made: int, steps: int | None, figures: Sequence[str]
) -> RenderableType:
    """A line that fits: the epoch's progress, then as many figures as fit."""
    head = f"{label} {_counts(made, steps)}"
    if cell_len(head) > width:
        return _one_line(_counts(made, steps))
    has_bar = width >= _LEAST_WIDTH_FOR_BAR
    room = width - cell_len(head) - has_bar * (_NARROWEST_BAR + 1)
    shown = ""
    for figure in figures:
        if cell_len(f"{shown}  {figure}") > room:
            break
        shown += f"  {figure}"
    if not has_bar:
        return _one_line(head + shown)
    bar = max(min(_WIDEST_BAR, _NARROWEST_BAR + room - cell_len(shown)), 1)
    line = Table.grid(padding=(0, 1))
    done = ProgressBar(total=steps, completed=made, width=bar)
    line.add_row(_one_line(label), done, _one_line(_counts(made, steps) + shown))
    return line


def _one_line(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")


def _counts(made: int, steps: int | None) -> str:
    """Steps made, of how many; of constant width, so that the rest of the line does not move."""
    return f"{made}/?" if steps is None else f"{made:>{len(str(steps))}}/{steps}"


class NotebookScreen(Screen):
    """One output of a notebook's cell, by IPython alone, without ipywidgets."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._output: Any = None  # IPython's handle

    def announce(self, doing: str) -> None:
        self._display(f"{doing} ...")

    def show(self, made: int, steps: int | None, figures: Sequence[str]) -> None:
        self._shown = time.perf_counter()
        bar = f'<progress value="{made}" max="{steps or ""}"></progress> '
        self._display(_counted(self._label, made, steps, figures), bar)

    def _write(self, line: str) -> None:
        self._console.file.write(f"{line}\n")  # rich would make a separate output of every line

    def close(self) -> None:
        if self._output is not None:
            self._display("")

    def _display(self, text: str, bar: str = "") -> None:
        contents = {"text/plain": text, "text/html": f"{bar}<code>{escape(text)}</code>"}
        if self._output is None:
            from IPython.display import display

            self._output = display(contents, raw=True, display_id=True)
        else:
            self._output.update(contents, raw=True)


class LineScreen(Screen):
    """Lines in a pipe or a file."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._late: threading.Timer | None = None
        self._pause = FIRST_PAUSE_SECONDS
        self._written = 0.0

    @property
    def seconds_between_values(self) -> float:  # type: ignore[override]  # fixed in the base
        return self._pause

    def announce(self, doing: str) -> None:
        self._write_late(LONG_SECONDS, doing)

    def begin(self, label: str, steps: int | None, doing: str) -> None:
        self._label = label
        self._written = time.perf_counter()
        self._write_late(LONG_SECONDS, doing)

    def end_step(self) -> bool:
        self.close()
        return time.perf_counter() - self._written >= self._pause

    def show(self, made: int, steps: int | None, figures: Sequence[str]) -> None:
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        self.print(_counted(self._label, made, steps, figures))

    def say(self, made: int, doing: str) -> None:
        self._write_late(FIRST_PAUSE_SECONDS, f"{self._label}  {doing}")

    def close(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late.join()
            self._late = None

    def _write_late(self, seconds: float, doing: str) -> None:
        """Show a text after a delay, unless something else is shown before."""
        self.close()
        if doing:
            self._late = threading.Timer(seconds, self._write, [f"{doing} ..."])
            self._late.daemon = True
            self._late.start()

    def _write(self, line: str) -> None:
        super()._write(line)
        self._written = time.perf_counter()


def _counted(label: str, made: int, steps: int | None, figures: Sequence[str]) -> str:
    """An epoch's progress, as plain text."""
    return "  ".join([label, _counts(made, steps).strip(), *figures])


_SHOWN_WAIT = 0.1  # of an epoch's time


class ProgressDisplay:
    """Shows the epochs of one ``fit``.

    Args:
        epochs: their number.
        steps: of an epoch; None if unknown before the first has ended.
        console: where to write.
        rates: returns the present learning rates, to show beside the loss.
    """

    def __init__(
        self,
        epochs: int,
        steps: int | None,
        console: Console | None = None,
        rates: Callable[[], Sequence[float]] = tuple,
    ) -> None:
        self._screen = make_screen(console or OutputConsole())
        self._rates = rates
        self._epochs = epochs
        self._steps = steps
        self._has_begun = False
        self._epoch = 0
        self._began = 0.0
        self._made = 0  # steps of the epoch
        self._counted = 0  # of these, since the clock was started
        self._samples = 0
        self._totals: list[SupportsFloat] = []
        self._weight = 0.0
        self._values: dict[str, Any] = {}

    def announce(self, doing: str) -> None:
        """Show what is being done before the first step."""
        self._screen.announce(doing)

    def begin_epoch(self, epoch: int) -> None:
        """Start the clock and the bar of an epoch."""
        self._epoch = epoch
        self._began = time.perf_counter()
        self._made, self._samples, self._totals, self._weight = 0, 0, [], 0.0
        self._values = {}
        self._counted = 0
        self._screen.begin(self._label(), self._steps, "" if self._has_begun else "First step")
        self._has_begun = True

    def end_step(self, step: int, total: SupportsFloat, weight: float, samples: int) -> None:
        """Count a step, and show progress if the last time is long enough ago.

        Until then the totals are not read: a device may still be computing the last.
        """
        self._made = step + 1
        self._counted += 1
        self._samples += samples
        self._totals.append(total)
        self._weight += weight
        if self._screen.end_step():
            self._totals = [math.fsum(self._totals)]
            elapsed = time.perf_counter() - self._began
            loss = float(self._totals[0]) / self._weight if self._weight else float("nan")
            figures = [f"loss {format_value(loss)}", *self._left(elapsed)]
            figures += (f"{name} {format_value(value)}" for name, value in self._values.items())
            if rates := self._rates():
                figures.append(f"lr {', '.join(f'{rate:.3g}' for rate in rates)}")
            self._screen.show(self._made, self._steps, [*figures, self._rate(elapsed)])

    def note_values(self, values: Mapping[str, Any]) -> None:
        """Set values to show beside the loss, such as metrics of the epoch so far."""
        self._values.update(values)

    @property
    def seconds_between_values(self) -> float:
        """See ``Screen``."""
        return self._screen.seconds_between_values

    def say(self, text: str) -> None:
        """Show a present activity, such as validation."""
        self._screen.say(self._made, text)

    def notice(self, text: str) -> None:
        """Show a line that stays."""
        self._screen.print(text)

    def end_epoch(self, logs: dict[str, Any], *, input_wait: float = 0.0) -> None:
        """Replace the bar by the epoch's line.

        Args:
            logs: the epoch's values.
            input_wait: the fraction of its time spent waiting for data, from 0 to 1.
        """
        elapsed = time.perf_counter() - self._began
        rate = f"{self._rate(elapsed)}  " if self._counted else ""  # all made before a resume
        self._steps = self._steps or self._made  # the next is probably as long
        wait = f"input wait {input_wait:.0%}  " if input_wait > _SHOWN_WAIT else ""
        values = "  ".join(f"{name} {format_value(value)}" for name, value in logs.items())
        self._screen.print(f"{self._label()}  {format_seconds(elapsed)}  {rate}{wait}{values}")

    def close(self) -> None:
        """Remove the text that is shown in place."""
        self._screen.close()

    def _label(self) -> str:
        width = len(str(self._epochs))
        return f"Epoch {self._epoch + 1:>{width}}/{self._epochs}"

    def _left(self, elapsed: float) -> list[str]:
        """The remaining time of the epoch, if known."""
        if self._steps is None or self._steps < self._made:
            return []
        return [f"{format_seconds(elapsed / self._counted * (self._steps - self._made))} left"]

    def _rate(self, seconds: float) -> str:
        return f"{format_count(round(self._samples / max(seconds, 1e-9)))} samples/s"
