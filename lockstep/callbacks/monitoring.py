"""Monitoring: follows the best of a logged value, for callbacks that react to improvements.

Less is better for losses; torchmetrics has the direction of most metrics. It is never guessed from
a name.
"""

import math
from typing import Any

import torch

from lockstep.errors import OptionError, Problems
from lockstep.formatting import listed
from lockstep.options import check_choice, check_name, check_number
from lockstep.train.callbacks.callback import Callback, Logs
from lockstep.train.callbacks.state_values import copied_values
from lockstep.train.trainer_protocol import TrainerProtocol

MODES = ("auto", "min", "max")


def check_monitor(monitor: object, mode: object, min_delta: object, problems: Problems) -> None:
    """Check the arguments of a Monitor."""
    check_name("monitor", monitor, problems)
    check_choice("mode", mode, MODES, problems, fix="Use 'auto'.")
    check_number("min_delta", min_delta, problems)
    if isinstance(min_delta, int | float) and min_delta < 0:
        problems.add("`min_delta` must not be negative.", received=min_delta, fix="Use 0.")


class Monitor:
    """Follows one value of the logs.

    Args:
        name: of the value: "loss", a metric, or either with "val_" before it.
        mode: "min" or "max" is better; "auto" is the metric's own direction.
        min_delta: smaller improvements do not count.

    Attributes:
        best: the best value so far; None before the first.
    """

    def __init__(self, name: str, mode: str, min_delta: float = 0.0) -> None:
        self.name = name
        self.best: float | None = None
        self._mode = mode
        self._min_delta = min_delta
        self._sign = 0.0

    def begin(self, trainer: TrainerProtocol) -> None:
        """Forget the best, and check that the Trainer logs the value.

        Raises:
            OptionError: it does not, or does not know whether small or large is better.
        """
        self.best = None
        metric = self.name.removeprefix("val_")
        known = trainer.log_names()
        if self.name not in known:
            raise _unknown(self.name, known)
        self._sign = {"min": -1.0, "max": 1.0}.get(self._mode) or self._own_sign(trainer, metric)

    def _own_sign(self, trainer: TrainerProtocol, metric: str) -> float:
        if metric not in trainer.metrics.by_name:
            return -1.0  # losses: less is better
        higher = getattr(trainer.metrics.by_name[metric], "higher_is_better", None)
        if higher is None:
            raise OptionError(
                f"{self.name!r} does not say whether small or large values are better.",
                received="mode='auto'",
                fix="Pass mode='min' or mode='max'.",
            )
        return 1.0 if higher else -1.0

    def read(self, logs: dict[str, Any] | None) -> float:
        """The value in the logs.

        Raises:
            OptionError: it is missing, or not one number.
        """
        if logs is None or self.name not in logs:
            raise _unknown(self.name, list(logs or {}))
        value = logs[self.name]
        if not isinstance(value, int | float):
            raise OptionError(
                f"{self.name!r} must be one number to be compared.",
                received=repr(value),
                fix="Give the metric an average, or monitor another value.",
            )
        return float(value)

    def is_better(self, value: float, than: float | None) -> bool:
        """True if a value is better than another; NaN never is, other values are than None."""
        if math.isnan(value):
            return False
        if than is None:
            return True
        return self._sign * (value - than) > self._min_delta

    def improves(self, logs: dict[str, Any] | None) -> bool:
        """True if the value in the logs is the best so far, which is then remembered."""
        value = self.read(logs)
        if not self.is_better(value, self.best):
            return False
        self.best = value
        return True


class BestEpoch(Callback):
    """Follows the epoch with the best value of a monitor, and can copy its weights and buffers.

    Args:
        monitor: of the value.

    Attributes:
        best_epoch: its number, from 0; None if there was none.
    """

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._weights: dict[str, torch.Tensor] | None = None
        self.best_epoch: int | None = None

    @property
    def best(self) -> float | None:
        """The best value so far."""
        return self._monitor.best

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._monitor.begin(self.trainer)
        self._weights = self.best_epoch = None

    def _copy_weights(self) -> None:
        self._weights = copied_values(self.model, self._weights)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_epoch": self.best_epoch, "weights": self._weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._monitor.best, self.best_epoch = state["best"], state["best_epoch"]
        self._weights = state["weights"]


def _unknown(name: str, known: list[str]) -> OptionError:
    return OptionError(
        f"Training logs no value named {name!r}.",
        received=f"logs with {listed(known)}",
        fix="Monitor one of these; those with 'val_' need validation_data.",
    )
