"""The result of a proof, as data and as a table."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lockstep.formatting import plain_text
from lockstep.proof.bits import Verdict
from lockstep.proof.comparison import KINDS, TOLERANCE, Comparison
from lockstep.proof.conditioning import Conditioning
from lockstep.proof.locating import Cause

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
        title: both sides and the size of the comparison.
        kinds: a summary of every kind that the model has.
        differences: every comparison outside its tolerance, by step, and within a step in the order
            in which a fault spreads: loss, gradient, slot, parameter, buffer.
        undetermined: parameters whose gradient is zero but for rounding; with the number of
            elements if only some are.
        undivided: a sentence if the Plan does not divide the model or the batch, so that the proof
            shows little; else empty.
        notes: further remarks.
        conditioning: the effect of rounding on this training; None if it was not measured because
            all agreed to 1e-12.
        cause: where the first difference begins; None if all agreed, or if replicas train
            independently (local SGD).
        bits: comparisons to the last bit, with ``bits`` or ``self_test``.
    """

    title: str
    kinds: tuple[KindSummary, ...]
    differences: tuple[Comparison, ...]
    undetermined: tuple[str, ...]
    undivided: str
    notes: tuple[str, ...]
    conditioning: Conditioning | None = None
    cause: Cause | None = None
    bits: tuple[Verdict, ...] = ()

    @property
    def passed(self) -> bool:
        """True if everything agreed that must."""
        return not self.differences and all(verdict.passed for verdict in self.bits)

    @property
    def tolerance(self) -> float:
        """The tolerance that was used: 1e-12, or more where rounding needs it."""
        loosened = [one.worst.tolerance for one in self.kinds if one.worst.relative > TOLERANCE]
        return max(loosened, default=TOLERANCE)

    @property
    def status(self) -> int:
        """The command's exit status: 0; 1 if something differs; 3 if nothing was divided."""
        if not self.passed:
            return 1
        return 3 if self.undivided else 0

    @property
    def first_difference(self) -> Comparison | None:
        """The difference to look at first; None if all agreed."""
        return self.differences[0] if self.differences else None

    def as_dict(self) -> dict[str, Any]:
        """The report for JSON. Later versions may add keys, and remove none."""
        return {
            "version": 1,
            "title": self.title,
            "passed": self.passed,
            "status": self.status,
            "tolerance": self.tolerance,
            "kinds": [
                {"kind": one.kind, "count": one.count, "worst": _as_dict(one.worst)}
                for one in self.kinds
            ],
            "num_differences": len(self.differences),
            "first_difference": self.first_difference and _as_dict(self.first_difference),
            "cause": self.cause and dataclasses.asdict(self.cause),
            "conditioning": self.conditioning
            and {
                "dtype": str(self.conditioning.dtype).removeprefix("torch."),
                "module": self.conditioning.module,
                "bound": self.conditioning.largest,
            },
            "bits": [{**dataclasses.asdict(one), "passed": one.passed} for one in self.bits],
            "undetermined": list(self.undetermined),
            "undivided": self.undivided,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        return f"{self.title.rstrip()}\n{plain_text(self._body())}"

    def __rich__(self) -> Group:
        return Group(Text(self.title), self._body())

    def _body(self) -> Group:
        return Group(_table(self.kinds), *self._remarks(), *self._verdict())

    def _remarks(self) -> Iterable[Text]:
        if self.undetermined:
            yield Text(
                f"Undetermined: {', '.join(self.undetermined)}. Their gradients are zero but for "
                "rounding, which the optimizer turns into steps; the reference took Lockstep's."
            )
        yield from (Text(f"Note: {note.removesuffix('.')}.") for note in self.notes)
        if self.conditioning is not None:
            yield Text(f"Rounding: {self.conditioning.summary()}.")
        for verdict in self.bits:
            yield Text(f"Bits, {verdict}.", style="" if verdict.passed else "red")

    def _verdict(self) -> Iterable[Text]:
        if self.passed and self.undivided:
            yield Text(
                f"Passed, but {self.undivided}. What was computed is the same, to within "
                f"{self.tolerance:.2g}.",
                style="bold yellow",
            )
            return
        if self.passed:
            loose = self.tolerance > TOLERANCE
            rest = ", which is what rounding can do here" if loose else ""
            style = "bold yellow" if loose else "bold green"
            yield Text(f"Passed: the same, to within {self.tolerance:.2g}{rest}.", style=style)
            return
        if not self.differences:
            yield Text("Failed: bits differ that must not.", style="bold red")
            return
        total = sum(summary.count for summary in self.kinds)
        yield Text(
            f"Failed: {len(self.differences)} of {total} comparisons differ by more than "
            f"{max(one.tolerance for one in self.differences):.2g}.",
            style="bold red",
        )
        for number, difference in enumerate(self.differences[:_MOST_LISTED]):
            yield Text(f"{'then' if number else 'first difference'}: {difference}")
        if len(self.differences) > _MOST_LISTED:
            yield Text(f"and {len(self.differences) - _MOST_LISTED} more")
        if self.cause is not None:
            yield Text(f"Cause: {self.cause.kind}. {self.cause.text}")


def make_report(
    title: str,
    comparisons: Iterable[Comparison],
    undetermined: Iterable[str],
    notes: Iterable[str],
    undivided: str = "",
    *,
    conditioning: Conditioning | None = None,
    cause: Cause | None = None,
    bits: Sequence[Verdict] = (),
) -> Report:
    """Summarize comparisons."""
    comparisons = list(comparisons)
    by_kind = {kind: [one for one in comparisons if one.kind == kind] for kind in KINDS}
    return Report(
        title=title,
        kinds=tuple(
            KindSummary(kind=kind, count=len(found), worst=max(found, key=_how_bad))
            for kind, found in by_kind.items()
            if found
        ),
        differences=tuple(_differences(comparisons)),
        undetermined=tuple(undetermined),
        undivided=undivided,
        notes=tuple(notes),
        conditioning=conditioning,
        cause=cause,
        bits=tuple(bits),
    )


def first_of(comparisons: Iterable[Comparison]) -> Comparison | None:
    """Return the first difference; None if all agree."""
    return next(iter(_differences(comparisons)), None)


def _differences(comparisons: Iterable[Comparison]) -> list[Comparison]:
    return sorted((one for one in comparisons if not one.agrees), key=_order_of_causes)


def _as_dict(one: Comparison) -> dict[str, Any]:
    """A comparison for JSON, which has no infinity: null, and the remark says why."""
    relative = one.relative if math.isfinite(one.relative) else None
    return {**dataclasses.asdict(one), "relative": relative}


def _how_bad(one: Comparison) -> tuple[bool, float]:
    return not one.agrees, one.relative


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
