"""Keeps the weights of the best epoch, in memory or in a file."""

import os

from lockstep.callbacks.monitoring import BestEpoch, Monitor, check_monitor
from lockstep.disk import prepare_file
from lockstep.errors import OptionError, Problems
from lockstep.options import check_flag, check_weights_path
from lockstep.train.callbacks.callback import Logs
from lockstep.train.callbacks.state_values import set_values


class BestWeights(BestEpoch):
    """Keeps the weights and buffers of the epoch with the best monitored value.

    Args:
        monitor: a value of the logs: "val_loss", "loss", a metric, "val_" and a metric.
        mode: "min" or "max" is better; "auto" is known for losses and most metrics.
        min_delta: smaller improvements do not count.
        filepath: a safetensors file for them, written completely or not at all; ``trainer.load``
            reads it. Its folder is made. None keeps them in memory, which needs a copy.
        restore: restore them to the model at the end of training. Otherwise call ``give_back``.

    Attributes:
        best: the best value; None if there was none.
        best_epoch: its epoch, from 0.

    Raises:
        OptionError: an option is invalid; when training begins, no log has the monitor's name, or
            the file cannot be written.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        mode: str = "auto",
        min_delta: float = 0.0,
        filepath: str | os.PathLike[str] | None = None,
        restore: bool = False,
    ) -> None:
        problems = Problems()
        check_monitor(monitor, mode, min_delta, problems)
        check_flag("restore", restore, problems)
        if filepath is not None:
            check_weights_path("filepath", filepath, problems)
        problems.raise_if_any(OptionError)
        super().__init__(Monitor(monitor, mode, min_delta))
        self._path = filepath
        self._restores = restore

    def on_train_begin(self, logs: Logs | None = None) -> None:
        super().on_train_begin(logs)
        if self._path is not None:
            prepare_file(self._path)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if not self._monitor.improves(logs):
            return
        self.best_epoch = epoch
        if self._path is not None:
            self.trainer.save(self._path)
        else:
            self._copy_weights()

    def on_train_end(self, logs: Logs | None = None) -> None:
        if self._restores and self.best_epoch is not None:
            self.give_back()

    def give_back(self) -> None:
        """Restore the best weights to the model.

        Raises:
            OptionError: there are none.
            CheckpointError: the file is missing, or does not fit.
        """
        if self.best_epoch is None:
            raise OptionError(
                "There are no best weights yet.",
                received="no epoch with a value that could be compared",
                fix=f"Train first, and check that {self._monitor.name!r} is a number.",
            )
        if self._weights is not None:
            set_values(self.model, self._weights)
        elif self._path is not None:
            self.trainer.load(self._path)
