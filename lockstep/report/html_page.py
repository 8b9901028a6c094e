"""The report as one HTML page: no script from elsewhere, no network, light and dark."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from lockstep.formatting import format_bytes, format_time
from lockstep.plan.decision import Pipeline
from lockstep.plan.pipeline.simulation import Event, Timeline
from lockstep.plan.program.rank_program import Forward
from lockstep.report.run_report import RunReport, verdict

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --back: #fff; --line: #d5d9de; --one: #2463ae;
  --two: #b3541e; --three: #3a7d44; --four: #7a4aa0; --five: #a8862a; --six: #1f8a8a;
  --seven: #8a8f98; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7ea; --back: #15181b; --line: #3a4046;
  --one: #6aa5ec; --two: #e59560; --three: #7cc389; --four: #bd92e0; --five: #d9bb62;
  --six: #62c4c4; --seven: #9aa0a8; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--back);
  margin: 0 auto; max-width: 1100px; padding: 16px; overflow-wrap: break-word; }
h1 { font-size: 1.4em; } h2 { font-size: 1.1em; margin-top: 2em; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; min-width: 100%; }
th, td { text-align: left; padding: 4px 10px 4px 0; border-bottom: 1px solid var(--line); }
.bar { display: flex; height: 22px; border-radius: 3px; overflow: hidden; min-width: 2px; }
.bar span { display: block; min-width: 0; }
.legend span { display: inline-block; margin-right: 14px; }
.legend i { display: inline-block; width: 10px; height: 10px; margin-right: 5px; }
svg { width: 100%; height: auto; } .wide svg { min-width: 600px; }
polyline { vector-effect: non-scaling-stroke; }
pre { overflow-x: auto; font-size: 12px; }
"""

_COLOURS = ("--one", "--two", "--three", "--four", "--five", "--six", "--seven")
_WIDTH, _ROW = 1000, 26
_MOST_EVENTS = 4000


def html_of(report: RunReport) -> str:
    """The page."""
    parts = [
        f"<h1>{escape(report.title)}</h1>",
        *_step(report),
        *_memory(report),
        *_stages(report),
        *_curves(report.history),
        *_alternatives(report.ranking),
        *_plan(report),
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(report.title)}</title><style>{_STYLE}</style>"
    )
    body = "\n".join(parts)
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'


# --- time and memory ------------------------------------------------------------------------------


def _step(report: RunReport) -> list[str]:
    measured, predicted = report.step_seconds, report.predicted
    lines = ["<h2>Time of a step</h2>"]
    if predicted is None:
        return [
            *lines,
            f"<p>Measured: {format_time(measured)}. Nothing was predicted.</p>",
        ]
    longest = max(measured, predicted["seconds"], 1e-12)
    error = "" if report.step_error is None else f", {100 * report.step_error:+.0f} %"
    return [
        *lines,
        f"<p>Predicted {format_time(predicted['seconds'])}{error}</p>",
        _bar(predicted["step"], longest),
        f"<p>Measured {format_time(measured)}</p>",
        _bar({"step": measured}, longest, _COLOURS[-1:]),
        _legend(predicted["step"], format_time),
    ]


def _memory(report: RunReport) -> list[str]:
    measured, predicted = report.peak_bytes, report.predicted
    lines = [
        "<h2>Memory</h2>",
        f"<p>Measured, all processes: {format_bytes(measured)}.</p>",
    ]
    if predicted is None:
        return lines
    error = "" if report.memory_error is None else f", {100 * report.memory_error:+.0f} %"
    total = sum(predicted["memory"].values())
    return [
        *lines,
        f"<p>Predicted, all processes: {format_bytes(predicted['all_bytes'])}{error}. "
        f"The rank that needs most, {format_bytes(total)}:</p>",
        _bar(predicted["memory"], max(total, 1e-12)),
        _legend(predicted["memory"], format_bytes),
    ]


def _bar(parts: dict[str, float], whole: float, colours: Sequence[str] = _COLOURS) -> str:
    spans = (
        f'<span title="{escape(name)}" style="width: {100 * value / whole:.3f}%; '
        f'background: var({colour})"></span>'
        for (name, value), colour in zip(parts.items(), colours, strict=False)
    )
    return f'<div class="bar">{"".join(spans)}</div>'


def _legend(parts: dict[str, float], show: Any, *, empty: bool = False) -> str:
    """The colours of parts with their values; also of those without any if ``empty``."""
    entries = (
        f'<span><i style="background: var({colour})"></i>{escape(name)} {show(value)}</span>'
        for (name, value), colour in zip(parts.items(), _COLOURS, strict=False)
        if value or empty
    )
    return f'<p class="legend">{"".join(entries)}</p>'


# --- stages ---------------------------------------------------------------------------------------


def _stages(report: RunReport) -> list[str]:
    timeline = report.timeline
    if timeline is None or report.plan is None or report.plan.pipeline is None:
        return []
    lines = ["<h2>Stages</h2>", _stage_table(report, report.plan.pipeline)]
    if sum(map(len, timeline.events)) <= _MOST_EVENTS:
        lines += ["<p>Predicted passes of a step, rank by rank:</p>", _timeline(timeline)]
    return lines


def _stage_table(report: RunReport, pipeline: Pipeline) -> str:
    assert report.plan is not None
    rows = []
    for number, stage in enumerate(pipeline.stages):
        names = [layer.name for layer in report.plan.layers if layer.stage == number]
        span = f"{names[0]} to {names[-1]}" if names else ""
        rows.append((str(number), ", ".join(map(str, stage.ranks)), span, str(len(names))))
    return _table(("stage", "ranks", "layers", "number"), rows)


def _timeline(timeline: Timeline) -> str:
    whole = max(timeline.makespan, 1e-12)
    boxes = [
        _box(event, rank, whole) for rank, events in enumerate(timeline.events) for event in events
    ]
    height = _ROW * len(timeline.events)
    return (
        f'<div class="wide"><svg viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="predicted passes">{"".join(boxes)}</svg></div>'
    )


def _box(event: Event, rank: int, whole: float) -> str:
    left, right = (_WIDTH * time / whole for time in (event.start, event.end))
    colour = "--one" if isinstance(event.action, Forward) else "--two"
    return (
        f'<rect x="{left:.2f}" y="{rank * _ROW + 2}" width="{max(right - left - 0.5, 0.2):.2f}" '
        f'height="{_ROW - 4}" fill="var({colour})"><title>rank {rank}: {event.action}, '
        f"{format_time(event.end - event.start)}</title></rect>"
    )


# --- history, alternatives ------------------------------------------------------------------------


def _curves(history: dict[str, list[float]]) -> list[str]:
    names = list(dict.fromkeys(name.removeprefix("val_") for name in history))
    lines = ["<h2>History</h2>"] if names else []
    for name in names:
        both = {label: history[label] for label in (name, f"val_{name}") if label in history}
        last = {label: values[-1] for label, values in both.items()}
        lines += [_legend(last, "{:.4g}".format, empty=True), _plot(list(both.values()))]
    return lines


def _plot(curves: Sequence[Sequence[float]]) -> str:
    values = [value for curve in curves for value in curve if value == value]
    low, high = min(values, default=0.0), max(values, default=1.0)
    span = high - low or 1.0
    longest = max(max(map(len, curves)) - 1, 1)
    lines = []
    for curve, colour in zip(curves, _COLOURS, strict=False):
        points = " ".join(
            f"{10 + 980 * index / longest:.1f},{10 + 120 * (1 - (value - low) / span):.1f}"
            for index, value in enumerate(curve)
            if value == value
        )
        lines.append(
            f'<polyline points="{points}" fill="none" stroke="var({colour})" stroke-width="2"/>'
        )
    return f'<svg viewBox="0 0 {_WIDTH} 140" role="img">{"".join(lines)}</svg>'


def _alternatives(ranking: Sequence[dict[str, Any]]) -> list[str]:
    if not ranking:
        return []
    rows = [
        (
            one["name"],
            _unbroken(format_time(one["seconds"])),
            _unbroken(format_bytes(sum(one["memory"].values()))),
            verdict(one),
        )
        for one in ranking
    ]
    return ["<h2>Plans</h2>", _table(("plan", "step", "memory of a rank", "why not"), rows)]


def _unbroken(text: str) -> str:
    """A number with its unit on one line."""
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def _plan(report: RunReport) -> list[str]:
    if report.plan is None:
        return []
    return ["<h2>The Plan</h2>", f"<pre>{escape(str(report.plan))}</pre>"]


def _table(heads: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(one)}</th>" for one in heads)
    lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    parts = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="wide"><table>{parts}</table></div>'
