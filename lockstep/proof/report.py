"""What a proof found, as data and as a table for people."""

import io
import math
from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from lockstep.proof.comparison import KINDS, TOLERANCE, Comparison

_MOST_LISTED = 5


@dataclass(frozen=True, kw_only=True)
class KindSummary:
    """All comparisons of one kind.

    Attributes:
        kind: "loss", "gradient", "slot", "parameter" or "buffer".
        count: how many tensors were compared, over all steps and ranks.
        worst: the comparison with the largest relative difference.
    """

    kind: str
    count: int
    worst: Comparison


@dataclass(frozen=True, kw_only=True)
class Report:
    """The outcome of ``lockstep.verify``. ``print`` it, or ask ``passed``.

    Attributes:
        title: what was compared with what.
        kinds: a summary of every kind that the model has.
        differences: every comparison outside the measure, by step, and within a step in the order
            in which a fault spreads: loss, gradient, slot, parameter, buffer.
        undetermined: parameters whose gradient is zero but for rounding, or with how many of
            their elements.
        undivided: what the strategy is for and the Plan did not divide, as a sentence; such a proof
            says little. Empty where all was divided.
        notes: what a person should know besides.
    """

    title: str
    kinds: tuple[KindSummary, ...]
    differences: tuple[Comparison, ...]
    undetermined: tuple[str, ...]
    undivided: str
    notes: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether everything agreed."""
        return not self.differences

    @property
    def first_difference(self) -> Comparison | None:
        """Where to look first; None if all agreed."""
        return self.differences[0] if self.differences else None

    def __str__(self) -> str:
        text = io.StringIO()
        console = Console(
            file=text, width=100, color_system=None, force_terminal=False, force_jupyter=False
        )
        console.print(self._body())
        lines = [self.title, *text.getvalue().rstrip().splitlines()]
        return "\n".join(line.rstrip() for line in lines)

    def __rich__(self) -> Group:
        return Group(
            Text(self.title),
            self._body(),
        )

    def _body(self) -> Group:
        return Group(_table(self.kinds), *self._remarks(), *self._verdict())

    def _remarks(self) -> Iterable[Text]:
        if self.undetermined:
            yield Text(
                f"Undetermined: {', '.join(self.undetermined)}. Their gradients are zero but for "
                "rounding, which the optimizer turns into steps; the reference took Lockstep's."
            )
        yield from (Text(f"Note: {note.removesuffix('.')}.") for note in self.notes)

    def _verdict(self) -> Iterable[Text]:
        if self.passed and self.undivided:
            yield Text(
                f"Passed, but {self.undivided}. What was computed is the same, to within "
                f"{TOLERANCE:g}.",
                style="bold yellow",
            )
            return
        if self.passed:
            yield Text(f"Passed: the same, to within {TOLERANCE:g}.", style="bold green")
            return
        total = sum(summary.count for summary in self.kinds)
        yield Text(
            f"Failed: {len(self.differences)} of {total} comparisons differ by more than "
            f"{TOLERANCE:g}.",
            style="bold red",
        )
        for number, difference in enumerate(self.differences[:_MOST_LISTED]):
            yield Text(f"{'then' if number else 'first difference'}: {difference}")
        if len(self.differences) > _MOST_LISTED:
            yield Text(f"and {len(self.differences) - _MOST_LISTED} more")


def make_report(
    title: str,
    comparisons: Iterable[Comparison],
    undetermined: Iterable[str],
    notes: Iterable[str],
    undivided: str = "",
) -> Report:
    """Sum up what was compared."""
    comparisons = list(comparisons)
    by_kind = {kind: [one for one in comparisons if one.kind == kind] for kind in KINDS}
    return Report(
        title=title,
        kinds=tuple(
            KindSummary(kind=kind, count=len(found), worst=max(found, key=lambda one: one.relative))
            for kind, found in by_kind.items()
            if found
        ),
        differences=tuple(
            sorted((one for one in comparisons if not one.agrees), key=_order_of_causes)
        ),
        undetermined=tuple(undetermined),
        undivided=undivided,
        notes=tuple(notes),
    )


def _order_of_causes(difference: Comparison) -> tuple[int, int, float]:
    return difference.step, KINDS.index(difference.kind), -difference.relative


def _table(kinds: Iterable[KindSummary]) -> Table:
    table = Table("compared", box=None, pad_edge=False)
    table.add_column("tensors", justify="right")
    table.add_column("largest difference", justify="right")
    table.add_column("where", overflow="fold")
    for summary in kinds:
        worst = summary.worst
        table.add_row(
            f"{summary.kind}{'es' if summary.kind == 'loss' else 's'}",
            f"{summary.count:,}",
            _figure(worst.relative),
            Text("" if worst.relative == 0 else worst.place),
            style="" if worst.agrees else "red",
        )
    return table


def _figure(relative: float) -> str:
    if relative == 0:
        return "none"
    return f"{relative:.1e}" if math.isfinite(relative) else "no measure"
