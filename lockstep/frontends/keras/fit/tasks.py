"""What all ranks do in Keras's ``fit`` and ``evaluate``.

Training is that of any model (``train.fit.fit_task``). What Keras does in its own way is here:
losses of an epoch are means over its batches by their numbers of samples, and metrics are the
model's own.
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

# The number of samples of a batch, and its losses: of the whole, and of each of several.
BatchLosses = tuple[int, list[float]]

# After which batches metrics are told: "in time" is as often as a progress bar is drawn anew.
Telling = Literal["never", "in time", "each"]

# Keras's own bar is drawn at most so often.
_SECONDS_BETWEEN_SHOWS = 0.05


class KerasDriver(TaskDriver):
    """What rank 0 does between steps, with what Keras shows of them; this base shows nothing."""

    wants_out = False
    """A callback wants the evaluation, or the prediction, to end."""

    def tell_losses(self, batches: Sequence[BatchLosses]) -> None:
        """The losses of the steps that have been made since the last telling."""

    def tell_logs(self, logs: Logs) -> None:
        """What a model's own step has returned for the batch that is done."""

    def results(self, losses: Logs) -> Logs:
        """Losses, and what the model's metrics have come to."""
        return losses

    def begin_batch(self, index: int) -> None:
        """A batch of an evaluation begins."""

    def go_on(self, results: Sequence[StepResult]) -> None:
        """An epoch that has begun goes on after these steps."""

    def end_batch(self, index: int, losses: Logs | None) -> None:
        """A batch of an evaluation is done; losses so far, where somebody wants to know."""

    def tell_outputs(self, outputs: Tree) -> None:
        """The outputs of the batch that has just been predicted."""


@dataclass(kw_only=True)
class Evaluation:
    """Data to evaluate on.

    Attributes:
        source: the data.
        batch_size: of the global batch, where the data does not come in batches.
        steps: the most batches; None for all.
        tells: after which batches metrics are told.
        may_stop: callbacks may end it after any batch.
    """

    source: Source | SharedStream
    batch_size: int
    steps: int | None = None
    tells: Telling = "never"
    may_stop: bool = False


@dataclass(kw_only=True)
class KerasFitTask(FitTask):
    """Training.

    Attributes:
        loss: the loss.
        evaluation: what is evaluated, in place of ``validation``.
        evaluates: the epochs that end with that.
        tells: after which steps metrics are told.
        initial_epoch: where ``fit`` was told to begin.
        watches_validation: callbacks act where an evaluation begins or ends.
    """

    stops_before_steps = False
    kept = frozenset(("loss", "metrics"))
    metrics: KerasMetrics
    loss: KerasLoss
    evaluation: Evaluation | None = None
    evaluates: tuple[int, ...] = ()
    tells: Telling = "never"
    initial_epoch: int = 0
    watches_validation: bool = False
    _results: list[StepResult] = field(default_factory=list, init=False)  # of this epoch
    _num_told: int = field(default=0, init=False)  # of these
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
        self._num_told = 0
        self._times = show_times(rank_sync.control, self.tells)
        if results:
            keras_driver(rank_sync.driver).go_on(results)
            if self.tells != "never":
                self._tell_losses(rank_sync)
        return results

    def _tell_losses(self, rank_sync: RankSync) -> None:
        """Those of the steps that were made since the last telling."""
        news = self._batch_losses(rank_sync.control, self._results[self._num_told :])
        self._num_told = len(self._results)
        keras_driver(rank_sync.driver).tell_losses(news)

    def _train_step(self, rank_sync: RankSync, batch: StepBatch) -> StepResult:
        self.loss.run_on(rank_sync.worker.plan, rank_sync.worker.rank)
        result = super()._train_step(rank_sync, batch)
        self._results.append(result)
        if self.tells == "each":  # callbacks may look at the metrics themselves
            self.metrics.join(rank_sync.control)
            self._tell_losses(rank_sync)
        elif self._times is not None and self._times.is_due():
            with self.metrics.joined(rank_sync.control):
                self._tell_losses(rank_sync)
            self._times.set_next()
        return result

    def _losses(self, rank_sync: RankSync, results: Sequence[StepResult]) -> Logs:
        self._results.clear()
        means = LossMeans(self.loss.names)
        means.add(self._batch_losses(rank_sync.control, results))
        return means.logs

    def _batch_losses(self, control: Control, results: Sequence[StepResult]) -> list[BatchLosses]:
        """On rank 0, the losses of some steps."""
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
        """What callbacks change of the model here, all ranks get."""
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
        tells: somebody wants to know the outputs after every batch.
        may_stop: callbacks may end it after any batch.
        seed: of what layers draw: another in every call.
    """

    tells: bool = False
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
        if self.tells:
            outputs = in_order(control.gather(own))
            if outputs:
                keras_driver(driver).tell_outputs(concatenate(outputs))
        keras_driver(driver).end_batch(index, None)
        return self.may_stop and control.broadcast(keras_driver(driver).wants_out)


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
        epoch: of the ``fit`` that this is a part of, which Ctrl-C may end; None if of none.
    """
    worker, control = rank_sync.worker, rank_sync.control
    driver = keras_driver(rank_sync.driver)
    metrics.reset()
    observe = metrics.update if metrics else None
    sizes: list[int] = []
    shares: list[list[Sums]] = []
    means = LossMeans(loss.names)  # on rank 0
    loss.run_on(worker.plan, worker.rank)

    times = show_times(control, evaluation.tells)

    def caught_up() -> Logs:
        means.add(batch_losses(loss, sizes, control.gather(shares)))
        sizes.clear()
        shares.clear()
        return means.logs

    for index, part, indices in evaluated_batches(rank_sync, evaluation, epoch):
        sizes.append(len(indices))
        shares.append(worker.evaluate_step(part, indices, observe))
        metrics.settle(control)
        if evaluation.tells == "each":
            metrics.join(control)
            _end_batch(rank_sync, index, caught_up())
        elif times.is_due():
            with metrics.joined(control):
                _end_batch(rank_sync, index, caught_up())
            times.set_next()
        else:
            _end_batch(rank_sync, index, None)
    metrics.join(control)
    return driver.results(caught_up())


def _end_batch(rank_sync: RankSync, index: int, losses: Logs | None) -> None:
    rank_sync.act(partial(keras_driver(rank_sync.driver).end_batch, index, losses))


def evaluated_batches(
    rank_sync: RankSync, evaluation: Evaluation, epoch: int | None
) -> Iterator[tuple[int, Source, torch.Tensor]]:
    """The batches of an evaluation: number, where the samples are, and their indices there."""
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
            if evaluation.may_stop and control.broadcast(driver.wants_out):
                break
            if is_validation:
                rank_sync.pause_validation(index)


def batch_losses(
    loss: KerasLoss, sizes: Sequence[int], ranks: Sequence[Sequence[Sequence[Sums]]]
) -> list[BatchLosses]:
    """The losses of batches, from what the shares of every rank have come to; none elsewhere."""
    if not ranks:
        return []
    return [
        (size, loss.of_batch([sums for own in shares for sums in own]))
        for size, *shares in zip(sizes, *ranks, strict=True)
    ]


class LossMeans:
    """Means of losses over batches by their numbers of samples, as Keras has it.

    Args:
        names: of the losses beside that of the whole.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._names = ("loss", *names)
        self._totals = [0.0] * len(self._names)
        self._num_samples = 0

    def add(self, batches: Iterable[BatchLosses]) -> None:
        """Count in more batches."""
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
    """Where an epoch lies in passes over arrays, as Keras takes them.

    An epoch of some steps begins where the one before has ended; it ends with the pass. The first
    epoch of a ``fit`` begins a pass.

    Returns:
        The number of the pass, the epoch's first batch in it, and how many it has.
    """
    if steps is None:
        return epoch, 0, num_batches
    in_pass = -(-num_batches // steps)
    one_pass, place = divmod(epoch - initial_epoch, in_pass)
    start = place * steps
    return initial_epoch // in_pass + one_pass, start, min(steps, num_batches - start)


def show_times(control: Control, tells: Telling) -> ShowTimes:
    """When to tell of metrics for a progress bar."""
    return ShowTimes(control, _SECONDS_BETWEEN_SHOWS if tells == "in time" else 0.0)


def keras_driver(driver: TaskDriver) -> KerasDriver:
    """The driver, where it is rank 0's; else one that does nothing."""
    return driver if isinstance(driver, KerasDriver) else _NOBODY


_NOBODY = KerasDriver()
