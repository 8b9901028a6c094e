"""Trials of batch sizes and of plans, in a process that may die.

A trial trains for a few steps on the user's data with copies of everything: the script's model,
optimizer and random streams do not change. It runs in a helper process (``launch.workers``), which
starts helpers of its own if the strategy has several ranks. If memory runs out, the kernel kills
this process first (``oom_score_adj``, man 5 proc).

The copies' learning rates are 0, so no trial can diverge. All steps of a trial use one batch, the
first samples, so the time to read others (from a cold disk) is not measured. A process keeps the
memory that it has freed, so it tries another size only if it has used a small part of the memory.

An accelerator's memory is not predicted: a process that needs too much only gets an exception. The
peak is that of the first rank's device.
"""

import math
import os
import pickle
import statistics
import sys
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from lockstep import accelerators
from lockstep.cluster.place import Reach
from lockstep.comm.shared_memory.memory_usage import peak_memory
from lockstep.data.map_style.samples import RepeatedSource, array_bytes, first_samples
from lockstep.data.map_style.sources import Source
from lockstep.errors import DeviceError, WorkerError
from lockstep.launch.health.failure import MEMORY_RAN_OUT, as_raised, summary_of
from lockstep.launch.workers.helper import HelperContext
from lockstep.launch.workers.pool import take_team
from lockstep.launch.workers.team import Team
from lockstep.parallel.exchange.control import unpacked
from lockstep.parallel.settings import TorchSettings, num_threads
from lockstep.parallel.storage.meta_init import blank_names, blank_parameters
from lockstep.parallel.storage.store import tensor_spec
from lockstep.parallel.transfer.pickle_errors import pack_named
from lockstep.parallel.transfer.serialization import SerializedObject
from lockstep.plan.makers.data_parallel import Maker
from lockstep.train.batch_size_search.search_algorithm import (
    LARGEST_PART,
    Failed,
    Measured,
    TooLarge,
    Trial,
    too_much,
)
from lockstep.train.callbacks.callback import Callback, Logs
from lockstep.train.fault_tolerance.run_record import VARIABLE
from lockstep.train.runtime.session import PRELOAD
from lockstep.train.trainer_protocol import TrainerProtocol

_WARM_UP_STEPS = 2
_FEWEST_STEPS, _MOST_STEPS = 3, 100
_MEASURED_SECONDS = 0.5

# Part of the free memory that a process may have used to be used for another size. With the next
# size it has at most three times that, even if none of its freed memory can be reused.
_REUSE_PART = 0.25


@dataclass(frozen=True)
class TriedStrategy:
    """In place of a training's own strategy: any maker of this host's Plans."""

    tried: Maker
    timeout_seconds: float
    reach: Reach = "one host"

    def maker(self, precision: str) -> Maker:
        """The maker, whatever the precision."""
        return self.tried


@dataclass(frozen=True)
class _Figures:
    """What a trial's process reports."""

    seconds_per_step: float
    peak_bytes: int
    num_ranks: int
    device_peak_bytes: int | None  # None without an accelerator, and if unknown
    device_limit_bytes: int | None


class Trials:
    """Tries batch sizes and plans of one training, in one process at a time.

    A new process replaces one that has failed, has used much memory, or has tried a plan.

    Args:
        trainer: the training, which is copied.
        source: its data.
        loss: the user's, to name it if it cannot be sent.
        others: bytes of arrays that a training shares with its helpers beside the source's.
        limit_bytes: free memory; None if unknown.
        timeout_seconds: longest wait for one trial.

    Raises:
        ShippingError: a part of the training cannot be sent to another process.
    """

    def __init__(
        self,
        trainer: TrainerProtocol,
        source: Source,
        *,
        loss: object,
        others: int,
        limit_bytes: int | None,
        timeout_seconds: float,
    ) -> None:
        self._source = source
        self._shared_bytes = array_bytes(source) + others
        self._limit = limit_bytes
        self._timeout = timeout_seconds
        model = trainer.model
        blank = blank_names(model)
        named = [(name, one) for name, one in model.named_parameters() if name in blank]
        names = ("model", "optimizer", "metrics", "strategy")
        parts = {f"the {name}": getattr(trainer, name) for name in names} | {"the loss": loss}
        self._serialized = pack_named(trainer, parts, [one for _, one in named])
        self._body = pickle.dumps(
            (
                self._serialized.payload,
                [tensor_spec(name, one) for name, one in named],
                torch.get_num_threads(),
                TorchSettings.current(),
            )
        )
        self._team: Team | None = None

    def close(self) -> None:
        """End the process."""
        self._end_process()
        self._serialized.close()

    def try_size(self, batch_size: int, strategy: TriedStrategy | None = None) -> Trial:
        """Train a few steps with batches of this size.

        Args:
            batch_size: of the global batch.
            strategy: by which to train; None is the training's own.

        Raises:
            ShippingError: the data cannot be sent to another process.
        """
        excerpt = first_samples(self._source, batch_size)
        serialized = pack_named((excerpt, strategy), {"the data": excerpt}, ())
        try:
            figures = self._run(batch_size, serialized)
        except WorkerError as error:
            self._end_process()
            return _failed_trial(batch_size, error)
        finally:
            serialized.close()
            if strategy is not None:
                self._end_process()
        if self._limit is not None and figures.peak_bytes > _REUSE_PART * self._limit:
            self._end_process()
        return self._measured(batch_size, figures, array_bytes(excerpt))

    def _run(self, batch_size: int, samples: SerializedObject) -> "_Figures":
        self._batch_size = batch_size
        if self._team is None:
            self._team = take_team(1, None, PRELOAD)
            self._team.call(
                serve_trials,
                self._body,
                self._serialized.descriptors,
                position=lambda rank: f"in a trial of batch_size {self._batch_size}",
                timeout_seconds=self._timeout,
            )
        self._team.broadcast(pickle.dumps((batch_size, samples.payload)), samples.descriptors)
        ((answer, _),) = self._team.gather(self._timeout)
        figures: _Figures = pickle.loads(answer)
        return figures

    def _measured(
        self, batch_size: int, figures: "_Figures", excerpt_bytes: int
    ) -> Measured | TooLarge:
        peak, limit = figures.device_peak_bytes, figures.device_limit_bytes
        if peak is not None and limit is not None and peak > LARGEST_PART * limit:
            return too_much(batch_size, peak, limit, "on the device")
        # Helpers of the real training get all arrays, through shared memory.
        more = max(self._shared_bytes - excerpt_bytes, 0) if figures.num_ranks > 1 else 0
        return Measured(
            batch_size=batch_size,
            seconds_per_step=figures.seconds_per_step,
            peak_bytes=figures.peak_bytes + more,
        )

    def _end_process(self) -> None:
        if self._team is not None:
            self._team.close()
        self._team = None


def _failed_trial(batch_size: int, error: WorkerError) -> TooLarge | Failed:
    """The result of a trial that has raised an exception, or whose process has ended."""
    cause = error if error.raised is None else error.raised
    message = str(cause) if cause is error else summary_of(cause)
    reason = message.partition("\n")[0]
    if is_shortage(cause):
        return TooLarge(batch_size=batch_size, reason=reason)
    return Failed(batch_size=batch_size, reason=reason, error=as_raised(error))


_SHORTAGE_WORDS = (
    "out of memory",
    "allocate memory",
    "memoryerror",
    "bad_alloc",
    "more of shared memory",
)


def is_shortage(error: BaseException | None) -> bool:
    """True if memory ran out: an exception says so, or the kernel may have killed a process."""
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        text = str(error).lower()
        if isinstance(error, RuntimeError | OSError | DeviceError):
            if any(word in text for word in _SHORTAGE_WORDS):
                return True
            if isinstance(error, WorkerError) and MEMORY_RAN_OUT in text:
                return True
        error = error.__cause__
    return False


# --- in the trial's process ----------------------------------------------------------------------


_in_trial = False


def is_in_trial() -> bool:
    """True in a process that serves trials: its trainings make none of their own."""
    return _in_trial


def serve_trials(context: HelperContext, body: bytes, descriptors: tuple[int, ...]) -> None:
    """Try one size after the other, until rank 0 ends this process."""
    global _in_trial
    _in_trial = True
    _volunteer()
    _be_silent()
    payload, specs, threads, settings = pickle.loads(body)
    with num_threads(threads), settings.applied():
        trainer = unpacked(payload, descriptors, blank_parameters(specs))
        while True:
            message, attached = context.receive()
            batch_size, payload = pickle.loads(message)
            excerpt, strategy = unpacked(payload, attached)
            trainer.strategy = strategy or trainer.strategy
            figures = _try_size(trainer, excerpt, batch_size)
            context.send(pickle.dumps(figures))


def _volunteer() -> None:
    """Make the kernel kill this process and its helpers first if memory runs out."""
    with suppress(OSError):  # another system, or a container that forbids it
        Path("/proc/self/oom_score_adj").write_text("1000")


def _be_silent() -> None:
    """Show and record nothing of this process's trainings, nor of their helpers."""
    os.environ.pop(VARIABLE, None)
    os.environ["PYTHONWARNINGS"] = "ignore"  # for helpers
    warnings.simplefilter("ignore")
    null = os.open(os.devnull, os.O_WRONLY)
    sys.stdout.flush()
    os.dup2(null, 1)
    os.close(null)


def _try_size(trainer: TrainerProtocol, source: Source, batch_size: int) -> _Figures:
    assert trainer.optimizer is not None
    for group in trainer.optimizer.param_groups:
        if "lr" in group:
            group["lr"] = 0.0 * group["lr"]
    train = partial(trainer.fit, batch_size=batch_size, shuffle=False, verbose=0)
    accelerators.forget_peak()  # of sizes that this process has tried before
    clock = _Clock(_WARM_UP_STEPS)
    trainer.callbacks = [clock]
    train(RepeatedSource(source, _WARM_UP_STEPS * batch_size))
    num_steps = math.ceil(_MEASURED_SECONDS / max(clock.seconds_per_step, 1e-6))
    num_steps = min(max(num_steps, _FEWEST_STEPS), _MOST_STEPS)
    clock = _Clock(num_steps + 1)  # from the end of the first
    trainer.callbacks = [clock]
    train(RepeatedSource(source, (num_steps + 1) * batch_size))
    return _Figures(
        clock.seconds_per_step,
        clock.peak_bytes,
        trainer.plan.num_ranks,
        accelerators.peak_bytes(),
        accelerators.limit_bytes(),
    )


class _Clock(Callback):
    """Notes when steps end, and at the last one the peak memory of all processes."""

    is_observer = True

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._ends: list[float] = []
        self.peak_bytes = 0

    @property
    def seconds_per_step(self) -> float:
        """From the end of one step to that of the next; the median."""
        return statistics.median(
            later - sooner for sooner, later in zip(self._ends, self._ends[1:], strict=False)
        )

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self._ends.append(time.perf_counter())
        if len(self._ends) == self._num_steps:
            self.peak_bytes = peak_memory()
