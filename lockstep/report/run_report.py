"""A run's record as a report: predicted and measured costs, the alternatives, the history."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from lockstep.errors import OptionError
from lockstep.formatting import format_bytes, format_time
from lockstep.plan.pipeline.simulation import Timeline
from lockstep.plan.program.lowering import predict
from lockstep.plan.spec import Plan
from lockstep.train.fault_tolerance.run_record import Event, recorded_events


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """What is known of a run.

    Attributes:
        title: its script and strategy.
        plan: its Plan.
        ranking: the plans among which it was chosen, with their predicted costs; the chosen first.
        step_seconds: the median of its steps; 0 if too few were made.
        peak_bytes: of all processes together.
        history: values by name, epoch by epoch.
    """

    title: str
    plan: Plan | None
    ranking: Sequence[dict[str, Any]]
    step_seconds: float
    peak_bytes: int
    history: dict[str, list[float]]

    @property
    def predicted(self) -> dict[str, Any] | None:
        """The chosen plan's predicted costs, if any plan was chosen."""
        return self.ranking[0] if self.ranking else None

    @property
    def step_error(self) -> float | None:
        """How much longer the step was predicted to be, as a part of the measured one."""
        if self.predicted is None or not self.step_seconds:
            return None
        return float(self.predicted["seconds"]) / self.step_seconds - 1

    @property
    def memory_error(self) -> float | None:
        """The same of the memory of all processes."""
        if self.predicted is None or not self.peak_bytes:
            return None
        return float(self.predicted["all_bytes"]) / self.peak_bytes - 1

    @property
    def timeline(self) -> Timeline | None:
        """The predicted passes of a step, if the model is in stages, and layers are not divided."""
        if self.plan is None or self.plan.pipeline is None or self.plan.tensor is not None:
            return None
        if any(stage.predicted is None for stage in self.plan.pipeline.stages):
            return None
        return predict(self.plan.pipeline, self.plan.num_shares)


def report_of(path: Path) -> RunReport:
    """The report of the last ``fit`` in a record.

    Args:
        path: of the record, or of its folder.

    Raises:
        OptionError: there is no record, or no ``fit`` in it has ended well.
    """
    events = recorded_events(path)
    ends = [number for number, event in enumerate(events) if event.what == "measured"]
    if not ends:
        raise OptionError(
            "A report is of a fit that has ended well.",
            received=f"{path} without one",
            fix="Ask `lockstep doctor RUN` how it ended.",
        )
    begins = [at for at, event in enumerate(events[: ends[-1]]) if event.what == "begin"]
    return _report(events[begins[-1] : ends[-1] + 1])


def _report(events: Sequence[Event]) -> RunReport:
    begun, found = events[0].run, events[-1].run
    history: dict[str, list[float]] = {}
    for event in events:
        if event.what == "epoch":
            for name, value in event.run.items():
                history.setdefault(name, []).append(value)
    plan = found.get("plan")
    return RunReport(
        title=f"{begun.get('script') or 'a run'}, {begun.get('strategy')}",
        plan=None if plan is None else Plan.from_json(msgspec.json.encode(plan)),
        ranking=found.get("ranking", []),
        step_seconds=found["step_seconds"],
        peak_bytes=found["peak_bytes"],
        history=history,
    )


def text_of(report: RunReport) -> str:
    """The report for a terminal."""
    lines = [report.title, "", *_measured_lines(report)]
    if report.history:
        lines += ["", "Last epoch:"]
        lines += [f"  {name} {values[-1]:.4g}" for name, values in report.history.items()]
    if report.ranking:
        has_trials = any(one.get("tried") is not None for one in report.ranking)
        first = "those that were tried first, the others " if has_trials else ""
        lines += ["", f"Plans, {first}by predicted step:"]
        lines += [f"  {_ranked_line(one)}" for one in report.ranking]
    if report.plan is not None:
        lines += ["", str(report.plan)]
    return "\n".join(lines)


def _measured_lines(report: RunReport) -> list[str]:
    step = format_time(report.step_seconds) if report.step_seconds else "too few to tell"
    lines = [f"Step: {step}", f"Peak memory of all processes: {format_bytes(report.peak_bytes)}"]
    predicted = report.predicted
    if predicted is None:
        return [*lines, "Nothing was predicted: the strategy was named, not chosen."]
    lines[0] += f", predicted {format_time(predicted['seconds'])}{_signed(report.step_error)}"
    lines[1] += f", predicted {format_bytes(predicted['all_bytes'])}{_signed(report.memory_error)}"
    parts = ", ".join(
        f"{name} {format_time(seconds)}" for name, seconds in predicted["step"].items() if seconds
    )
    return [*lines, f"Predicted parts of the step: {parts}"]


def _signed(error: float | None) -> str:
    return "" if error is None else f" ({100 * error:+.0f}%)"


def _ranked_line(one: dict[str, Any]) -> str:
    return f"{one['name']}, {format_time(one['seconds'])}: {verdict(one)}"


def verdict(one: dict[str, Any]) -> str:
    """Why a plan of the ranking loses, or that it is the best."""
    seconds = one.get("tried")  # records of before have none
    tried = "" if seconds is None else f"; a step of its trial took {format_time(seconds)}"
    return one["reason"] or f"the best{tried}"
