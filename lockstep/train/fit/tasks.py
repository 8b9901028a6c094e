"""Tasks that all ranks of a team run together, in the same order; ``fit_task`` trains.

A task is shipped to every rank and run there against its Worker. Only rank 0 has a driver that
does anything: callbacks, progress, the user's metrics.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any, ClassVar

import torch

from lockstep.data.iterable.read_ahead import Read
from lockstep.data.map_style.sources import Source
from lockstep.data.order import batch_bounds
from lockstep.data.trees import Tree, map_tensors
from lockstep.parallel.data_parallel.forward import modes_of
from lockstep.parallel.exchange.control import Control
from lockstep.parallel.loss.share_losses import ONE_LOSS, LossParts, Sums
from lockstep.parallel.transfer.readers import reading_ahead
from lockstep.parallel.worker import Worker
from lockstep.train.callbacks.driver import Logs, TaskDriver
from lockstep.train.callbacks.rank_sync import RankSync
from lockstep.train.input.bad_record_filter import BadRecordFilter
from lockstep.train.input.stream_broadcast import SharedStream, all_batches
from lockstep.train.logging.metrics import Metrics


class Task(ABC):
    """Work that all ranks do together.

    Attributes:
        name: of the call, for messages.
        kept: names of the fields that the call cache compares and keeps
        (``train.runtime.call_cache``).
        source: the data for the model.
    """

    name: ClassVar[str]
    kept: ClassVar[frozenset[str]] = frozenset()
    source: Source | SharedStream

    def sources(self) -> list[Source | SharedStream]:
        """All data that is read."""
        return [self.source]

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
class EvaluateTask(Task):
    """Loss and metrics over a source, every sample once."""

    name: ClassVar[str] = "evaluate"
    source: Source | SharedStream
    batch_size: int
    metrics: Metrics
    loss_parts: LossParts = ONE_LOSS

    def run(self, worker: Worker, control: Control, driver: TaskDriver) -> Logs:
        """Evaluate; rank 0 returns the values."""
        rank_sync = RankSync(worker=worker, control=control, driver=driver)
        return evaluate(rank_sync, self.source, self.batch_size, self.metrics, self.loss_parts)


def _is_same(one: object, other: object) -> bool:
    """True if they are equal without a comparison of large values."""
    if isinstance(one, bool | int | float | str | tuple | range):
        return type(one) is type(other) and one == other
    return one is other


# Outputs, with the number of their first sample.
ShareOutput = tuple[int, Tree]


@dataclass(kw_only=True)
class PredictTask(Task):
    """Outputs for a source, every sample once.

    Attributes:
        source: the data.
        batch_size: of the global batch, if the data does not come in batches.
        steps: the most batches; None for all.
    """

    name: ClassVar[str] = "predict"
    source: Source | SharedStream
    batch_size: int
    steps: int | None = None

    def run(self, worker: Worker, control: Control, driver: TaskDriver) -> list[Tree]:
        """Predict; rank 0 returns the outputs of all shares in the order of their samples."""
        parts: list[ShareOutput] = []
        start = 0
        reads = islice(_reads_in_order(worker, self.source, self.batch_size), self.steps)
        with (
            modes_of(worker.model, training=False),
            reading_ahead(self.source, reads, worker.passes.device) as ahead,
        ):
            batches = all_batches(ahead, worker, control, self.batch_size)
            for index, (source, indices) in enumerate(islice(batches, self.steps)):
                self._begin_batch(index, driver)
                own = [
                    (start + position, map_tensors(torch.Tensor.cpu, output))
                    for position, output in worker.predict_step(source, indices)
                ]
                parts += own
                start += len(indices)
                if self._end_batch(index, own, control, driver):
                    break
        return in_order(control.gather(parts))

    def _begin_batch(self, index: int, driver: TaskDriver) -> None:
        """Before a batch."""

    def _end_batch(
        self, index: int, own: list[ShareOutput], control: Control, driver: TaskDriver
    ) -> bool:
        """After a batch, with this rank's outputs; returns, on all ranks, True to stop."""
        return False


def in_order(ranks: Sequence[Sequence[ShareOutput]]) -> list[Tree]:
    """The outputs of all ranks, in the order of their samples."""
    gathered = [part for parts in ranks for part in parts]
    return [output for _, output in sorted(gathered, key=lambda part: part[0])]


def evaluate(
    rank_sync: RankSync,
    source: Source | SharedStream,
    batch_size: int,
    metrics: Metrics,
    loss_parts: LossParts,
    epoch: int | None = None,
    bad_records: BadRecordFilter | None = None,
) -> Logs:
    """Loss and metrics over a source; on rank 0.

    Args:
        rank_sync: the ranks.
        source: the data.
        batch_size: of the global batch, if the data does not come in batches.
        metrics: this rank's metrics.
        loss_parts: of the loss, if it has several.
        epoch: of the training around it, which Ctrl-C may end; None if there is none.
        bad_records: leaves bad records out; None if they are errors.
    """
    worker, control, is_validation = rank_sync.worker, rank_sync.control, epoch is not None
    num_bad = 0
    metrics.reset()
    observe = metrics.update if metrics else None
    losses: list[Sums] = []
    reads = _reads_in_order(worker, source, batch_size)
    with (
        modes_of(worker.model, training=False),
        reading_ahead(source, reads, worker.passes.device) as ahead,
    ):
        batches = all_batches(
            ahead,
            worker,
            control,
            batch_size,
            epoch or 0,
            lambda: is_validation and rank_sync.driver.is_interrupted,
        )
        for index, (part, indices) in enumerate(batches):
            num_taken = len(indices)
            if bad_records is not None:
                part, indices = bad_records.filtered(part, indices)
                num_bad += num_taken - len(indices)
            if len(indices):
                losses += worker.evaluate_step(part, indices, observe)
            metrics.settle(control)
            if bad_records is not None:
                worker.barrier()
            if is_validation:
                rank_sync.pause_validation(index)
    gathered = [loss for losses in control.gather(losses) for loss in losses]
    counts = {} if bad_records is None else {"bad_records": num_bad}
    return {**loss_parts.logs(gathered), **joined_metrics(metrics, control), **counts}


def _reads_in_order(
    worker: Worker, source: Source | SharedStream, batch_size: int
) -> Iterator[list[Read]]:
    """The reads of a rank for each batch, without training."""
    assert not isinstance(source, SharedStream)
    for start, stop in batch_bounds(len(source), batch_size):
        yield worker.reads(torch.arange(start, stop))


def joined_metrics(metrics: Metrics, control: Control) -> Logs:
    """The metrics over all ranks; on rank 0."""
    if not metrics:
        return {}
    metrics.join(control)
    return metrics.values() if control.rank == 0 else {}
