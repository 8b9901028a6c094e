"""What all ranks do in Keras's ``fit`` and ``evaluate``.

Training is the Trainer's (``train.tasks``). What Keras does in its own way is here: losses of an
epoch are means over its batches by their numbers of samples, and metrics are the model's own.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from lockstep.data.order import epoch_order
from lockstep.data.sources import Source
from lockstep.frontends.keras.losses import KerasLoss
from lockstep.frontends.keras.metrics import KerasMetrics
from lockstep.parallel.control import Control
from lockstep.parallel.losses import Sums
from lockstep.parallel.worker import Observe, StepResult, Worker, modes_of
from lockstep.train.feeding import SharedStream, all_batches
from lockstep.train.tasks import Conductor, Ensemble, FitTask, Logs, Task

# The number of samples of a batch, and its losses: of the whole, and of each of several.
BatchLosses = tuple[int, list[float]]


class KerasConductor(Conductor):
    """What rank 0 does between steps, with what Keras shows of them; this base shows nothing."""

    def tell_losses(self, losses: BatchLosses) -> None:
        """The losses of the step that has just been made."""

    def results(self, losses: Logs) -> Logs:
        """Losses, and what the model's metrics have come to."""
        return losses

    def begin_batch(self, index: int) -> None:
        """A batch of an evaluation begins."""

    def end_batch(self, index: int, losses: Logs | None) -> None:
        """A batch of an evaluation is done; losses so far, where somebody wants to know."""


@dataclass(kw_only=True)
class Evaluation:
    """Data to evaluate on.

    Attributes:
        source: the data.
        batch_size: of the global batch, where the data does not come in batches.
        steps: the most batches; None for all.
        tells: somebody wants to know metrics after every batch.
    """

    source: Source | SharedStream
    batch_size: int
    steps: int | None = None
    tells: bool = False


@dataclass(kw_only=True)
class KerasFitTask(FitTask):
    """Training.

    Attributes:
        loss: the loss.
        evaluation: what is evaluated, in place of ``validation``.
        evaluates: for each epoch, whether it ends with that.
        tells: somebody wants to know metrics after every step.
        initial_epoch: where ``fit`` was told to begin.
    """

    metrics: KerasMetrics
    loss: KerasLoss
    evaluation: Evaluation | None = None
    evaluates: tuple[bool, ...] = ()
    tells: bool = False
    initial_epoch: int = 0

    def _indices(self, epoch: int) -> Iterator[torch.Tensor]:
        assert not isinstance(self.source, SharedStream)
        size, samples = self.batch_size, len(self.source)
        one_pass, start, steps = epoch_place(
            -(-samples // size), self.steps_per_epoch, epoch - self.initial_epoch
        )
        number = self.first_epoch + self.initial_epoch + one_pass
        order = epoch_order(self.seed, number, samples, shuffle=self.shuffle)
        for number in range(start, start + steps):
            yield order[number * size : (number + 1) * size]

    def _train_step(
        self,
        ensemble: Ensemble,
        source: Source,
        indices: torch.Tensor,
        step: int,
        observe: Observe | None,
    ) -> StepResult:
        self.loss.batch_size = len(indices)
        result = super()._train_step(ensemble, source, indices, step, observe)
        self.metrics.settle(ensemble.control)
        if self.tells:
            self.metrics.join(ensemble.control)
            for losses in self._batch_losses(ensemble.control, [result]):
                _show(ensemble.conductor).tell_losses(losses)
        return result

    def _losses(self, ensemble: Ensemble, results: Sequence[StepResult]) -> Logs:
        batches = self._batch_losses(ensemble.control, results)
        return mean_losses(batches, self.loss.names)

    def _batch_losses(self, control: Control, results: Sequence[StepResult]) -> list[BatchLosses]:
        """On rank 0, the losses of some steps."""
        if not (self.loss.names or self.loss.parts):  # all ranks know them
            return [(one.num_samples, [one.loss if one.weight else 0.0]) for one in results]
        gathered = control.gather([one.parts for one in results])
        sizes = [one.num_samples for one in results]
        return batch_losses(self.loss, sizes, gathered)

    def _logs(self, ensemble: Ensemble, epoch: int, losses: Logs) -> Logs:
        conductor, control = _show(ensemble.conductor), ensemble.control
        self.metrics.join(control)
        logs = conductor.results(losses)
        if self.evaluation is None or not self.evaluates[epoch]:
            return logs
        conductor.begin_validation()
        ensemble.share_buffers()
        found = evaluate(
            ensemble.worker,
            control,
            conductor,
            self.evaluation,
            self.metrics,
            self.loss,
            epoch,
            ensemble.pause_validation,
            lambda: conductor.is_interrupted,
        )
        conductor.end_validation(found)
        return {**logs, **{f"val_{name}": value for name, value in found.items()}}


@dataclass(kw_only=True)
class KerasEvaluateTask(Task):
    """Losses and metrics over data, every sample once."""

    evaluation: Evaluation
    metrics: KerasMetrics
    loss: KerasLoss

    @property
    def source(self) -> Source | SharedStream:  # type: ignore[override]  # an attribute there
        """The data."""
        return self.evaluation.source

    def run(self, worker: Worker, control: Control, conductor: Conductor) -> Logs:
        """Evaluate; rank 0 returns the values."""
        return evaluate(worker, control, _show(conductor), self.evaluation, self.metrics, self.loss)


def evaluate(
    worker: Worker,
    control: Control,
    conductor: KerasConductor,
    evaluation: Evaluation,
    metrics: KerasMetrics,
    loss: KerasLoss,
    epoch: int = 0,
    pause: Callable[[int], None] = lambda index: None,
    gives_up: Callable[[], bool] = lambda: False,
) -> Logs:
    """Losses and metrics over data; on rank 0."""
    metrics.reset()
    observe = metrics.update if metrics else None
    sizes: list[int] = []
    shares: list[list[Sums]] = []
    with modes_of(worker.model, training=False):
        batches = all_batches(
            evaluation.source, worker, control, evaluation.batch_size, epoch, gives_up
        )
        for index, (part, indices) in enumerate(islice(batches, evaluation.steps)):
            conductor.begin_batch(index)
            loss.batch_size = len(indices)
            sizes.append(len(indices))
            shares.append(worker.evaluate_step(part, indices, observe))
            metrics.settle(control)
            told = None
            if evaluation.tells:
                metrics.join(control)
                told = mean_losses(batch_losses(loss, sizes, control.gather(shares)), loss.names)
            conductor.end_batch(index, told)
            pause(index)
    losses = mean_losses(batch_losses(loss, sizes, control.gather(shares)), loss.names)
    metrics.join(control)
    return conductor.results(losses)


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


def mean_losses(batches: Sequence[BatchLosses], names: Sequence[str]) -> Logs:
    """Means over batches by their numbers of samples, as Keras has it."""
    if not batches:
        return {}
    samples = sum(size for size, _ in batches)
    columns = zip(*(losses for _, losses in batches), strict=True)
    means = [
        math.fsum(size * value for (size, _), value in zip(batches, column, strict=True)) / samples
        for column in columns
    ]
    return dict(zip(("loss", *names), means, strict=True))


def epoch_place(num_batches: int, steps: int | None, epoch: int) -> tuple[int, int, int]:
    """Where an epoch lies in passes over arrays, as Keras takes them.

    An epoch of some steps begins where the one before has ended; it ends with the pass.

    Returns:
        The number of the pass, the epoch's first batch in it, and how many it has.
    """
    if steps is None:
        return epoch, 0, num_batches
    in_pass = -(-num_batches // steps)
    one_pass, place = divmod(epoch, in_pass)
    start = place * steps
    return one_pass, start, min(steps, num_batches - start)


def _show(conductor: Conductor) -> KerasConductor:
    return conductor if isinstance(conductor, KerasConductor) else _NOBODY


_NOBODY = KerasConductor()
