"""The outcome of a comparison of records, as data, as a table and as a page."""

import math
import os
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lockstep.formatting import plain_text
from lockstep.proof.recording.record_frames import START
from lockstep.proof.records.causes import find_cause
from lockstep.proof.records.comparison import KINDS, Difference, Pairing, compare_runs
from lockstep.proof.records.elements import describe_elements
from lockstep.proof.records.page import write_page
from lockstep.proof.records.run import Run
from lockstep.proof.records.sample_causes import Cause


def compare(
    run: str | os.PathLike[str],
    reference: str | os.PathLike[str] | None = None,
    *,
    tolerance: float | None = None,
) -> "RecordComparison":
    """Compare two records of ``lockstep.record``, of any libraries and numbers of ranks.

    Args:
        run: folder of the record that is examined.
        reference: folder of the one that it is held to, such as a run on one device; None compares
            the ranks of ``run`` with each other.
        tolerance: the largest difference that agrees, in parts of a tensor's norm; None allows
            what rounding makes of right runs in the precision of the records.

    Returns:
        The outcome. ``print`` it; ``passed``, ``first`` and ``cause`` say what was found.

    Raises:
        DataError: a record cannot be read, or the two are of different models.
    """
    return RecordComparison(compare_runs(run, reference, tolerance))


@dataclass(frozen=True)
class RecordComparison:
    """The outcome of ``lockstep.compare``."""

    pairing: Pairing

    @property
    def first(self) -> Difference | None:
        """The first difference, by step and in the order in which a fault spreads."""
        return self.pairing.first

    @cached_property
    def cause(self) -> Cause | None:
        """The likely cause of the first difference; None if all agrees."""
        return find_cause(self.pairing)

    @property
    def passed(self) -> bool:
        """Whether everything agrees that both have."""
        return self.first is None

    @property
    def has_same_bits(self) -> bool:
        """Whether no bit differs."""
        return all(each.has_same_bits for each in self.pairing.differences)

    @property
    def status(self) -> int:
        """The command's exit status: 1 if something differs."""
        return int(not self.passed)

    @property
    def title(self) -> str:
        """What was compared."""
        run, other = self.pairing.run, self.pairing.reference
        steps = f"{self.pairing.num_steps} step{'s' * (self.pairing.num_steps != 1)}"
        if self.pairing.is_single:
            return f"{_described(run)}, its ranks with each other: {steps}"
        return f"{_described(run)}, against {_described(other)}: {steps}"

    @property
    def notes(self) -> list[str]:
        """What is missing of the records."""
        runs = [self.pairing.run] + [self.pairing.reference] * (not self.pairing.is_single)
        return [note for run in runs for note in _notes(run)]

    def as_dict(self) -> dict[str, Any]:
        """The outcome for JSON. Later versions may add keys, and remove none."""
        return {
            "version": 1,
            "title": self.title,
            "passed": self.passed,
            "same_bits": self.has_same_bits,
            "num_steps": self.pairing.num_steps,
            "num_compared": len(self.pairing.differences),
            "first_difference": self.first and _as_dict(self.first),
            "elements": self.elements,
            "cause": self.cause and self.cause._asdict(),
            "kinds": [_as_dict(worst) for _, worst, _ in self.kinds],
            "notes": self.notes,
        }

    @property
    def kinds(self) -> list[tuple[int, Difference, bool]]:
        """Of each kind: how many were compared, the worst, and whether all have the same bits."""
        found = []
        for kind in KINDS:
            own = [each for each in self.pairing.differences if each.kind == kind]
            if own:
                worst = max(
                    own, key=lambda each: (not each.agrees, not each.is_amplified, each.relative)
                )
                found.append((len(own), worst, all(each.has_same_bits for each in own)))
        return found

    @cached_property
    def elements(self) -> str:
        """The first difference element by element, of full records; else empty."""
        return describe_elements(self.pairing) if self.first is not None else ""

    def save_page(self, path: str | os.PathLike[str]) -> None:
        """Write a page of HTML that needs nothing else: differences per tensor and step.

        Raises:
            OSError: it cannot be written.
        """
        write_page(Path(path), self.pairing, self.title, *self._verdict())

    def _verdict(self) -> list[str]:
        if self.first is None:
            detail = (
                "Passed: not a bit differs."
                if self.has_same_bits
                else ("Passed: nothing differs by more than rounding.")
            )
            return [detail]
        lines = [f"First difference: {self.first}."]
        lines += [self.elements] * bool(self.elements)
        if self.cause is not None:
            lines.append(f"Likely cause: {self.cause.kind}. {self.cause.text}")
        return lines

    def __str__(self) -> str:
        return plain_text(self.__rich__())

    def __rich__(self) -> Group:
        table = Table(box=None, pad_edge=False)
        for name, justify in (("kind", "left"), ("compared", "right"), ("largest", "right")):
            table.add_column(name, justify=justify)  # type: ignore[arg-type]
        table.add_column("units of rounding", justify="right")
        table.add_column("where", overflow="fold")
        for count, worst, is_same in self.kinds:
            size = "same bits" if is_same else _size(worst)
            units = "" if is_same or not math.isfinite(worst.units) else f"{worst.units:.2g}"
            table.add_row(worst.kind, str(count), size, units, "" if is_same else _place(worst))
        lines = [*self.notes, *self._verdict()]
        return Group(Text(self.title), table, *(Text(line) for line in lines))


def _described(run: Run) -> str:
    header = run.first.header
    ranks = f"{run.world_size} rank{'s' * (run.world_size != 1)}"
    return f"{run.path} ({header.library}, {ranks})"


def _notes(run: Run) -> list[str]:
    found = []
    if run.missing:
        shown = ", ".join(map(str, run.missing))
        found.append(f"Note: {run.path} has no file of rank {shown} of {run.world_size}.")
    last = run.first.steps.get(run.num_steps)
    if last is not None and not last.is_complete:
        found.append(f"Note: {run.path} ended in the midst of step {last.step}.")
    return found


def _size(one: Difference) -> str:
    if not one.agrees and one.remark:
        return "differs"
    return f"{one.relative:.1e}{'' if one.agrees else ' !'}"


def _place(one: Difference) -> str:
    where = "start" if one.step == START else f"step {one.step}"
    return f"{one.name}, {where}" if one.name else where


def _as_dict(one: Difference) -> dict[str, Any]:
    finite = {
        key: value if not isinstance(value, float) or math.isfinite(value) else None
        for key, value in asdict(one).items()
    }
    return {**finite, "ranks": list(one.ranks)}
