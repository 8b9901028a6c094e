"""What the runs of the data parallel benchmark gave, and the medians taken of it."""

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path

BASE = "ddp"
BARE = "bare ddp"


@dataclass
class Results:
    """Figures of every run.

    Attributes:
        rounds: how often each contender ran on each net.
        seconds: of each run.
        figures: net -> contender -> round (a string, as JSON has it) -> figures.
        failures: net -> contender -> the last error.
    """

    rounds: int
    seconds: float
    figures: dict[str, dict[str, dict[str, dict[str, float]]]] = field(default_factory=dict)
    failures: dict[str, dict[str, str]] = field(default_factory=dict)

    def add(self, net: str, contender: str, number: int, figures: dict[str, float] | str) -> None:
        if isinstance(figures, str):
            self.failures.setdefault(net, {})[contender] = figures
        else:
            runs = self.figures.setdefault(net, {}).setdefault(contender, {})
            runs[str(number)] = figures

    def nets(self) -> list[str]:
        return list(dict.fromkeys([*self.figures, *self.failures]))

    def values(self, net: str, contender: str, key: str) -> dict[str, float]:
        """Round -> figure."""
        runs = self.figures.get(net, {}).get(contender, {})
        return {number: run[key] for number, run in runs.items() if key in run}

    def median(self, net: str, contender: str, key: str) -> float | None:
        values = self.values(net, contender, key)
        return statistics.median(values.values()) if values else None

    def ratio(self, net: str, contender: str, key: str, base: str = BASE) -> float | None:
        """Median of the ratios within the rounds in which both ran."""
        ours, theirs = self.values(net, contender, key), self.values(net, base, key)
        ratios = [ours[number] / theirs[number] for number in ours if number in theirs]
        return statistics.median(ratios) if ratios else None

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> "Results":
        return cls(**json.loads(path.read_text()))
