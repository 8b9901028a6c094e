"""Tasks that all ranks of a team run together, in the same order; ``fit_task`` trains.

A task is shipped to every rank and run there against its Worker. Only rank 0 has a driver that
does anything: callbacks, progress, the user's metrics.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import islice
from typing import Any, ClassVar

import torch

from lockstep.data.iterable.read_ahead import Read
from lockstep.data.map_style.sources import Source
from lockstep.data.order import batch_bounds, held_streams
from lockstep.data.trees import Tree, concatenate, map_tensors
from lockstep.parallel.batch_run import Observe
from lockstep.parallel.data_parallel.forward import modes_of
from lockstep.parallel.exchange.control import Control
from lockstep.parallel.loss.share_losses import LossParts, Sums
from lockstep.parallel.transfer.readers import reading_ahead
from lockstep.parallel.worker import Worker
from lockstep.train.callbacks.driver import Logs, TaskDriver
from lockstep.train.callbacks.rank_sync import RankSync
from lockstep.train.fit.fit_hooks import ReportTimes
from lockstep.train.input.bad_record_filter import BadRecordFilter
from lockstep.train.input.stream_broadcast import SharedStream, all_batches
from lockstep.train.logging.metric_display import Reports
from lockstep.train.logging.metrics import Metrics


class Task(ABC):
    """Work that all ranks do together.

    Attributes:
        name: of the call, for messages.
        kept: names of the fields that the call cache compares and keeps
        (``train.runtime.call_cache``).
        source: the data for the model; None without.
        brings_values: it gives parameters their values.
    """

    name: ClassVar[str]
    brings_values: ClassVar[bool] = False
    kept: ClassVar[frozenset[str]] = frozenset()
    source: Source | SharedStream | None

    def sources(self) -> list[Source | SharedStream]:
        """All data that is read."""
        return [] if self.source is None else [self.source]

    def changes_from(self, other: "Task") -> dict[str, Any]:
        """The fields in which this call differs from another one like it, without ``kept``."""
        names = [each.name for each in fields(self) if each.init]  # type: ignore[arg-type]
        own = {name: getattr(self, name) for name in names if name not in self.kept}
        return {name: one for name, one in own.items() if not _is_same(one, getattr(other, name))}

    def renew(self, changes: Mapping[str, Any]) -> None:
        """Take over the fields of another call."""
        vars(self).update(changes)

    @abstractmethod
    def run(self, worker: Worker, control: Control, driver: TaskDriver) -> Any:
        """Run the task; rank 0 returns the result."""


@dataclass(kw_only=True)
class DataPass:
    """One pass over data without training.

    Attributes:
        source: the data.
        batch_size: of the global batch, if the data has no batches of its own.
        steps: the most batches; None for all.
        reports: after which batches callbacks get what was computed.
        may_stop: True if callbacks may end it after any batch.
    """

    source: Source | SharedStream
    batch_size: int
    steps: int | None = None
    reports: ReportTimes = "never"
    may_stop: bool = False

    def run(
        self,
        rank_sync: RankSync,
        act: Callable[[int, Source, torch.Tensor], None],
        epoch: int | None = None,
    ) -> None:
        """Act on each batch: its number, the source of its samples, and their indices.

        Args:
            rank_sync: the ranks.
            act: what each rank does.
            epoch: of the training around it, which Ctrl-C may end; None if there is none.
        """
        worker, control, driver = rank_sync.worker, rank_sync.control, rank_sync.driver
        is_validation = epoch is not None
        reads = islice(_reads_in_order(worker, self.source, self.batch_size), self.steps)
        with (
            modes_of(worker.model, training=False),
            reading_ahead(self.source, reads, worker.passes.device) as ahead,
        ):
            batches = all_batches(
                ahead,
                worker,
                control,
                self.batch_size,
                epoch or 0,
                lambda: is_validation and driver.is_interrupted,
            )
            for index, (part, indices) in enumerate(islice(batches, self.steps)):
                rank_sync.act(partial(driver.begin_batch, index))
                act(index, part, indices)
                if self.may_stop and control.broadcast(driver.wants_to_stop):
                    break
                if is_validation:
                    rank_sync.pause_validation(index)


@dataclass(frozen=True, kw_only=True)
class Validation:
    """The evaluation after epochs.

    Attributes:
        data: what it is made on.
        metrics: its own; None for those of training.
        epochs: those that end with it; None for all.
    """

    data: DataPass
    metrics: Metrics | None = None
    epochs: tuple[int, ...] | None = None

    def is_after(self, epoch: int) -> bool:
        """True if the epoch ends with it."""
        return self.epochs is None or epoch in self.epochs


def evaluated_samples(task: object) -> int:
    """Samples of a batch that a task evaluates between epochs; 0 if it does not."""
    validation: Validation | None = getattr(task, "validation", None)
    return 0 if validation is None else validation.data.batch_size


class Evaluation(ABC):
    """How batches are evaluated, and their losses so far."""

    @abstractmethod
    def begin(self, rank_sync: RankSync) -> None:
        """Forget all batches."""

    @abstractmethod
    def run(
        self, rank_sync: RankSync, source: Source, indices: torch.Tensor, observe: Observe | None
    ) -> None:
        """Evaluate a batch; ``observe`` gets the outputs of this rank's shares."""

    @abstractmethod
    def logs(self, control: Control) -> Logs:
        """The losses by name, on rank 0; every rank calls it."""


class MeansOfSamples(Evaluation):
    """Losses are means over the samples of all batches.

    Args:
        parts: of the loss.
    """

    def __init__(self, parts: LossParts) -> None:
        self._parts = parts
        self._shares: list[Sums] = []

    def begin(self, rank_sync: RankSync) -> None:
        self._shares = []

    def run(
        self, rank_sync: RankSync, source: Source, indices: torch.Tensor, observe: Observe | None
    ) -> None:
        with held_streams:
            self._shares += rank_sync.worker.evaluate_step(source, indices, observe)

    def logs(self, control: Control) -> Logs:
        gathered = control.gather(self._shares)
        return self._parts.logs([sums for own in gathered for sums in own])


@dataclass(kw_only=True)
class DataTask(Task):
    """A task that is one pass over data.

    Attributes:
        data: the pass.
    """

    data: DataPass

    @property
    def source(self) -> Source | SharedStream:  # type: ignore[override]  # an attribute there
        """The data."""
        return self.data.source


@dataclass(kw_only=True)
class EvaluateTask(DataTask):
    """Losses and metrics over data, every sample once."""

    name: ClassVar[str] = "evaluate"
    kept = frozenset(("evaluation", "metrics"))
    metrics: Metrics
    evaluation: Evaluation

    def run(self, worker: Worker, control: Control, driver: TaskDriver) -> Logs:
        """Evaluate; rank 0 returns the values."""
        rank_sync = RankSync(worker=worker, control=control, driver=driver)
        return evaluate(rank_sync, self.data, self.metrics, self.evaluation)


def _is_same(one: object, other: object) -> bool:
    """True if they are equal without a comparison of large values."""
    if isinstance(one, bool | int | float | str | tuple | range):
        return type(one) is type(other) and one == other
    return one is other


# Outputs, with the number of their first sample.
ShareOutput = tuple[int, Tree]


@dataclass(kw_only=True)
class PredictTask(DataTask):
    """Outputs for data, every sample once.

    Attributes:
        data: the data.
        seed: of the random streams of this call; None for the training's.
    """

    name: ClassVar[str] = "predict"
    seed: int | None = None

    def run(self, worker: Worker, control: Control, driver: TaskDriver) -> list[Tree]:
        """Predict; rank 0 returns the outputs of all shares in the order of their samples."""
        rank_sync = RankSync(worker=worker, control=control, driver=driver)
        parts: list[ShareOutput] = []
        start = 0

        def predict(index: int, source: Source, indices: torch.Tensor) -> None:
            nonlocal start
            with held_streams:
                found = worker.predict_step(source, indices)
            own = [
                (start + position, map_tensors(torch.Tensor.cpu, output))
                for position, output in found
            ]
            parts.extend(own)
            start += len(indices)
            if self.data.reports == "each" and (outputs := _in_order(control.gather(own))):
                driver.report_outputs(concatenate(outputs))
            driver.end_batch(index, None)

        if self.seed is not None:
            worker.passes.reseed(self.seed)
        self.data.run(rank_sync, predict)
        return _in_order(control.gather(parts))


def _in_order(ranks: Sequence[Sequence[ShareOutput]]) -> list[Tree]:
    """The outputs of all ranks, in the order of their samples."""
    gathered = [part for parts in ranks for part in parts]
    return [output for _, output in sorted(gathered, key=lambda part: part[0])]


def evaluate(
    rank_sync: RankSync,
    data: DataPass,
    metrics: Metrics,
    evaluation: Evaluation,
    epoch: int | None = None,
    bad_records: BadRecordFilter | None = None,
) -> Logs:
    """Losses and metrics over data; on rank 0.

    Args:
        rank_sync: the ranks.
        data: the data.
        metrics: this rank's metrics.
        evaluation: evaluates batches.
        epoch: see ``DataPass.run``.
        bad_records: leaves bad records out; None if they are errors.
    """
    worker, control, driver = rank_sync.worker, rank_sync.control, rank_sync.driver
    num_bad = 0
    metrics.reset()
    evaluation.begin(rank_sync)
    observe = metrics.update if metrics else None
    reports = Reports(metrics, control, data.reports)

    def step(index: int, part: Source, indices: torch.Tensor) -> None:
        nonlocal num_bad
        num_taken = len(indices)
        if bad_records is not None:
            part, indices = bad_records.filtered(part, indices)
            num_bad += num_taken - len(indices)
        if len(indices):
            evaluation.run(rank_sync, part, indices, observe)
        metrics.settle(control)
        if bad_records is not None:
            worker.barrier()
        end_batch = partial(driver.end_batch, index)
        if not reports.end_batch(
            lambda: rank_sync.act(partial(end_batch, evaluation.logs(control)))
        ):
            rank_sync.act(partial(end_batch, None))

    data.run(rank_sync, step, epoch)
    counts = {} if bad_records is None else {"bad_records": num_bad}
    return {**joined_results(rank_sync, metrics, evaluation.logs(control)), **counts}


def _reads_in_order(
    worker: Worker, source: Source | SharedStream, batch_size: int
) -> Iterator[list[Read]]:
    """The reads of a rank for each batch, without training."""
    assert not isinstance(source, SharedStream)
    for start, stop in batch_bounds(len(source), batch_size):
        yield worker.reads(torch.arange(start, stop))


def joined_results(rank_sync: RankSync, metrics: Metrics, losses: Logs) -> Logs:
    """Losses and the metrics over all ranks; on rank 0."""
    metrics.join(rank_sync.control)
    values = metrics.values() if rank_sync.control.rank == 0 else {}
    return rank_sync.driver.results({**losses, **values})
