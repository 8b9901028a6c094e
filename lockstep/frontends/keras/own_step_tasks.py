"""What all ranks do in ``fit`` and ``evaluate`` of a model that defines steps itself.

Batches, epochs and callbacks are those of any Keras model (``tasks``). Logs are what the steps
return, as Keras has them: the last batch's, or the values of metrics of the same names.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from keras.src.utils.python_utils import pythonify_logs

from lockstep.data.trees import Tree
from lockstep.frontends.keras.conducting import EvaluationConductor, KerasFitConductor
from lockstep.frontends.keras.metrics import KerasMetrics, assign_each
from lockstep.frontends.keras.own_steps import OwnSteps
from lockstep.frontends.keras.share_steps import ShareSteps
from lockstep.frontends.keras.staged_steps import StagedStep, StagedSteps
from lockstep.frontends.keras.step_calls import metrics_of
from lockstep.frontends.keras.tasks import (
    BatchLosses,
    Evaluation,
    KerasConductor,
    KerasEvaluateTask,
    KerasFitTask,
    evaluated_batches,
    keras_conductor,
)
from lockstep.parallel.control import Control
from lockstep.parallel.passes import StepBatch
from lockstep.parallel.training_step import StepResult
from lockstep.parallel.worker import Worker
from lockstep.train.conductor import Conductor, Logs
from lockstep.train.ensemble import Ensemble


class StepMetrics(KerasMetrics):
    """The metrics that steps update: alike on all ranks.

    Args:
        model: the Keras model.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(None)
        self._of_layers = metrics_of(model)

    def go_on_from(self, states: Tree, control: Control) -> None:
        assign_each(self._each(), states["values"])

    def join(self, control: Control) -> None:
        """All ranks have the values of all samples."""


@dataclass(kw_only=True)
class OwnStepFitTask(KerasFitTask):
    """Training by the model's own ``train_step``.

    Attributes:
        own: what is known of the model's steps.
        loss: the step as a loss, in a pipeline; else None.
    """

    own: OwnSteps
    loss: StagedStep | None  # type: ignore[assignment]  # no other is taken
    _steps: ShareSteps | StagedSteps | None = field(default=None, init=False)

    def _train_step(self, ensemble: Ensemble, batch: StepBatch) -> StepResult:
        if self._steps is None:
            self._steps = _steps_of(ensemble, self.own, self.loss)
        logs = self._steps.run("train_step", batch.source, batch.indices, batch.step)
        keras_conductor(ensemble.conductor).tell_logs(logs)
        num_samples = len(batch.indices)
        return StepResult(total=0.0, weight=float(num_samples), num_samples=num_samples)

    def _losses(self, ensemble: Ensemble, results: Sequence[StepResult]) -> Logs:
        return {}

    def _batch_losses(self, control: Control, results: Sequence[StepResult]) -> list[BatchLosses]:
        return []

    def _evaluated(self, ensemble: Ensemble, evaluation: Evaluation, epoch: int) -> Logs:
        return _evaluate(ensemble, evaluation, self.metrics, self.own, self.loss, epoch)


@dataclass(kw_only=True)
class OwnStepEvaluateTask(KerasEvaluateTask):
    """Evaluation by the model's ``test_step``.

    Attributes:
        own: what is known of the model's steps.
        loss: see ``OwnStepFitTask``.
    """

    own: OwnSteps
    loss: StagedStep | None  # type: ignore[assignment]  # no other is taken

    def run(self, worker: Worker, control: Control, conductor: Conductor) -> Logs:
        ensemble = Ensemble(worker=worker, control=control, conductor=conductor)
        return _evaluate(ensemble, self.evaluation, self.metrics, self.own, self.loss)


def _evaluate(
    ensemble: Ensemble,
    evaluation: Evaluation,
    metrics: KerasMetrics,
    own: OwnSteps,
    staged: StagedStep | None,
    epoch: int | None = None,
) -> Logs:
    """Values over data, on rank 0; see ``tasks.evaluate``."""
    conductor = keras_conductor(ensemble.conductor)
    steps = _steps_of(ensemble, own, staged)
    metrics.reset()
    for index, part, indices in evaluated_batches(ensemble, evaluation, epoch):
        conductor.tell_logs(steps.run("test_step", part, indices, None))
        conductor.end_batch(index, None if evaluation.tells == "never" else {})
    return conductor.results({})


def _steps_of(
    ensemble: Ensemble, own: OwnSteps, staged: StagedStep | None
) -> ShareSteps | StagedSteps:
    worker: Any = ensemble.worker
    if staged is not None:
        return StagedSteps(staged, worker, ensemble.control)
    return ShareSteps(worker.model, own, worker, ensemble.control)


class _StepLogs(KerasConductor):
    """Shows what steps return, as Keras does."""

    _model: Any
    _logs: Any = None

    def tell_logs(self, logs: Logs) -> None:
        self._logs = logs

    def results(self, losses: Logs) -> Logs:
        found: Logs = pythonify_logs(self._model._get_metrics_result_or_logs(self._logs))
        return found


class OwnStepEvaluationConductor(_StepLogs, EvaluationConductor):
    """Conducts ``evaluate``."""


class OwnStepFitConductor(_StepLogs, KerasFitConductor):
    """Conducts a ``fit``."""

    def end_step(self, index: int, result: StepResult) -> None:
        self._callbacks.on_train_batch_end(index, self._logs)
        if self._keeper is not None:
            self._keeper.on_train_batch_end(index)
