"""What ``fit`` returns."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class History:
    """Values of every epoch of one ``fit``.

    Attributes:
        history: name ("loss", "val_loss", a metric) -> one value per epoch.
        epoch: the epochs' numbers, from 0.
        restarts: what was lost, and gone on from, in ``fit(restarts=...)``.
    """

    history: dict[str, list[Any]] = field(default_factory=dict)
    epoch: list[int] = field(default_factory=list)
    restarts: list[str] = field(default_factory=list)

    def add(self, epoch: int, logs: dict[str, Any]) -> None:
        """Note an epoch's values."""
        self.epoch.append(epoch)
        for name, value in logs.items():
            self.history.setdefault(name, []).append(value)
