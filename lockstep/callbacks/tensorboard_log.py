"""Writes logs for TensorBoard."""

import os
from pathlib import Path

from lockstep.callbacks.event_file import EventFile, tensorboard_module
from lockstep.callbacks.scalars import learning_rates, scalars
from lockstep.disk import prepare_folder
from lockstep.errors import OptionError, Problems
from lockstep.options import check_count, check_frequency, check_path
from lockstep.train.callbacks.callback import ClosingCallback, Logs

_VALIDATION = "val_"


class TensorBoard(ClosingCallback):
    """Writes losses, metrics, learning rates and the Plan for TensorBoard, in Keras's layout.

    Values of training are in the run ``train``, those of validation in ``validation``, both under
    ``epoch_<name>``, so that one chart shows both curves. ``tensorboard --logdir logs`` shows them.
    Epochs and steps are counted over all ``fit`` calls.

    Args:
        log_dir: the folder.
        update_freq: "epoch", or a number of steps after which the batch's loss and the learning
            rates are written, too (``batch_<name>``).
        histogram_freq: write a histogram of each parameter's values after so many epochs; 0 for
            never.

    Raises:
        OptionError: an option is invalid; when training begins, the folder cannot be written to.
        ExtraError: tensorboard is not installed: ``pip install ".[tensorboard]"``.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "logs",
        *,
        update_freq: str | int = "epoch",
        histogram_freq: int = 0,
    ) -> None:
        problems = Problems()
        check_path("log_dir", log_dir, problems)
        check_frequency("update_freq", update_freq, problems)
        check_count("histogram_freq", histogram_freq, problems, least=0)
        problems.raise_if_any(OptionError)
        tensorboard_module("summary.writer.record_writer")
        self._folder = Path(log_dir)
        self._every_steps = update_freq if isinstance(update_freq, int) else None
        self._every_epochs = histogram_freq
        self._files: dict[str, EventFile] = {}
        self._epoch = 0
        self._step = 0
        self._has_plan = False

    def acts_in(self, method: str) -> bool:
        if method == "on_train_batch_end":
            return self._every_steps is not None
        return super().acts_in(method)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        prepare_folder(self._folder)
        self._has_plan = False

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self._step += 1
        if self._every_steps is not None and self._step % self._every_steps == 0:
            assert logs is not None
            values = {"loss": logs["loss"], **learning_rates(self.trainer)}
            self._write("train", "batch", values, self._step)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        trained: dict[str, float] = {}
        validated: dict[str, float] = {}
        for name, value in scalars(logs).items():
            run = validated if name.startswith(_VALIDATION) else trained
            run[name.removeprefix(_VALIDATION)] = value
        self._write("train", "epoch", {**trained, **learning_rates(self.trainer)}, self._epoch)
        if validated:
            self._write("validation", "epoch", validated, self._epoch)
        self._write_plan()
        self._write_histograms()
        for file in self._files.values():
            file.flush()
        self._epoch += 1

    def _write(self, run: str, kind: str, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._file(run).add_scalar(f"{kind}_{name}", value, step)

    def _write_plan(self) -> None:
        """Once per ``fit``; before its first epoch there may be no Plan."""
        if not self._has_plan:
            self._has_plan = True
            # Markdown shows indented text unchanged.
            text = "\n".join(f"    {line}" for line in str(self.trainer.plan).splitlines())
            self._file("train").add_text("plan", text, self._epoch)

    def _write_histograms(self) -> None:
        if self._every_epochs and (self._epoch + 1) % self._every_epochs == 0:
            for name, parameter in self.model.named_parameters():
                self._file("train").add_histogram(name, parameter, self._epoch)

    def _file(self, run: str) -> EventFile:
        if run not in self._files:
            self._files[run] = EventFile(self._folder / run)
        return self._files[run]

    def _close(self, error: BaseException | None) -> None:
        while self._files:
            self._files.popitem()[1].close()
