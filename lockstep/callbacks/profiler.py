"""Traces some steps of all ranks, into one file for https://ui.perfetto.dev."""

import gzip
import json
import os
import warnings
from pathlib import Path
from typing import Any

from lockstep.disk import prepare_file, writing
from lockstep.errors import OptionError, Problems
from lockstep.options import check_count, check_path
from lockstep.train.callbacks.callback import Callback, Logs

Event = dict[str, Any]

# Chrome's format identifies tracks by (process, thread). The profiler's processes of a rank are
# renumbered from rank * _NUMBERS_PER_RANK on.
_NUMBERS_PER_RANK = 1000
_METADATA, _FLOW_STARTS_AND_ENDS = "M", "sf"


class Profiler(Callback):
    """Traces some steps with torch.profiler, on all ranks at once.

    The file shows, for all ranks on one clock: the steps, the actions of each rank's program
    (forward and backward passes, the reduction, the update, waiting for the others), and every
    operator. Open it with https://ui.perfetto.dev. Steps that are traced are slower.

    Args:
        path: the file, JSON in Chrome's trace format, compressed if its name ends in ".gz". Its
            folder is made.
        first_step: of a ``fit``, from 0; the first steps are not typical.
        num_steps: the number of steps.

    Raises:
        OptionError: an option is invalid; when training begins, the file cannot be written.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, first_step: int = 5, num_steps: int = 3
    ) -> None:
        problems = Problems()
        check_path("path", path, problems)
        check_count("first_step", first_step, problems, least=0)
        check_count("num_steps", num_steps, problems)
        problems.raise_if_any(OptionError)
        self.traced_steps = range(first_step, first_step + num_steps)
        self._first_step = first_step
        self._path = Path(path)
        self._events: list[Event] = []

    def on_train_begin(self, logs: Logs | None = None) -> None:
        prepare_file(self._path)
        self._events = []

    def on_train_trace(self, traces: list[bytes]) -> None:
        self._events += merged([json.loads(trace) for trace in traces])
        text = json.dumps({"traceEvents": self._events, "displayTimeUnit": "ms"}).encode()
        text = gzip.compress(text) if self._path.suffix == ".gz" else text
        with writing(self._path, len(text)):
            self._path.write_bytes(text)

    def on_train_end(self, logs: Logs | None = None) -> None:
        if not self._events:
            warnings.warn(
                f"No trace was written: training has ended before step {self._first_step}.",
                stacklevel=2,
            )


def merged(traces: list[dict[str, Any]]) -> list[Event]:
    """The events of all ranks' traces on the clock of the first.

    Args:
        traces: by rank, as torch.profiler exports them.
    """
    origin = traces[0].get("baseTimeNanoseconds", 0)
    return [
        event
        for rank, trace in enumerate(traces)
        for event in _of_rank(rank, trace, (trace.get("baseTimeNanoseconds", 0) - origin) / 1000)
    ]


def _of_rank(rank: int, trace: dict[str, Any], later_microseconds: float) -> list[Event]:
    """One rank's events, with processes renumbered and renamed, and times shifted."""
    numbers: dict[Any, int] = {}
    events = []
    for event in trace["traceEvents"]:
        number = numbers.setdefault(event.get("pid"), rank * _NUMBERS_PER_RANK + len(numbers))
        moved = {**event, "pid": number}
        if event["ph"] == _METADATA:
            if event["name"] == "process_sort_index":
                moved["args"] = {"sort_index": number}
            elif event["name"] == "process_name":
                moved["args"] = {"name": f"rank {rank}: {event['args']['name']}"}
        else:
            moved["ts"] = event["ts"] + later_microseconds
        if event["ph"] in _FLOW_STARTS_AND_ENDS:
            moved["id"] = f"{rank}.{event['id']}"
        events.append(moved)
    return events
