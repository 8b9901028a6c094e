"""Stops training when a value has not improved for some epochs."""

from typing import Any

from lockstep.callbacks.monitoring import BestEpoch, Monitor, check_monitor
from lockstep.errors import OptionError, Problems
from lockstep.options import check_count, check_flag, check_number
from lockstep.train.callbacks.callback import Logs
from lockstep.train.callbacks.state_values import set_values


class EarlyStopping(BestEpoch):
    """Stops training when a monitored value has not improved for ``patience`` epochs.

    Args:
        monitor: a value of the logs: "val_loss", "loss", a metric, "val_" and a metric.
        min_delta: smaller improvements do not count.
        patience: epochs without improvement after which training stops; 0 means 1.
        mode: "min" or "max" is better; "auto" is known for losses and most metrics.
        baseline: an improvement resets the patience only if it is better than this value, too.
        restore_best_weights: at the end of training, unless by an error, restore the weights and
            buffers of the best epoch. Needs memory for a copy.
        start_from_epoch: epochs before the first comparison.

    Attributes:
        best: the best value; None if there was none.
        best_epoch: its epoch, from 0.
        stopped_epoch: the epoch after which training was stopped; None if it was not.

    Raises:
        OptionError: an option is invalid; when training begins, no log has the monitor's name.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        min_delta: float = 0.0,
        patience: int = 0,
        mode: str = "auto",
        baseline: float | None = None,
        restore_best_weights: bool = False,
        start_from_epoch: int = 0,
    ) -> None:
        problems = Problems()
        check_monitor(monitor, mode, min_delta, problems)
        check_count("patience", patience, problems, least=0)
        check_count("start_from_epoch", start_from_epoch, problems, least=0)
        check_flag("restore_best_weights", restore_best_weights, problems)
        if baseline is not None:
            check_number("baseline", baseline, problems)
        problems.raise_if_any(OptionError)
        super().__init__(Monitor(monitor, mode, min_delta))
        self._patience = patience
        self._baseline = baseline
        self._restores = restore_best_weights
        self._first_epoch = start_from_epoch
        self._wait = 0
        self.stopped_epoch: int | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        super().on_train_begin(logs)
        self._wait, self.stopped_epoch = 0, None

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        value = self._monitor.read(logs)
        if epoch < self._first_epoch:
            return
        self._wait += 1
        if self._monitor.improves(logs):
            self.best_epoch = epoch
            if self._restores:
                self._copy_weights()
            if self._baseline is None or self._monitor.is_better(value, self._baseline):
                self._wait = 0
        if self._wait >= max(self._patience, 1):
            self.stopped_epoch = epoch
            self.trainer.stop_training = True

    def state_dict(self) -> dict[str, Any]:
        own = {"stopped_epoch": self.stopped_epoch, "wait": self._wait}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._wait, self.stopped_epoch = state["wait"], state["stopped_epoch"]

    def on_train_end(self, logs: Logs | None = None) -> None:
        if self._weights is not None:
            set_values(self.model, self._weights)
            self._weights = None
