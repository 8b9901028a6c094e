"""Writes logs for TensorBoard."""

import os
import socket
import time
from pathlib import Path
from typing import Any

import torch

from lockstep.callbacks.scalars import learning_rates, scalars
from lockstep.disk import writing
from lockstep.errors import OptionError, Problems
from lockstep.extras import import_extra
from lockstep.options import check_count, check_frequency, check_path
from lockstep.train.callbacks.callback import ClosingCallback, Logs

# A TensorBoard event file, written with tensorboard's own protocol buffers and record writer.
# It does not use torch.utils.tensorboard, which imports TensorFlow if installed, and writes in a
# thread of its own.

_NUM_BUCKETS = 30


class EventFile:
    """One event file in a folder, which is made if missing.

    Args:
        folder: of one run.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._events, self._summaries, self._tensors = (
            tensorboard_module(f"compat.proto.{name}")
            for name in ("event_pb2", "summary_pb2", "tensor_pb2")
        )
        # The time orders a run's files; the process distinguishes those of two scripts.
        parts = (f"{time.time_ns() // 1000:016d}", socket.gethostname(), str(os.getpid()))
        name = ".".join(("events.out.tfevents", *parts))
        writer = tensorboard_module("summary.writer.record_writer").RecordWriter
        self._path = folder / name
        self._writer = writer(self._path.open("xb"))
        self._write(file_version="brain.Event:2")

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """A point of a curve."""
        self._add(step, tag=tag, simple_value=value)

    def add_text(self, tag: str, text: str, step: int) -> None:
        """A text, in Markdown."""
        plugin = self._summaries.SummaryMetadata.PluginData(plugin_name="text")
        tensor = self._tensors.TensorProto(dtype="DT_STRING", string_val=[text.encode()])
        tensor.tensor_shape.dim.add(size=1)
        metadata = self._summaries.SummaryMetadata(plugin_data=plugin)
        self._add(step, tag=tag, metadata=metadata, tensor=tensor)

    def add_histogram(self, tag: str, values: torch.Tensor, step: int) -> None:
        """The distribution of values; those that are not finite are left out."""
        numbers = values.detach().flatten().double().cpu()
        numbers = numbers[numbers.isfinite()]
        if not numbers.numel():
            return
        low, high = numbers.min().item(), numbers.max().item()
        span = (low, high) if low < high else (low - 0.5, low + 0.5)
        counts, edges = torch.histogram(numbers, _NUM_BUCKETS, range=span)
        histogram = self._summaries.HistogramProto(
            min=low,
            max=high,
            num=numbers.numel(),
            sum=numbers.sum().item(),
            sum_squares=numbers.square().sum().item(),
            bucket_limit=edges[1:].tolist(),
            bucket=counts.tolist(),
        )
        self._add(step, tag=tag, histo=histogram)

    def flush(self) -> None:
        """Write everything so far to the file."""
        with writing(self._path):
            self._writer.flush()

    def close(self) -> None:
        """Write the rest, and close the file."""
        with writing(self._path):
            self._writer.close()

    def _add(self, step: int, **value: Any) -> None:
        summary = self._summaries.Summary(value=[self._summaries.Summary.Value(**value)])
        self._write(step=step, summary=summary)

    def _write(self, **fields: Any) -> None:
        event = self._events.Event(wall_time=time.time(), **fields)
        with writing(self._path):
            self._writer.write(event.SerializeToString())


def tensorboard_module(name: str) -> Any:
    """A module of tensorboard.

    Raises:
        ExtraError: it is not installed.
    """
    return import_extra(f"tensorboard.{name}", extra="tensorboard", user="TensorBoard")


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
        OptionError: an option is invalid.
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
