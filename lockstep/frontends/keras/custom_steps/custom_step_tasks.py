"""``fit`` and ``evaluate`` of a model with custom steps, as tasks of all ranks.

Batches, epochs and callbacks are those of any Keras model (``tasks``). As in Keras, logs are what
the step returns for the last batch, or the values of metrics of the same names.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.data.map_style.sources import Source
from lockstep.data.trees import Tree
from lockstep.frontends.keras.custom_steps.custom_step import CustomSteps
from lockstep.frontends.keras.custom_steps.share_steps import ShareSteps
from lockstep.frontends.keras.custom_steps.step_calls import metrics_of
from lockstep.frontends.keras.fit.tasks import KerasFitTask, SizedLosses
from lockstep.frontends.keras.layers.metrics import KerasMetrics, assign_each
from lockstep.parallel.batch_run import Observe, StepBatch
from lockstep.parallel.exchange.control import Control
from lockstep.parallel.training_step import StepResult
from lockstep.train.callbacks.driver import Logs
from lockstep.train.callbacks.rank_sync import RankSync
from lockstep.train.fit.tasks import Evaluation


class StepMetrics(KerasMetrics):
    """The metrics that steps update: equal on all ranks.

    Args:
        model: the Keras model.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(None)
        self._of_layers = metrics_of(model)

    def go_on_from(self, states: Tree, control: Control) -> None:
        assign_each(self._each(), states["values"])

    def join(self, control: Control) -> None:
        """Do nothing: every rank has the values of all samples."""


@dataclass(kw_only=True)
class CustomStepFitTask(KerasFitTask):
    """Training by the model's own ``train_step``.

    Attributes:
        custom: what is known of the model's steps.
    """

    custom: CustomSteps
    loss: None  # type: ignore[assignment]  # the step computes it
    _steps: ShareSteps | None = field(default=None, init=False)

    def _train_step(self, rank_sync: RankSync, batch: StepBatch) -> StepResult:
        if self._steps is None:
            self._steps = _steps_of(rank_sync, self.custom)
        logs = self._steps.run("train_step", batch.source, batch.indices, batch.step)
        rank_sync.driver.report_logs(logs)
        num_samples = len(batch.indices)
        return StepResult(total=0.0, weight=float(num_samples), num_samples=num_samples)

    def _report(self, rank_sync: RankSync, results: Sequence[StepResult]) -> None:
        """Do nothing: the step itself returns its logs."""

    def _losses(self, rank_sync: RankSync, results: Sequence[StepResult]) -> Logs:
        return {}

    def _sized_losses(self, control: Control, results: Sequence[StepResult]) -> list[SizedLosses]:
        return []

    def _evaluation(self) -> Evaluation:
        return CustomStepEvaluation(self.custom)


class CustomStepEvaluation(Evaluation):
    """Evaluation by the model's ``test_step``.

    Args:
        custom: what is known of the model's steps.
    """

    def __init__(self, custom: CustomSteps) -> None:
        self._custom = custom
        self._steps: ShareSteps | None = None

    def begin(self, rank_sync: RankSync) -> None:
        self._steps = _steps_of(rank_sync, self._custom)

    def run(
        self, rank_sync: RankSync, source: Source, indices: torch.Tensor, observe: Observe | None
    ) -> None:
        assert self._steps is not None
        rank_sync.driver.report_logs(self._steps.run("test_step", source, indices, None))

    def logs(self, control: Control) -> Logs:
        return {}


def _steps_of(rank_sync: RankSync, custom: CustomSteps) -> ShareSteps:
    worker: Any = rank_sync.worker
    return ShareSteps(worker.model, custom, worker, rank_sync.control)
