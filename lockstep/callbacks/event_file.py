"""A TensorBoard event file, written with tensorboard's own protocol buffers and record writer.

It does not use torch.utils.tensorboard, which imports TensorFlow if installed, and writes in a
thread of its own.
"""

import os
import socket
import time
from pathlib import Path
from typing import Any

import torch

from lockstep.disk import writing
from lockstep.extras import import_extra

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
