"""What all ranks do in Keras's ``fit`` and ``evaluate``.

Training is that of any model (``train.fit_task``). What Keras does in its own way is here: losses
of an epoch are means over its batches by their numbers of samples, and metrics are the model's own.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Literal

import torch

from lockstep.data.order import epoch_order
from lockstep.data.sources import Source
from lockstep.data.trees import Tree, concatenate
from lockstep.frontends.keras.losses import KerasLoss
from lockstep.frontends.keras.metrics import KerasMetrics
from lockstep.parallel.control import Control
from lockstep.parallel.losses import Sums
from lockstep.parallel.passes import StepBatch
from lockstep.parallel.training_step import StepResult
from lockstep.parallel.worker import Worker, modes_of
from lockstep.train.conductor import Conductor, Logs
from lockstep.train.ensemble import Ensemble
from lockstep.train.feeding import SharedStream, all_batches
from lockstep.train.fit_task import FitTask
from lockstep.train.metric_shows import ShowTimes
from lockstep.train.tasks import Part, PredictTask, Task, in_order

# The number of samples of a batch, and its losses: of the whole, and of each of several.
BatchLosses = tuple[int, list[float]]

# After which batches metrics are told: "in time" is as often as a progress bar is drawn anew.
Telling = Literal["never", "in time", "each"]

# Keras's own bar is drawn at most so often.
_SECONDS_BETWEEN_SHOWS = 0.05


class KerasConductor(Conductor):
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

    def _begin_sums(self, ensemble: Ensemble, epoch: int) -> list[StepResult]:
        results = super()._begin_sums(ensemble, epoch)
        self._results = [*results]
        self._num_told = 0
        self._times = show_times(ensemble.control, self.tells)
        if results:
            keras_conductor(ensemble.conductor).go_on(results)
            if self.tells != "never":
                self._tell_losses(ensemble)
        return results

    def _tell_losses(self, ensemble: Ensemble) -> None:
        """Those of the steps that were made since the last telling."""
        news = self._batch_losses(ensemble.control, self._results[self._num_told :])
        self._num_told = len(self._results)
        keras_conductor(ensemble.conductor).tell_losses(news)

    def _train_step(self, ensemble: Ensemble, batch: StepBatch) -> StepResult:
        self.loss.run_on(ensemble.worker.plan, ensemble.worker.rank)
        result = super()._train_step(ensemble, batch)
        self._results.append(result)
        if self.tells == "each":  # callbacks may look at the metrics themselves
            self.metrics.join(ensemble.control)
            self._tell_losses(ensemble)
        elif self._times is not None and self._times.is_due():
            with self.metrics.joined(ensemble.control):
                self._tell_losses(ensemble)
            self._times.set_next()
        return result

    def _losses(self, ensemble: Ensemble, results: Sequence[StepResult]) -> Logs:
        self._results.clear()
        means = LossMeans(self.loss.names)
        means.add(self._batch_losses(ensemble.control, results))
        return means.logs

    def _batch_losses(self, control: Control, results: Sequence[StepResult]) -> list[BatchLosses]:
        """On rank 0, the losses of some steps."""
        if not (self.loss.names or self.loss.parts):  # all ranks know them
            return [(one.num_samples, [one.loss if one.weight else 0.0]) for one in results]
        gathered = control.gather([one.parts for one in results])
        sizes = [one.num_samples for one in results]
        return batch_losses(self.loss, sizes, gathered)

    def _logs(self, ensemble: Ensemble, epoch: int, losses: Logs) -> Logs:
        conductor, control = keras_conductor(ensemble.conductor), ensemble.control
        self.metrics.join(control)
        logs = conductor.results(losses)
        if self.evaluation is None or epoch not in self.evaluates:
            return logs
        if self.watches_validation:  # a callback may swap weights for their averages
            ensemble.show_slots()
        self._around_validation(ensemble, conductor.begin_validation)
        ensemble.share_buffers()
        found = self._evaluated(ensemble, self.evaluation, epoch)
        self._around_validation(ensemble, partial(conductor.end_validation, found))
        return {**logs, **{f"val_{name}": value for name, value in found.items()}}

    def _evaluated(self, ensemble: Ensemble, evaluation: Evaluation, epoch: int) -> Logs:
        return evaluate(ensemble, evaluation, self.metrics, self.loss, epoch)

    def _around_validation(self, ensemble: Ensemble, act: Callable[[], None]) -> None:
        """What callbacks change of the model here, all ranks get."""
        if self.watches_validation:
            ensemble.consult(act)
        else:
            ensemble.act(act)


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

    def run(self, worker: Worker, control: Control, conductor: Conductor) -> Logs:
        """Evaluate; rank 0 returns the values."""
        ensemble = Ensemble(worker=worker, control=control, conductor=conductor)
        return evaluate(ensemble, self.evaluation, self.metrics, self.loss)


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

    def run(self, worker: Worker, control: Control, conductor: Conductor) -> list[Tree]:
        """Predict; rank 0 returns the outputs."""
        worker.passes.reseed(self.seed)
        return super().run(worker, control, conductor)

    def _begin_batch(self, index: int, conductor: Conductor) -> None:
        keras_conductor(conductor).begin_batch(index)

    def _end_batch(
        self, index: int, own: list[Part], control: Control, conductor: Conductor
    ) -> bool:
        if self.tells:
            outputs = in_order(control.gather(own))
            if outputs:
                keras_conductor(conductor).tell_outputs(concatenate(outputs))
        keras_conductor(conductor).end_batch(index, None)
        return self.may_stop and control.broadcast(keras_conductor(conductor).wants_out)


def evaluate(
    ensemble: Ensemble,
    evaluation: Evaluation,
    metrics: KerasMetrics,
    loss: KerasLoss,
    epoch: int | None = None,
) -> Logs:
    """Losses and metrics over data; on rank 0.

    Args:
        ensemble: the ranks.
        evaluation: the data.
        metrics: the model's.
        loss: the model's.
        epoch: of the ``fit`` that this is a part of, which Ctrl-C may end; None if of none.
    """
    worker, control = ensemble.worker, ensemble.control
    conductor = keras_conductor(ensemble.conductor)
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

    for index, part, indices in evaluated_batches(ensemble, evaluation, epoch):
        sizes.append(len(indices))
        shares.append(worker.evaluate_step(part, indices, observe))
        metrics.settle(control)
        if evaluation.tells == "each":
            metrics.join(control)
            _end_batch(ensemble, index, caught_up())
        elif times.is_due():
            with metrics.joined(control):
                _end_batch(ensemble, index, caught_up())
            times.set_next()
        else:
            _end_batch(ensemble, index, None)
    metrics.join(control)
    return conductor.results(caught_up())


def _end_batch(ensemble: Ensemble, index: int, losses: Logs | None) -> None:
    ensemble.act(partial(keras_conductor(ensemble.conductor).end_batch, index, losses))


def evaluated_batches(
    ensemble: Ensemble, evaluation: Evaluation, epoch: int | None
) -> Iterator[tuple[int, Source, torch.Tensor]]:
    """The batches of an evaluation: number, where the samples are, and their indices there."""
    control, conductor = ensemble.control, keras_conductor(ensemble.conductor)
    is_validation = epoch is not None
    with modes_of(ensemble.worker.model, training=False):
        batches = all_batches(
            evaluation.source,
            ensemble.worker,
            control,
            evaluation.batch_size,
            epoch or 0,
            lambda: is_validation and ensemble.conductor.is_interrupted,
        )
        for index, (part, indices) in enumerate(islice(batches, evaluation.steps)):
            ensemble.act(partial(conductor.begin_batch, index))
            yield index, part, indices
            if evaluation.may_stop and control.broadcast(conductor.wants_out):
                break
            if is_validation:
                ensemble.pause_validation(index)


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


def keras_conductor(conductor: Conductor) -> KerasConductor:
    """The conductor, where it is rank 0's; else one that does nothing."""
    return conductor if isinstance(conductor, KerasConductor) else _NOBODY


_NOBODY = KerasConductor()
