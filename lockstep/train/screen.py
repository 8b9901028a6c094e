"""Where progress is shown: in place on a terminal and in a notebook, now and then elsewhere.

Nothing stays of what is shown in place. In a pipe or a file every line stays: there what is being
done before the first step is said only if it takes long, and how far an epoch is ever less often.
"""

import threading
import time
from abc import ABC, abstractmethod
from html import escape
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

REFRESH_SECONDS = 0.2

# In a pipe or a file: what takes less is not spoken of; the pause between two lines doubles.
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

    def __init__(self, console: Console) -> None:
        self._console = console

    @abstractmethod
    def announce(self, doing: str) -> None:
        """Show what is being done, until something else is shown."""

    @abstractmethod
    def begin(self, label: str, steps: int | None, doing: str) -> None:
        """Show that an epoch begins.

        Args:
            label: of the epoch.
            steps: it has; None where nobody knows.
            doing: what is being done until its first step has ended.
        """

    @abstractmethod
    def end_step(self) -> bool:
        """A step has ended; returns whether it is time to show how far the epoch is."""

    @abstractmethod
    def show(self, made: int, steps: int | None, figures: str) -> None:
        """Show how far the epoch is."""

    def say(self, made: int, doing: str) -> None:
        """Show what is being done after the last step."""
        self.show(made, made, doing)

    def print(self, line: str) -> None:
        """Write a line that stays, in place of what was shown."""
        self.close()
        self._write(line)

    def _write(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    @abstractmethod
    def close(self) -> None:
        """Take off what is shown in place."""


class TerminalScreen(Screen):
    """A line at the bottom of a terminal."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live: Progress | None = None
        self._shown = 0.0

    def announce(self, doing: str) -> None:
        self._start(Progress(TextColumn("{task.description}"), **self._options), f"{doing} ...")

    def begin(self, label: str, steps: int | None, doing: str) -> None:
        self._shown = 0.0
        columns = (BarColumn(bar_width=20), MofNCompleteColumn())
        figures = TextColumn("{task.fields[figures]}")
        live = Progress(TextColumn("{task.description}"), *columns, figures, **self._options)
        self._start(live, label, total=steps, figures=doing)

    def end_step(self) -> bool:
        return time.perf_counter() - self._shown >= REFRESH_SECONDS

    def show(self, made: int, steps: int | None, figures: str) -> None:
        self._shown = time.perf_counter()
        assert self._live is not None
        self._live.update(self._live.task_ids[0], completed=made, total=steps, figures=figures)
        self._live.refresh()

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    @property
    def _options(self) -> dict[str, Any]:
        return {"console": self._console, "auto_refresh": False, "transient": True}

    def _start(self, live: Progress, text: str, **fields: Any) -> None:
        self.close()
        live.add_task(text, **fields)
        live.start()
        self._live = live


class NotebookScreen(Screen):
    """One output of a notebook's cell, by IPython's own means: ipywidgets need not be there."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._output: Any = None  # IPython's handle
        self._label = ""
        self._shown = 0.0

    def announce(self, doing: str) -> None:
        self._display(f"{doing} ...")

    def begin(self, label: str, steps: int | None, doing: str) -> None:
        self._label = label
        self.show(0, steps, doing)
        self._shown = 0.0

    def end_step(self) -> bool:
        return time.perf_counter() - self._shown >= REFRESH_SECONDS

    def show(self, made: int, steps: int | None, figures: str) -> None:
        self._shown = time.perf_counter()
        bar = f'<progress value="{made}" max="{steps or ""}"></progress> '
        self._display(_counted(self._label, made, steps, figures), bar)

    def _write(self, line: str) -> None:
        self._console.file.write(f"{line}\n")  # rich makes an output of its own of every line

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
        self._label = ""
        self._pause = FIRST_PAUSE_SECONDS
        self._written = 0.0

    def announce(self, doing: str) -> None:
        self._write_late(LONG_SECONDS, doing)

    def begin(self, label: str, steps: int | None, doing: str) -> None:
        self._label = label
        self._written = time.perf_counter()
        self._write_late(LONG_SECONDS, doing)

    def end_step(self) -> bool:
        self.close()
        return time.perf_counter() - self._written >= self._pause

    def show(self, made: int, steps: int | None, figures: str) -> None:
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
        """Say what is being done if it takes long."""
        self.close()
        if doing:
            self._late = threading.Timer(seconds, self._write, [f"{doing} ..."])
            self._late.daemon = True
            self._late.start()

    def _write(self, line: str) -> None:
        super()._write(line)
        self._written = time.perf_counter()


def _counted(label: str, made: int, steps: int | None, figures: str) -> str:
    """How far an epoch is, in words."""
    return f"{label}  {made}/{'?' if steps is None else steps}  {figures}".rstrip()
