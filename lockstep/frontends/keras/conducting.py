"""Rank 0's part between steps of a Keras model: Keras's callbacks, with global values."""

from collections.abc import Callable
from typing import Any

import torch
from keras.src.callbacks.callback import Callback
from keras.src.utils.python_utils import pythonify_logs

from lockstep.frontends.keras.model import KerasModel
from lockstep.frontends.keras.tasks import BatchLosses, KerasConductor
from lockstep.frontends.keras.updater import KerasUpdater
from lockstep.parallel.parcel import describe
from lockstep.parallel.update import PieceSlots
from lockstep.parallel.worker import StepResult
from lockstep.train.changes import Lookout, changed_buffers, structure
from lockstep.train.interrupt import Interrupt
from lockstep.train.tasks import Logs

# Of Keras's own callbacks, those that look on at steps, and wait for nothing.
_ONLOOKERS = ("History", "ProgbarLogger")


def acts_in(callback: Any, *methods: str) -> bool:
    """Whether a callback does anything in one of these methods.

    Those of Keras that do so when they were told to (a ``ModelCheckpoint`` by its ``save_freq``)
    are asked.
    """
    if type(callback).__module__.startswith("keras.src.callbacks"):
        kind = type(callback).__name__
        if kind in _ONLOOKERS:
            return False
        if getattr(callback, "save_freq", None) == "epoch":
            return False
        if kind == "TensorBoard" and callback.update_freq == "epoch":
            return False
    return any(
        getattr(getattr(callback, method), "__func__", None) is not getattr(Callback, method)
        for method in methods
    )


class EvaluationConductor(KerasConductor):
    """Conducts ``evaluate``, and the validation of a ``fit``.

    Args:
        model: the Keras model, whose metrics hold the values.
        callbacks: Keras's list of them.
    """

    def __init__(self, model: Any, callbacks: Any) -> None:
        self._model = model
        self._callbacks = callbacks

    def results(self, losses: Logs) -> Logs:
        names = ("loss", *(metric.name for metric in _loss_metrics(self._model)))
        trackers = (self._model._loss_tracker, *_loss_metrics(self._model))
        for name, tracker in zip(names, trackers, strict=True):
            tracker.reset_state()
            if name in losses:
                tracker.update_state(losses[name])
        found: Logs = pythonify_logs(self._model.get_metrics_result())
        return {**found, **{name: losses[name] for name in names if name in losses}}

    def begin_batch(self, index: int) -> None:
        self._callbacks.on_test_batch_begin(index)

    def end_batch(self, index: int, losses: Logs | None) -> None:
        self._callbacks.on_test_batch_end(index, None if losses is None else self.results(losses))

    def begin_validation(self) -> None:
        self._callbacks.on_test_begin()

    def end_validation(self, logs: Logs) -> None:
        self._callbacks.on_test_end(logs)


def _loss_metrics(model: Any) -> list[Any]:
    compiled = model._compile_loss
    return [] if compiled is None else compiled.metrics


class KerasFitConductor(EvaluationConductor):
    """Conducts a ``fit``.

    Args:
        module: the model.
        callbacks: Keras's list of them.
        readopt: brings parameters that a callback moved back to where all ranks see them.
        interrupt: what has become of Ctrl-C.
        tells: somebody wants to know metrics after every step.
    """

    def __init__(
        self,
        module: KerasModel,
        callbacks: Any,
        readopt: Callable[[], None],
        interrupt: Interrupt,
        *,
        tells: bool,
    ) -> None:
        super().__init__(module.model, callbacks)
        self._module = module
        self._readopt = readopt
        self._interrupt = interrupt
        self._tells = tells
        self._sums: list[float] = []  # losses times samples, of the whole and of each of several
        self._num_samples = 0
        self._lookout: Lookout | None = None
        self.logs: Logs = {}
        self.updater: KerasUpdater | None = None

    @property
    def stop_training(self) -> bool:  # type: ignore[override]  # an attribute in the base
        """Whether a callback wants training to end."""
        return bool(self._model.stop_training)

    @property
    def is_interrupted(self) -> bool:  # type: ignore[override]  # an attribute in the base
        """Whether the user wants training to end."""
        return self._interrupt.is_requested

    def hold_interrupts(self) -> None:
        self._interrupt.hold()

    def begin_epoch(self, epoch: int) -> None:
        self._model.reset_metrics()
        self._callbacks.on_epoch_begin(epoch)
        self._sums, self._num_samples = [], 0

    def begin_step(self, index: int) -> None:
        self._callbacks.on_train_batch_begin(index)

    def tell_losses(self, losses: BatchLosses) -> None:
        size, values = losses
        self._add(size, values)

    def _add(self, size: int, values: list[float]) -> None:
        sums = self._sums or [0.0] * len(values)
        self._sums = [total + size * value for total, value in zip(sums, values, strict=True)]
        self._num_samples += size

    def end_step(self, index: int, result: StepResult) -> None:
        if self._tells:
            names = ("loss", *(metric.name for metric in _loss_metrics(self._model)))
            means = (total / self._num_samples for total in self._sums)
            logs = self.results(dict(zip(names, means, strict=True)))
        else:
            self._add(result.num_samples, [result.loss if result.weight else 0.0])
            logs = {"loss": self._sums[0] / self._num_samples}
        self._callbacks.on_train_batch_end(index, logs)

    def end_epoch(self, epoch: int, logs: Logs) -> None:
        self._callbacks.on_epoch_end(epoch, logs)
        self.logs = logs

    def take_slots(self, slots: list[PieceSlots]) -> None:
        assert self.updater is not None
        self.updater.take_slots(slots)

    def fingerprint(self) -> object:
        """Everything that the other ranks were sent, but for values that are brought to them."""
        optimizer = self._model.optimizer
        parameters = [*self._module.parameters(), *self._module.buffers()]
        described = describe(self._module, parameters)
        return structure(self._module), described, id(optimizer), id(optimizer._learning_rate)

    def watch(self, act: Callable[[], None], *, in_epoch: bool) -> dict[str, torch.Tensor]:
        lookout = self._lookout or Lookout(self._module)
        before = lookout.look()
        act()
        self._lookout = lookout if in_epoch else None
        after = lookout.look() if in_epoch else Lookout(self._module).look()
        if after.places != before.places:
            self._readopt()
        return changed_buffers(self._module, before, after)
