"""The plot of the data parallel benchmark: samples per second relative to DDP, as bars."""

from pathlib import Path
from typing import Any

from nets import NETS
from results import BARE, BASE, Results

OURS, BASE_COLOUR, OTHERS = "#0b6e4f", "#4a5568", "#a9b4c2"
PANEL_GAP_BARS = 2.2  # room for the titles, in heights of a bar


def draw(results: Results, path: Path) -> None:
    """One panel below the other per net, the fastest on top."""
    import matplotlib as mpl

    mpl.use("svg" if path.suffix == ".svg" else "agg")
    mpl.rcParams.update({"svg.hashsalt": "lockstep", "font.size": 10})
    from matplotlib import pyplot

    nets = {net: bars(results, net) for net in results.nets()}
    nets = {net: values for net, values in nets.items() if values}
    if not nets:
        return
    counts = [len(values) for values in nets.values()]
    figure, panels = pyplot.subplots(
        len(nets),
        1,
        figsize=(8.6, 0.26 * (sum(counts) + PANEL_GAP_BARS * len(nets)) + 0.3),
        gridspec_kw={"height_ratios": counts},
        squeeze=False,
        sharex=True,
        layout="constrained",
        facecolor="white",
    )
    for panel, (net, values) in zip(panels[:, 0], nets.items(), strict=True):
        fill(panel, NETS[net].title, values)
    longest = max(max(values.values()) for values in nets.values())
    panels[0, 0].set_xlim(0, max(1.1, longest) * 1.08)
    figure.supxlabel("samples per second, relative to DDP (line at 1)", fontsize=10)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)
    pyplot.close(figure)


def bars(results: Results, net: str) -> dict[str, float]:
    """Contender -> ratio to DDP, slowest first, as bars are drawn from below."""
    ratios = {
        name: results.ratio(net, name, "samples_per_second")
        for name in results.figures.get(net, {})
        if name != BARE
    }
    known = {name: ratio for name, ratio in ratios.items() if ratio is not None}
    return dict(sorted(known.items(), key=lambda item: item[1]))


def fill(panel: Any, title: str, values: dict[str, float]) -> None:
    drawn = panel.barh(
        list(values), list(values.values()), color=[colour(name) for name in values], height=0.78
    )
    panel.axvline(1.0, color="#1a202c", linewidth=0.8, linestyle=(0, (4, 3)), zorder=0.5)
    labels = panel.bar_label(drawn, labels=[f"{value:.2f}" for value in values.values()], padding=3)
    for label in labels:  # hides the line where the two meet
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.8})
    panel.set_title(title, loc="left", fontsize=11, fontweight="bold")
    panel.margins(y=0.02)
    panel.tick_params(axis="y", length=0)
    panel.spines[["top", "right", "left"]].set_visible(False)
    for label in panel.get_yticklabels():
        if label.get_text().startswith("lockstep"):
            label.set_fontweight("bold")


def colour(name: str) -> str:
    if name.startswith("lockstep"):
        return OURS
    return BASE_COLOUR if name == BASE else OTHERS
