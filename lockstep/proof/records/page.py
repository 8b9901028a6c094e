"""A page of HTML about a comparison, with all that it needs in one file.

A row for each tensor, in the order of the forward pass, and a column for each step: the shade is
the difference in units of rounding, on a logarithmic scale. Above it are curves of the largest
difference of each kind.
"""

import html
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from lockstep.disk import replacing
from lockstep.proof.recording.record_frames import START
from lockstep.proof.records.comparison import KINDS, Difference, Pairing

_STYLE = """
:root { --paper: #fff; --ink: #1b1f24; --line: #d0d7de; --bad: #b42318; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171a; --ink: #e6e8ea; --line: #3a4148; --bad: #ff8a7a; }
}
body { background: var(--paper); color: var(--ink); margin: 2rem auto; padding: 0 1rem;
  max-width: 70rem; font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.25rem; overflow-wrap: anywhere; } h2 { font-size: 1rem; margin-top: 2rem; }
.verdict { border-left: 4px solid var(--line); padding-left: 1rem; overflow-wrap: anywhere; }
.differs { border-color: var(--bad); }
.legend { display: flex; flex-wrap: wrap; gap: 0 1rem; font-size: 13px; margin: 0.5rem 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; }
th, td { border: 1px solid var(--line); padding: 2px 8px; text-align: right; white-space: nowrap; }
th:first-child { text-align: left; }
td.wrong { outline: 2px solid var(--bad); outline-offset: -2px; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
svg .axis { stroke: var(--line); }
"""
_COLORS = ("#2f6fde", "#c2410c", "#15803d", "#9333ea", "#0e9bb0", "#ca8a04", "#be185d", "#64748b")
_WIDTH, _HEIGHT, _MARGIN = 600, 220, 50


def write_page(path: Path, pairing: Pairing, title: str, *verdict: str) -> None:
    """Write the page.

    Raises:
        OSError: it cannot be written.
    """
    text = "".join(_page(pairing, title, verdict)).encode()
    with replacing(path, len(text)) as file:
        file.write(text)


def _page(pairing: Pairing, title: str, verdict: Sequence[str]) -> Iterator[str]:
    differs = " differs" if pairing.first is not None else ""
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>"
    yield f'<h1>{html.escape(title)}</h1><div class="verdict{differs}">'
    yield from (f"<p>{html.escape(line)}</p>" for line in verdict)
    yield "</div><h2>Largest difference of each kind, in units of rounding</h2>"
    yield from _curves(pairing)
    for kind in KINDS:
        found = [each for each in pairing.differences if each.kind == kind]
        if found:
            yield f"<h2>{html.escape(kind)}</h2>"
            yield from _table(found, pairing.first)
    yield "</body></html>\n"


def _table(found: Sequence[Difference], first: Difference | None) -> Iterator[str]:
    steps = sorted({each.step for each in found})
    cells = {(each.name, each.step): each for each in found}
    yield '<div class="scroll"><table><tr><th></th>'
    yield from (f"<th>{'start' if step == START else step}</th>" for step in steps)
    yield "</tr>"
    for name in dict.fromkeys(each.name for each in found):
        yield f"<tr><th>{html.escape(name or 'all')}</th>"
        yield from (_cell(cells.get((name, step)), first) for step in steps)
        yield "</tr>"
    yield "</table></div>"


def _cell(one: Difference | None, first: Difference | None) -> str:
    if one is None:
        return "<td></td>"
    style = f"background: color-mix(in srgb, var(--bad) {_shade(one)}%, var(--paper))"
    kind = ' class="wrong"' if not one.agrees else ""
    mark = ' id="first"' if one is first else ""
    return (
        f'<td{kind}{mark} style="{style}" title="{html.escape(str(one))}">'
        f"{html.escape(_shown(one))}</td>"
    )


def _shown(one: Difference) -> str:
    if one.has_same_bits:
        return "="
    if not one.agrees and one.remark:
        return "differs"
    return f"{one.units:.2g}"


def _shade(one: Difference) -> int:
    if one.has_same_bits:
        return 0
    if not math.isfinite(one.units) or one.units <= 0:
        return 0 if one.agrees else 45
    return max(0, min(45, round(7 * math.log10(max(one.units, 1.0)))))


# --- curves ---------------------------------------------------------------------------------------


def _curves(pairing: Pairing) -> Iterator[str]:
    series = {kind: _largest(pairing, kind) for kind in KINDS}
    series = {kind: points for kind, points in series.items() if points}
    top = max((math.log10(y) for own in series.values() for _, y in own), default=1.0)
    last = max(pairing.num_steps - 1, 1)
    colors = dict(zip(series, _COLORS, strict=False))
    yield '<p class="legend">'
    for kind, color in colors.items():
        yield f'<span><span style="color: {color}">&#9632;</span> {kind}</span>'
    yield f'</p><div class="scroll"><svg width="{_WIDTH}" height="{_HEIGHT}" role="img">'
    yield from _axes(max(top, 1.0), last)
    for kind, points in series.items():
        color = colors[kind]
        places = [_place(step, units, max(top, 1.0), last) for step, units in points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        yield f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>'
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in places)
    yield "</svg></div>"


def _largest(pairing: Pairing, kind: str) -> list[tuple[int, float]]:
    points: dict[int, float] = {}
    for one in pairing.differences:
        if one.kind == kind and one.step != START and math.isfinite(one.units) and one.units > 0:
            points[one.step] = max(points.get(one.step, 0.1), one.units)
    return sorted(points.items())


def _axes(top: float, last: int) -> Iterator[str]:
    bottom = _HEIGHT - 30
    for right, upper in ((_WIDTH, bottom), (_MARGIN, 10)):
        yield f'<line class="axis" x1="{_MARGIN}" y1="{bottom}" x2="{right}" y2="{upper}"/>'
    for power in range(0, math.ceil(top) + 1, max(1, math.ceil(top / 5))):
        _, height = _place(0, 10.0**power, top, last)
        yield f'<text x="{_MARGIN - 8}" y="{height + 4:.1f}" text-anchor="end">1e{power}</text>'
    for step in range(0, last + 1, max(1, last // 10)):
        x, _ = _place(step, 1.0, top, last)
        yield f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">step {step}</text>'


def _place(step: int, units: float, top: float, last: int) -> tuple[float, float]:
    bottom = _HEIGHT - 30
    share = (math.log10(max(units, 0.1)) + 1) / (math.ceil(top) + 1)
    return _MARGIN + 20 + (_WIDTH - _MARGIN - 40) * step / last, bottom - (bottom - 15) * share
