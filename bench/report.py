"""The section of the benchmarks' page on data parallel training: tables, settings, machine, plot.

Written by ``bench/data_parallel.py --report docs/benchmarks.md``, between two marks in the page.
"""

import datetime
import os
import textwrap
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from contenders import CONTENDERS
from nets import NETS
from results import BARE, BASE, Results

BEGIN = "<!-- data parallel: written by make bench, from here -->"
END = "<!-- data parallel: to here -->"
PLOT = "data_parallel.svg"
PEERS = {
    "torch": ["torch"],
    "Accelerate": ["accelerate"],
    "Lightning": ["lightning"],
    "TensorFlow": ["tensorflow", "tensorflow-cpu"],
    "Keras": ["keras"],
    "JAX": ["jax"],
}
SANITY_LIMIT = 0.05


def rewrite(page: Path, results: Results) -> None:
    """Replace the section of the page, or put it at its end; draw the plot beside it."""
    drawn = find_spec("matplotlib") is not None
    if drawn:
        import plot

        plot.draw(results, page.with_name(PLOT))
    text = page.read_text() if page.exists() else ""
    if BEGIN in text and END in text:
        before, after = text.split(BEGIN)[0], text.split(END, 1)[1]
    else:
        before, after = text.rstrip("\n") + "\n\n" if text else "", "\n"
    page.write_text(f"{before}{BEGIN}\n{section(results, drawn)}\n{END}{after}")


def section(results: Results, drawn: bool) -> str:
    introduction = (
        f"Samples per second and memory on the same cores; {results.rounds} rounds of "
        f"{results.seconds:g} s a run. To repeat it: `make bench`. Every run is a process of its "
        "own, and every round runs each contender once, beginning with another one. Ratios are to "
        f"`{BASE}` within a round, then the median over the rounds. All hold the same data in "
        "memory, make the same batches and use Adam (fused in torch); of two processes each has "
        "one thread. Warm-up and compilation are not counted. Memory is the sum of the "
        "proportional set sizes of a contender's processes."
    )
    lines = ["## Data parallel training on one host", "", wrapped(introduction), ""]
    lines += [
        wrapped(f"Machine: {machine()}. {versions()}. {datetime.date.today().isoformat()}."),
        "",
    ]
    if drawn:
        lines += [f"![Samples per second relative to DDP, per net and contender]({PLOT})", ""]
    for net in results.nets():
        lines += [f"### {NETS[net].title}, batch {NETS[net].batch_size}", "", table(results, net)]
        lines += [""]
    return "\n".join([*lines, "### Settings of the contenders", "", *settings(results)])


def wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(
        text, 100, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


def table(results: Results, net: str) -> str:
    """Of one net, in Markdown, with what failed and the check against a bare script below it."""
    rows = [
        ["contender", "samples/s", "min to max", "to ddp", "memory, MB", "to ddp"],
        ["---", "---:", "---:", "---:", "---:", "---:"],
    ]
    rows += [row(results, net, name) for name in results.figures.get(net, {}) if name != BARE]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for number, cells in enumerate(rows):
        if number == 1:
            cells = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
        padded = [cells[0].ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        lines.append(f"| {' | '.join(padded)} |")
    return "\n".join([*lines, *notes(results, net)])


def row(results: Results, net: str, name: str) -> list[str]:
    speeds = results.values(net, name, "samples_per_second").values()
    memory = results.median(net, name, "bytes")
    return [
        name,
        amount(results.median(net, name, "samples_per_second")),
        f"{amount(min(speeds))} to {amount(max(speeds))}",
        ratio_text(results.ratio(net, name, "samples_per_second")),
        amount(memory and memory / 1e6),
        ratio_text(results.ratio(net, name, "bytes")),
    ]


def notes(results: Results, net: str) -> list[str]:
    lines = []
    sanity = results.ratio(net, BASE, "samples_per_second", base=BARE)
    if sanity is not None:
        agrees = "" if abs(sanity - 1) <= SANITY_LIMIT else ", more than 5 % apart"
        bare = amount(results.median(net, BARE, "samples_per_second"))
        lines += [f"Bare DDP script: {bare} samples/s; `{BASE}` is {sanity:.3f} of it{agrees}."]
    for name, error in results.failures.get(net, {}).items():
        error = error.replace("`", "'")
        lines.append(wrapped(f"Failed at least once: {name}: `{error}`"))
    return ["", "\n\n".join(lines)] if lines else []


def amount(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def ratio_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def settings(results: Results) -> list[str]:
    """One line for each contender that was measured, one for those that are not installed."""
    present = {
        name
        for part in (results.figures, results.failures)
        for names in part.values()
        for name in names
    }
    lines = [
        wrapped(f"- {name}: {contender.settings}.", indent="  ")
        for name, contender in CONTENDERS.items()
        if name in present
    ]
    absent = [name for name in CONTENDERS if name not in present and CONTENDERS[name].missing()]
    return lines + ([f"- Not installed, left out: {', '.join(absent)}."] if absent else [])


def machine() -> str:
    cpu = entry(Path("/proc/cpuinfo"), "model name")
    memory = int(entry(Path("/proc/meminfo"), "MemTotal").split()[0]) * 1024 / 1e9
    return f"{os.cpu_count()} cores of {cpu}, {memory:.0f} GB"


def entry(path: Path, name: str) -> str:
    """The value of the first line ``name : value``."""
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown"


def versions() -> str:
    found = []
    for title, names in PEERS.items():
        for name in names:
            try:
                found.append(f"{title} {version(name)}")
                break
            except PackageNotFoundError:
                continue
    return ", ".join(found)
