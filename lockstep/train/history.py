"""The result of ``fit``."""

from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from lockstep.errors import OptionError
from lockstep.extras import import_extra
from lockstep.formatting import format_value, listed


@dataclass
class History:
    """Values of every epoch of one ``fit``. ``print(history)`` shows them as a table.

    Attributes:
        history: name ("loss", "val_loss", a metric) -> one value per epoch.
        epoch: the epochs' numbers, from 0.
        restarts: the losses of processes after which ``fit(restarts=...)`` resumed.
    """

    history: dict[str, list[Any]] = field(default_factory=dict)
    epoch: list[int] = field(default_factory=list)
    restarts: list[str] = field(default_factory=list)

    def add(self, epoch: int, logs: dict[str, Any]) -> None:
        """Add an epoch's values."""
        self.epoch.append(epoch)
        for name, value in logs.items():
            self.history.setdefault(name, []).append(value)

    def __str__(self) -> str:
        columns = {"epoch": [epoch + 1 for epoch in self.epoch], **self.history}
        cells = [[name, *map(format_value, values)] for name, values in columns.items()]
        widths = [max(map(len, column)) for column in cells]
        rows = zip_longest(*cells, fillvalue="")
        return "\n".join(
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        )

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """The representations for notebooks and IPython."""
        return {"text/plain": str(self)}

    def to_frame(self) -> Any:
        """The values as a ``pandas.DataFrame``, with a row per epoch.

        Raises:
            ExtraError: pandas is not installed.
        """
        pandas = import_extra("pandas", extra="pandas", user="History.to_frame")
        return pandas.DataFrame(self.history, index=pandas.Index(self.epoch, name="epoch"))

    def plot(self, *names: str) -> Any:
        """Draw values over the epochs, those of training and of validation together.

        Args:
            names: of values without ``val_``, such as "loss"; all if none are passed.

        Returns:
            A ``matplotlib.figure.Figure``: notebooks show it, ``savefig(path)`` writes it.

        Raises:
            ExtraError: matplotlib is not installed.
            OptionError: there are no such values.
        """
        figures = import_extra("matplotlib.figure", extra="plot", user="History.plot")
        known = list(dict.fromkeys(name.removeprefix("val_") for name in self.history))
        if not known or not set(names) <= set(known):
            raise OptionError(
                "Only values of the history can be drawn.",
                received=listed(names or ["an empty history"]),
                fix=f"Choose of {listed(known)}." if known else "Train at least one epoch.",
            )
        shown = names or known
        figure = figures.Figure(figsize=(6.4, 2.6 * len(shown)), layout="constrained")
        all_axes = figure.subplots(len(shown), squeeze=False)[:, 0]
        for name, axes in zip(shown, all_axes, strict=True):
            for label in (name, f"val_{name}"):
                if label in self.history:
                    epochs = [epoch + 1 for epoch in self.epoch]
                    axes.plot(epochs, self.history[label], marker=".", label=label)
            axes.legend()
        axes.set_xlabel("epoch")
        return figure
