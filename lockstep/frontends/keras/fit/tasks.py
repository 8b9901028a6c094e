"""Keras's ``fit``, ``evaluate`` and ``predict`` as tasks of all ranks.

Training is that of any model (``train.fit.fit_task``). As in Keras, losses of an epoch are means
over its batches, weighted by their numbers of samples, and metrics are the model's own.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Literal

import torch

from lockstep.data.map_style.sources import Source
from lockstep.data.order import epoch_order
from lockstep.data.trees import Tree, concatenate
from lockstep.frontends.keras.layers.metrics import KerasMetrics
from lockstep.frontends.keras.loss.share_losses import KerasLoss
from lockstep.parallel.batch_run import StepBatch
from lockstep.parallel.data_parallel.forward import modes_of
from lockstep.parallel.exchange.control import Control
from lockstep.parallel.loss.share_losses import Sums
from lockstep.parallel.training_step import StepResult
from lockstep.parallel.worker import Worker
from lockstep.train.callbacks.driver import Logs, TaskDriver
from lockstep.train.callbacks.rank_sync import RankSync
from lockstep.train.fit.fit_task import FitTask
from lockstep.train.fit.tasks import PredictTask, ShareOutput, Task, in_order
from lockstep.train.input.stream_broadcast import SharedStream, all_batches
from lockstep.train.logging.metric_display import ShowTimes

# The number of samples of a batch, and its losses: the total, and each of several.
BatchLosses = tuple[int, list[float]]

# After which batches metrics are reported: "timed" is as often as a progress bar is redrawn.
ReportTimes = Literal["never", "timed", "each"]

# Keras's own bar is drawn at most so often.
_SECONDS_BETWEEN_SHOWS = 0.05


class KerasDriver(TaskDriver):
    """What rank 0 does between steps, with Keras's callbacks; this base does nothing."""

    wants_to_stop = False
    """True if a callback has ended the evaluation or prediction."""

    def report_losses(self, batches: Sequence[BatchLosses]) -> None:
        """Take the losses of the steps since the last report."""

    def report_logs(self, logs: Logs) -> None:
        """Take the logs that a custom step has returned for a batch."""

    def results(self, losses: Logs) -> Logs:
        """Losses and the values of the model's metrics."""
        return losses

    def begin_batch(self, index: int) -> None:
        """A batch of an evaluation begins."""

    def resume_epoch(self, results: Sequence[StepResult]) -> None:
        """An epoch continues after these steps."""

    def end_batch(self, index: int, losses: Logs | None) -> None:
        """A batch of an evaluation has ended; losses so far, or None if not due for a report."""

    def report_outputs(self, outputs: Tree) -> None:
        """Take the outputs of the batch that has just been predicted."""


@dataclass(kw_only=True)
class Evaluation:
    """Data to evaluate on.

    Attributes:
        source: the data.
        batch_size: of the global batch, if the data has no batches of its own.
        steps: the most batches; None for all.
        reports: after which batches metrics are reported.
        may_stop: True if callbacks may end it after any batch.
    """

    source: Source | SharedStream
    batch_size: int
    steps: int | None = None
    reports: ReportTimes = "never"
    may_stop: bool = False


@dataclass(kw_only=True)
class KerasFitTask(FitTask):
    """Training.

    Attributes:
        loss: the loss.
        evaluation: the data for evaluation, in place of ``validation``.
        evaluates: the epochs that end with an evaluation.
        reports: after which steps metrics are reported.
        initial_epoch: the argument of ``fit``.
        watches_validation: True if callbacks act when an evaluation begins or ends.
    """

    stops_before_steps = False
    kept = frozenset(("loss", "metrics"))
    metrics: KerasMetrics
    loss: KerasLoss
    evaluation: Evaluation | None = None
    evaluates: tuple[int, ...] = ()
    reports: ReportTimes = "never"
    initial_epoch: int = 0
    watches_validation: bool = False
    _results: list[StepResult] = field(default_factory=list, init=False)  # of this epoch
    _num_reported: int = field(default=0, init=False)  # of the results
    _times: ShowTimes | None = field(default=None, init=False)

    def sources(self) -> list[Source | SharedStream]:
        return [self.source, *([] if self.evaluation is None else [self.evaluation.source])]

    def _indices(self, epoch: int) -> Iterator[torch.Tensor]:
        assert not isinstance(self.source, SharedStream)
        size, samples = self.batch_size, len(self.source)
        number, start, steps = epoch_place(
            -(-samples // size), self.steps_per_epoch, epoch, self.initial_epoch
        )
        order = epoch_order(self.seed, self.first_epoch + number, samples, shuffle=self.shuffle)
        for number in range(start, start + steps):
            yield order[number * size : (number + 1) * size]

    def _begin_sums(self, rank_sync: RankSync, epoch: int) -> list[StepResult]:
        results = super()._begin_sums(rank_sync, epoch)
        self._results = [*results]
        self._num_reported = 0
        self._times = show_times(rank_sync.control, self.reports)
        if results:
            keras_driver(rank_sync.driver).resume_epoch(results)
            if self.reports != "never":
                self._report_losses(rank_sync)
        return results

    def _report_losses(self, rank_sync: RankSync) -> None:
        """Report the losses of the steps since the last report."""
        new = self._batch_losses(rank_sync.control, self._results[self._num_reported :])
        self._num_reported = len(self._results)
        keras_driver(rank_sync.driver).report_losses(new)

    def _train_step(self, rank_sync: RankSync, batch: StepBatch) -> StepResult:
        self.loss.run_on(rank_sync.worker.plan, rank_sync.worker.rank)
        result = super()._train_step(rank_sync, batch)
        self._results.append(result)
        if self.reports == "each":  # callbacks may look at the metrics themselves
            self.metrics.join(rank_sync.control)
            self._report_losses(rank_sync)
        elif self._times is not None and self._times.is_due():
            with self.metrics.joined(rank_sync.control):
                self._report_losses(rank_sync)
            self._times.set_next()
        return result

    def _losses(self, rank_sync: RankSync, results: Sequence[StepResult]) -> Logs:
        self._results.clear()
        means = LossMeans(self.loss.names)
        means.add(self._batch_losses(rank_sync.control, results))
        return means.logs

    def _batch_losses(self, control: Control, results: Sequence[StepResult]) -> list[BatchLosses]:
        """The losses of some steps, on rank 0."""
        if not (self.loss.names or self.loss.parts):  # all ranks know them
            return [(one.num_samples, [one.loss if one.weight else 0.0]) for one in results]
        gathered = control.gather([one.parts for one in results])
        sizes = [one.num_samples for one in results]
        return batch_losses(self.loss, sizes, gathered)

    def _logs(self, rank_sync: RankSync, epoch: int, losses: Logs) -> Logs:
        driver, control = keras_driver(rank_sync.driver), rank_sync.control
        self.metrics.join(control)
        logs = driver.results(losses)
        if self.evaluation is None or epoch not in self.evaluates:
            return logs
        if self.watches_validation:  # a callback may swap weights for their averages
            rank_sync.show_slots()
        self._around_validation(rank_sync, driver.begin_validation)
        rank_sync.share_buffers()
        found = self._evaluated(rank_sync, self.evaluation, epoch)
        self._around_validation(rank_sync, partial(driver.end_validation, found))
        return {**logs, **{f"val_{name}": value for name, value in found.items()}}

    def _evaluated(self, rank_sync: RankSync, evaluation: Evaluation, epoch: int) -> Logs:
        return evaluate(rank_sync, evaluation, self.metrics, self.loss, epoch)

    def _around_validation(self, rank_sync: RankSync, act: Callable[[], None]) -> None:
        """Call callbacks; all ranks get their changes of the model."""
        if self.watches_validation:
            rank_sync.sync_callback(act)
        else:
            rank_sync.act(act)


@dataclass(kw_only=True)
class KerasEvaluateTask(Task):
    """Losses and metrics over data, every sample once."""

    name = "evaluate"
    kept = frozenset(("loss", "metrics"))
    evaluation: Evaluation
    metrics: KerasMetrics
    loss: KerasLoss

    @property
    def source(self) -> Source | SharedStream:  # type: ignore[override]  # an attribute there
        """The data."""
        return self.evaluation.source

    def run(self, worker: Worker, control: Control, driver: TaskDriver) -> Logs:
        """Evaluate; rank 0 returns the values."""
        rank_sync = RankSync(worker=worker, control=control, driver=driver)
        return evaluate(rank_sync, self.evaluation, self.metrics, self.loss)


@dataclass(kw_only=True)
class KerasPredictTask(PredictTask):
    """Outputs for data.

    Attributes:
        reports: True if callbacks get the outputs after every batch.
        may_stop: True if callbacks may end it after any batch.
        seed: of the random numbers of layers: another in every call.
    """

    reports: bool = False
    may_stop: bool = False
    seed: int = 0

    def run(self, worker: Worker, control: Control, driver: TaskDriver) -> list[Tree]:
        """Predict; rank 0 returns the outputs."""
        worker.passes.reseed(self.seed)
        return super().run(worker, control, driver)

    def _begin_batch(self, index: int, driver: TaskDriver) -> None:
        keras_driver(driver).begin_batch(index)

    def _end_batch(
        self, index: int, own: list[ShareOutput], control: Control, driver: TaskDriver
    ) -> bool:
        if self.reports:
            outputs = in_order(control.gather(own))
            if outputs:
                keras_driver(driver).report_outputs(concatenate(outputs))
        keras_driver(driver).end_batch(index, None)
        return self.may_stop and control.broadcast(keras_driver(driver).wants_to_stop)


def evaluate(
    rank_sync: RankSync,
    evaluation: Evaluation,
    metrics: KerasMetrics,
    loss: KerasLoss,
    epoch: int | None = None,
) -> Logs:
    """Losses and metrics over data; on rank 0.

    Args:
        rank_sync: the ranks.
        evaluation: the data.
        metrics: the model's.
        loss: the model's.
        epoch: of the ``fit`` that this is a part of, which Ctrl-C may end; None outside of one.
    """
    worker, control = rank_sync.worker, rank_sync.control
    driver = keras_driver(rank_sync.driver)
    metrics.reset()
    observe = metrics.update if metrics else None
    sizes: list[int] = []
    shares: list[list[Sums]] = []
    means = LossMeans(loss.names)  # on rank 0
    loss.run_on(worker.plan, worker.rank)

    times = show_times(control, evaluation.reports)

    def means_so_far() -> Logs:
        means.add(batch_losses(loss, sizes, control.gather(shares)))
        sizes.clear()
        shares.clear()
        return means.logs

    for index, part, indices in evaluated_batches(rank_sync, evaluation, epoch):
        sizes.append(len(indices))
        shares.append(worker.evaluate_step(part, indices, observe))
        metrics.settle(control)
        if evaluation.reports == "each":
            metrics.join(control)
            _end_batch(rank_sync, index, means_so_far())
        elif times.is_due():
            with metrics.joined(control):
                _end_batch(rank_sync, index, means_so_far())
            times.set_next()
        else:
            _end_batch(rank_sync, index, None)
    metrics.join(control)
    return driver.results(means_so_far())


def _end_batch(rank_sync: RankSync, index: int, losses: Logs | None) -> None:
    rank_sync.act(partial(keras_driver(rank_sync.driver).end_batch, index, losses))


def evaluated_batches(
    rank_sync: RankSync, evaluation: Evaluation, epoch: int | None
) -> Iterator[tuple[int, Source, torch.Tensor]]:
    """The batches of an evaluation: number, source of the samples, and their indices in it."""
    control, driver = rank_sync.control, keras_driver(rank_sync.driver)
    is_validation = epoch is not None
    with modes_of(rank_sync.worker.model, training=False):
        batches = all_batches(
            evaluation.source,
            rank_sync.worker,
            control,
            evaluation.batch_size,
            epoch or 0,
            lambda: is_validation and rank_sync.driver.is_interrupted,
        )
        for index, (part, indices) in enumerate(islice(batches, evaluation.steps)):
            rank_sync.act(partial(driver.begin_batch, index))
            yield index, part, indices
            if evaluation.may_stop and control.broadcast(driver.wants_to_stop):
                break
            if is_validation:
                rank_sync.pause_validation(index)


def batch_losses(
    loss: KerasLoss, sizes: Sequence[int], ranks: Sequence[Sequence[Sequence[Sums]]]
) -> list[BatchLosses]:
    """The losses of batches from the shares of all ranks, on rank 0; empty elsewhere."""
    if not ranks:
        return []
    return [
        (size, loss.of_batch([sums for own in shares for sums in own]))
        for size, *shares in zip(sizes, *ranks, strict=True)
    ]


class LossMeans:
    """Means of losses over batches, weighted by their numbers of samples, as in Keras.

    Args:
        names: of the losses beside the total.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._names = ("loss", *names)
        self._totals = [0.0] * len(self._names)
        self._num_samples = 0

    def add(self, batches: Iterable[BatchLosses]) -> None:
        """Add batches."""
        for size, losses in batches:
            for number, loss in enumerate(losses):
                self._totals[number] += size * loss
            self._num_samples += size

    @property
    def logs(self) -> Logs:
        """The means so far, by name; none before the first batch."""
        if not self._num_samples:
            return {}
        means = (total / self._num_samples for total in self._totals)
        return dict(zip(self._names, means, strict=True))


def epoch_place(
    num_batches: int, steps: int | None, epoch: int, initial_epoch: int = 0
) -> tuple[int, int, int]:
    """The place of an epoch in passes over arrays, as in Keras.

    An epoch with a number of steps begins where the one before ended, and ends with the pass at the
    latest. The first epoch of a ``fit`` begins a pass.

    Returns:
        The number of the pass, the epoch's first batch in it, and its number of batches.
    """
    if steps is None:
        return epoch, 0, num_batches
    in_pass = -(-num_batches // steps)
    one_pass, place = divmod(epoch - initial_epoch, in_pass)
    start = place * steps
    return initial_epoch // in_pass + one_pass, start, min(steps, num_batches - start)


def show_times(control: Control, reports: ReportTimes) -> ShowTimes:
    """When to report metrics for a progress bar."""
    return ShowTimes(control, _SECONDS_BETWEEN_SHOWS if reports == "timed" else 0.0)


def keras_driver(driver: TaskDriver) -> KerasDriver:
    """The driver on rank 0; elsewhere one that does nothing."""
    return driver if isinstance(driver, KerasDriver) else _SILENT_DRIVER


_SILENT_DRIVER = KerasDriver()
