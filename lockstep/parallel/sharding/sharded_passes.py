"""Passes of a rank that has a unit's parameters only while it runs."""

from typing import Any

import torch

from lockstep.data.map_style.sources import Batch
from lockstep.parallel.batch_run import Run, Take
from lockstep.parallel.data_parallel.model_passes import ModelPasses
from lockstep.parallel.sharding.residency import Residency
from lockstep.parallel.sharding.step_residency import StepResidency
from lockstep.parallel.training_step import TrainingStep
from lockstep.parallel.workload import Workload


class ShardedPasses(ModelPasses):
    """Passes over a model whose parameters are divided.

    Args:
        work: common to all ranks.
        residency: of this rank's parameters.
        options: see ``ModelPasses``.
    """

    def __init__(self, work: Workload, *, residency: Residency, **options: Any) -> None:
        super().__init__(work, **options)
        self._residency = residency
        # Other ranks may go backward more often: else the residency has units sent in one order.
        self._completes_gradients = isinstance(residency, StepResidency)
        self.side_effects.gathered = residency.gathered

    def begin(self, run: Run) -> None:
        # First: what is gathered is not a change by the model.
        self._exchange.open()
        self._residency.begin(
            self._most_shares(run.num_filled),
            is_training=run.is_training,
            is_tried=run.is_tried,
            forward_first=self._goes_forward_first,
        )
        super().begin(run)

    def _most_shares(self, num_filled: int) -> int:
        """The largest number of filled shares of any rank."""
        shares = map(self._plan.shares_of, range(self._plan.num_replicas))
        return max(min(own.stop, num_filled) - own.start for own in shares)

    def _go_forward(self, shares: list[int], now: TrainingStep) -> None:
        with self._residency.forward():
            super()._go_forward(shares, now)

    def _go_backward(self, shares: list[int], now: TrainingStep) -> None:
        self._residency.finish_forward()
        if self._joint or self._apart:  # before other ranks wait for this one's units
            self._settle_weights(now.batch)
        with self._residency.backward():
            super()._go_backward(shares, now)

    def diagnose(self, run: Run, share: int) -> str:
        with self._residency.whole():
            return super().diagnose(run, share)

    def _try_on_halves(self, run: Run, batch: Batch) -> None:
        super()._try_on_halves(run, batch)
        self._residency.meet()

    def _before_statistics(self, row: torch.Tensor) -> None:
        norm, is_backward = divmod(int(row[0]), 2)
        self._residency.before_statistics(norm, is_backward=bool(is_backward))

    def hand_in(self) -> None:
        self._residency.finish()

    def infer(self, run: Run, take: Take) -> None:
        super().infer(run, take)
        self._residency.finish()

    def _infer_together(self, run: Run, shares: list[int], take: Take) -> None:
        with self._residency.forward():
            super()._infer_together(run, shares, take)
