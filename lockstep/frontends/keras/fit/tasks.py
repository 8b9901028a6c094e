"""Keras's ``fit`` as a task of all ranks; ``evaluate`` and ``predict`` are those of any model.

Training is that of any model (``train.fit.fit_task``). As in Keras, losses of an epoch are means
over its batches, weighted by their numbers of samples, and metrics are the model's own.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from lockstep.data.map_style.sources import Source
from lockstep.data.order import BatchOrder, epoch_order, held_streams
from lockstep.frontends.keras.layers.metrics import KerasMetrics
from lockstep.frontends.keras.loss.share_losses import KerasLoss
from lockstep.parallel.batch_run import Observe, StepBatch
from lockstep.parallel.exchange.control import Control
from lockstep.parallel.loss.share_losses import Sums
from lockstep.parallel.training_step import StepResult
from lockstep.train.callbacks.driver import Logs
from lockstep.train.callbacks.rank_sync import RankSync
from lockstep.train.fit.fit_task import FitTask
from lockstep.train.fit.tasks import Evaluation
from lockstep.train.logging.metric_display import Reports

# The number of samples of a batch, and its losses: the total, and each of several.
SizedLosses = tuple[int, list[float]]


@dataclass(frozen=True, kw_only=True)
class KerasBatchOrder(BatchOrder):
    """The order of a ``fit``'s batches, as in Keras.

    Attributes:
        initial_epoch: the argument of ``fit``.
    """

    initial_epoch: int

    def indices(self, epoch: int, num_samples: int) -> Iterator[torch.Tensor]:
        size = self.batch_size
        number, start, steps = epoch_place(
            -(-num_samples // size), self.steps_per_epoch, epoch, self.initial_epoch
        )
        order = epoch_order(self.seed, self.first_epoch + number, num_samples, shuffle=self.shuffle)
        for number in range(start, start + steps):
            yield order[number * size : (number + 1) * size]


@dataclass(kw_only=True)
class KerasFitTask(FitTask):
    """Training.

    Attributes:
        loss: the loss.
    """

    stops_before_steps = False
    kept = frozenset(("loss", "metrics"))
    metrics: KerasMetrics
    loss: KerasLoss
    _num_reported: int = field(default=0, init=False)  # steps of this epoch

    def _begin_sums(self, rank_sync: RankSync, epoch: int) -> list[StepResult]:
        results = super()._begin_sums(rank_sync, epoch)
        self._num_reported = 0
        if results and self.hooks.reports != "never":
            self._report(rank_sync, results)
        return results

    def _reports(self, rank_sync: RankSync) -> Reports:
        return Reports(self.metrics, rank_sync.control, self.hooks.reports)

    def _report(self, rank_sync: RankSync, results: Sequence[StepResult]) -> None:
        new = self._sized_losses(rank_sync.control, results[self._num_reported :])
        self._num_reported = len(results)
        rank_sync.driver.report_losses(new)

    def _train_step(self, rank_sync: RankSync, batch: StepBatch) -> StepResult:
        self.loss.run_on(rank_sync.worker.plan, rank_sync.worker.rank)
        return super()._train_step(rank_sync, batch)

    def _losses(self, rank_sync: RankSync, results: Sequence[StepResult]) -> Logs:
        means = LossMeans(self.loss.names)
        means.add(self._sized_losses(rank_sync.control, results))
        return means.logs

    def _sized_losses(self, control: Control, results: Sequence[StepResult]) -> list[SizedLosses]:
        """The losses of some steps, on rank 0."""
        if not (self.loss.names or self.loss.parts):  # all ranks know them
            return [(one.num_samples, [one.loss if one.weight else 0.0]) for one in results]
        gathered = control.gather([one.parts for one in results])
        sizes = [one.num_samples for one in results]
        return _sized_losses(self.loss, sizes, gathered)

    def _evaluation(self) -> Evaluation:
        return MeansOfBatches(self.loss)


class MeansOfBatches(Evaluation):
    """Losses are means over batches, weighted by their numbers of samples, as in Keras.

    Args:
        loss: the model's.
    """

    def __init__(self, loss: KerasLoss) -> None:
        self._loss = loss
        self._sizes: list[int] = []  # of batches since the last call of ``logs``
        self._shares: list[list[Sums]] = []
        self._means = LossMeans()

    def begin(self, rank_sync: RankSync) -> None:
        self._loss.run_on(rank_sync.worker.plan, rank_sync.worker.rank)
        self._sizes, self._shares = [], []
        self._means = LossMeans(self._loss.names)

    def run(
        self, rank_sync: RankSync, source: Source, indices: torch.Tensor, observe: Observe | None
    ) -> None:
        self._sizes.append(len(indices))
        with held_streams:
            self._shares.append(rank_sync.worker.evaluate_step(source, indices, observe))

    def logs(self, control: Control) -> Logs:
        self._means.add(_sized_losses(self._loss, self._sizes, control.gather(self._shares)))
        self._sizes, self._shares = [], []
        return self._means.logs


def _sized_losses(
    loss: KerasLoss, sizes: Sequence[int], ranks: Sequence[Sequence[Sequence[Sums]]]
) -> list[SizedLosses]:
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

    def add(self, batches: Iterable[SizedLosses]) -> None:
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

    @property
    def of_total(self) -> "LossMeans":
        """The mean of the total so far, to which further batches can be added."""
        means = LossMeans()
        means._totals, means._num_samples = self._totals[:1], self._num_samples
        return means


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
