"""Traces of some steps, taken on every rank at once by torch.profiler.

A trace has what torch ran, and around it the step's number and the actions of the rank's program
(``parallel.worker.span``), so that waiting for other ranks shows. Ranks hand in what the profiler
exports; the callback that asked for traces merges them (``callbacks.profiler``).
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function


class StepProfiler:
    """Traces one rank's steps.

    Args:
        steps: their numbers, as passed to ``step``; None for no step.
    """

    def __init__(self, steps: range | None) -> None:
        self._steps = steps if steps is not None else range(0)
        self._profile: profile | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Trace the block, a step, if it is due."""
        if number in self._steps and self._profile is None:
            self._profile = profile(activities=_activities())
            self._profile.start()
        if self._profile is None:
            yield
        else:
            with record_function(f"step {number}"):
                yield

    def is_due(self, number: int) -> bool:
        """True if the step before this one was the last to trace."""
        return self._profile is not None and number >= self._steps.stop

    @property
    def is_running(self) -> bool:
        """True if a trace has begun and was not taken."""
        return self._profile is not None

    def take(self) -> bytes:
        """End the trace: JSON in Chrome's format."""
        running, self._profile = self._profile, None
        assert running is not None
        running.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            running.export_chrome_trace(str(path))
            return path.read_bytes()

    def close(self) -> None:
        """End a trace after an error, so that the process can take another."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None


def _activities() -> list[ProfilerActivity]:
    gpu = [ProfilerActivity.CUDA] if torch.cuda.is_initialized() else []
    return [ProfilerActivity.CPU, *gpu]
