"""Writes the weights to files during training."""

import itertools
import os
import string
from pathlib import Path
from typing import Any

from lockstep.callbacks.monitoring import Monitor, check_monitor
from lockstep.disk import prepare_file, prepare_folder
from lockstep.errors import OptionError, Problems
from lockstep.formatting import listed
from lockstep.options import check_flag, check_frequency, check_weights_path
from lockstep.train.callbacks.callback import Callback, Logs


class ModelCheckpoint(Callback):
    """Saves the weights after every epoch, or every so many steps, as safetensors.

    A file appears complete or not at all; tensors are written one by one. ``trainer.load`` reads it
    under any strategy. It does not have the optimizer's state.

    Args:
        filepath: may have ``{epoch}`` and ``{step}``, both from 1 and the latter counted over all
            epochs, and names of logged values, with formats:
            "{epoch:02d}-{val_loss:.2f}.safetensors". Folders are made. A file of the same name is
            overwritten.
        monitor: the value to compare with ``save_best_only``.
        mode: "min" or "max" is better; "auto" is known for losses and most metrics.
        save_best_only: save only if the monitored value is the best so far.
        save_freq: "epoch", or a number of steps. After steps, only "loss" (of the batch) is known.

    Attributes:
        last_path: the last file written; None before the first.

    Raises:
        OptionError: an option is invalid; when training begins, no log has a name in the path, or
            no file can be written there.
    """

    def __init__(
        self,
        filepath: str | os.PathLike[str],
        *,
        monitor: str = "val_loss",
        mode: str = "auto",
        save_best_only: bool = False,
        save_freq: str | int = "epoch",
    ) -> None:
        problems = Problems()
        check_weights_path("filepath", filepath, problems)
        check_monitor(monitor, mode, 0.0, problems)
        check_flag("save_best_only", save_best_only, problems)
        check_frequency("save_freq", save_freq, problems)
        self._names = _names_in(filepath, problems)
        if save_freq != "epoch":
            _check_steps_know({*self._names, *([monitor] if save_best_only else [])}, problems)
        problems.raise_if_any(OptionError)
        self._template = os.fspath(filepath)
        self._monitor = Monitor(monitor, mode) if save_best_only else None
        self._every_steps = save_freq if isinstance(save_freq, int) else None
        self._epoch = 0
        self._step = 0
        self.last_path: Path | None = None

    def acts_in(self, method: str) -> bool:
        # Steps are counted only if needed: all ranks wait at each one that is.
        if method in ("on_epoch_begin", "on_train_batch_end"):
            return self._every_steps is not None or "step" in self._names
        return super().acts_in(method)

    def state_dict(self) -> dict[str, Any]:
        return {
            "best": None if self._monitor is None else self._monitor.best,
            "step": self._step,
            "last_path": None if self.last_path is None else str(self.last_path),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._monitor is not None:
            self._monitor.best = state["best"]
        self._step = state["step"]
        self.last_path = None if state["last_path"] is None else Path(state["last_path"])

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._step = 0
        if self._monitor is not None:
            self._monitor.begin(self.trainer)
        for name in self._names - {"epoch", "step"}:
            Monitor(name, "min").begin(self.trainer)  # checks that it is logged
        self._prepare()

    def _prepare(self) -> None:
        """Make the folder, down to the first part whose name is not known yet."""
        if not self._names:
            prepare_file(self._template.format())
            return
        parts = Path(self._template).parent.parts
        known = itertools.takewhile(lambda part: not _names_in(part, Problems()), parts)
        prepare_folder(Path(*(part.format() for part in known)))

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self._step += 1
        if self._every_steps is not None and self._step % self._every_steps == 0:
            self._save(self._epoch, logs)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if self._every_steps is None:
            self._save(epoch, logs)

    def _save(self, epoch: int, logs: Logs | None) -> None:
        if self._monitor is not None and not self._monitor.improves(logs):
            return
        path = self._path(epoch, logs or {})
        path.parent.mkdir(parents=True, exist_ok=True)
        self.trainer.save(path)
        self.last_path = path

    def _path(self, epoch: int, logs: Logs) -> Path:
        values = {**logs, "epoch": epoch + 1, "step": self._step}
        try:
            return Path(self._template.format(**values))
        except (KeyError, IndexError, ValueError, TypeError) as error:
            raise OptionError(
                f"`filepath` {self._template!r} cannot be filled in.",
                received=f"{error}; values {values}",
                fix="Correct the name or the format; names with 'val_' need validation_data.",
            ) from error


def _names_in(filepath: object, problems: Problems) -> set[str]:
    """The placeholders of a path."""
    if not isinstance(filepath, str | os.PathLike):
        return set()
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(os.fspath(filepath))]
    except ValueError as error:
        problems.add(
            "`filepath` must be a path with placeholders in braces.",
            received=f"{os.fspath(filepath)!r}: {error}",
            fix="Write '{epoch:02d}-{val_loss:.2f}.safetensors', for example.",
        )
        return set()
    names = {field for field in fields if field is not None}
    strange = sorted(name for name in names if not name.isidentifier())
    if strange:
        problems.add(
            "The placeholders of `filepath` must be names.",
            received=listed(strange),
            fix="Write '{epoch:02d}-{val_loss:.2f}.safetensors', for example.",
        )
    return names - set(strange)


def _check_steps_know(names: set[str], problems: Problems) -> None:
    unknown = sorted(names - {"epoch", "step", "loss", "size"})
    if unknown:
        problems.add(
            "With `save_freq` in steps only 'epoch', 'step', 'loss' and 'size' are known.",
            received=listed(unknown),
            fix="Use save_freq='epoch', or monitor='loss'.",
        )
