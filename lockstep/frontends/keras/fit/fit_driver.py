"""Rank 0's part between steps of a Keras model: Keras's callbacks, with global values."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import keras
import torch
from keras.src import backend
from keras.src.callbacks.callback import Callback as KerasCallback
from keras.src.callbacks.progbar_logger import ProgbarLogger
from keras.src.callbacks.swap_ema_weights import SwapEMAWeights
from keras.src.utils.io_utils import print_msg
from keras.src.utils.python_utils import pythonify_logs

from lockstep.data.map_style.sources import Source
from lockstep.data.trees import Tree, map_tensors
from lockstep.errors import OptionError, WorkerError
from lockstep.frontends.keras.fit.checkpoints import OptionCallback
from lockstep.frontends.keras.fit.tasks import LossMeans, SizedLosses
from lockstep.frontends.keras.layers.attributes import (
    NO_SETTINGS,
    described,
    objects_with_settings,
    user_defined_parts,
)
from lockstep.frontends.keras.model import KerasModel
from lockstep.frontends.keras.optim.optimizer_copy import set_options
from lockstep.parallel.training_step import StepResult
from lockstep.parallel.transfer.serialization import describe_values
from lockstep.train.callbacks.callback import Callback
from lockstep.train.callbacks.change_detection import (
    SettingsWatch,
    ranks_see_writes,
    structure,
)
from lockstep.train.callbacks.driver import Logs, TaskDriver
from lockstep.train.callbacks.fit_driver import FitDriver
from lockstep.train.callbacks.interrupt import Interrupt
from lockstep.train.checkpointing.fit_position import FitPosition
from lockstep.train.fit.fit_hooks import ReportTimes
from lockstep.train.input.stream_broadcast import GlobalBatch
from lockstep.train.resume.fit_checkpoints import FitCheckpoints
from lockstep.train.trainer_protocol import TrainerProtocol

# Keras's own callbacks that change nothing.
_OBSERVERS = ("History", "ProgbarLogger")


def acts_in(callback: Any, *methods: str) -> bool:
    """Whether a callback does anything in one of these methods.

    For some of Keras's this depends on an option (``save_freq`` of a ``ModelCheckpoint``).
    """
    if _only_observes(callback):
        return False
    if _is_own(callback):
        if getattr(callback, "save_freq", None) == "epoch":
            return False
        if type(callback).__name__ == "TensorBoard" and callback.update_freq == "epoch":
            return False
    return any(
        getattr(getattr(callback, method), "__func__", None) is not getattr(KerasCallback, method)
        for method in methods
    )


def any_acts_in(callbacks: Any, *methods: str) -> bool:
    """Whether one of Keras's list of callbacks does anything in one of these methods."""
    return any(acts_in(one, *methods) for one in callbacks.callbacks)


def report_times(callbacks: Any, *methods: str, shows_bar: bool = True) -> ReportTimes:
    """After which batches callbacks need metrics.

    Args:
        callbacks: Keras's list of them.
        methods: those that get the metrics.
        shows_bar: True if a progress bar, if there is one, moves with these batches.
    """
    if any_acts_in(callbacks, *methods):
        return "each"
    bars = [one for one in callbacks.callbacks if isinstance(one, ProgbarLogger)]
    return "timed" if shows_bar and any(bar.verbose == 1 for bar in bars) else "never"


def _is_user_defined(callback: Any) -> bool:
    """Whether a callback is the user's, and may change anything: Keras's change only values."""
    is_own = _is_own(callback) or isinstance(callback, OptionCallback)
    return not is_own or type(callback).__name__ == "LambdaCallback"


def _is_own(callback: Any) -> bool:
    """Whether a callback is one of Keras's."""
    return type(callback).__module__.startswith("keras.src.callbacks")


def _only_observes(callback: Any) -> bool:
    """Whether a callback changes nothing, and waits for nothing."""
    if isinstance(callback, OptionCallback):
        return True
    return _is_own(callback) and type(callback).__name__ in _OBSERVERS


def may_stop(callbacks: Any, loop: str) -> bool:
    """Whether callbacks may end an evaluation or a prediction: only the user's may.

    Args:
        callbacks: Keras's list of them.
        loop: its name in their methods: "test" or "predict".
    """
    methods = (f"on_{loop}_begin", f"on_{loop}_batch_begin", f"on_{loop}_batch_end")
    return any(_is_user_defined(one) and acts_in(one, *methods) for one in callbacks.callbacks)


class EvaluationDriver(TaskDriver):
    """Rank 0's part in ``evaluate``, and in the validation of a ``fit``.

    Args:
        model: the Keras model, whose metrics hold the values.
        callbacks: Keras's list of them.
    """

    def __init__(self, model: Any, callbacks: Any) -> None:
        self._model = model
        self._listed = callbacks
        self._logs_of_step: tuple[()] | tuple[Any] = ()  # that a custom step has returned

    @property
    def wants_to_stop(self) -> bool:  # type: ignore[override]  # an attribute in the base
        return bool(self._model.stop_evaluating)

    def report_logs(self, logs: Logs) -> None:
        self._logs_of_step = (logs,)

    def results(self, losses: Logs) -> Logs:
        if self._logs_of_step:
            logs = self._model._get_metrics_result_or_logs(*self._logs_of_step)
            returned: Logs = pythonify_logs(logs)
            return returned
        names = ("loss", *(metric.name for metric in _loss_metrics(self._model)))
        trackers = (self._model._loss_tracker, *_loss_metrics(self._model))
        for name, tracker in zip(names, trackers, strict=True):
            tracker.reset_state()
            if name in losses:
                tracker.update_state(losses[name])
        found: Logs = pythonify_logs(self._model.get_metrics_result())
        return {**found, **{name: losses[name] for name in names if name in losses}}

    def begin_batch(self, index: int) -> None:
        self._listed.on_test_batch_begin(index)

    def end_batch(self, index: int, losses: Logs | None) -> None:
        self._listed.on_test_batch_end(index, None if losses is None else self.results(losses))


class PredictionDriver(TaskDriver):
    """Rank 0's part in ``predict``.

    Args:
        module: the Keras model.
        callbacks: Keras's list of them.
    """

    def __init__(self, module: KerasModel, callbacks: Any) -> None:
        self._model, self._layout = module.model, module.layout
        self._callbacks = callbacks
        self._outputs: dict[str, Tree] = {}

    @property
    def wants_to_stop(self) -> bool:  # type: ignore[override]  # an attribute in the base
        return bool(self._model.stop_predicting)

    def begin_batch(self, index: int) -> None:
        self._callbacks.on_predict_batch_begin(index)

    def report_outputs(self, outputs: Tree) -> None:
        arrays = map_tensors(backend.convert_to_numpy, self._layout.outputs(outputs))
        self._outputs = {"outputs": arrays}

    def end_batch(self, index: int, losses: Logs | None) -> None:
        self._callbacks.on_predict_batch_end(index, self._outputs)


def _loss_metrics(model: Any) -> list[Any]:
    compiled = model._compile_loss
    return [] if compiled is None else compiled.metrics


class KerasCallbacks(Callback):
    """Keras's callbacks as one of a Trainer's; ``fit`` calls them where it begins and ends.

    Args:
        model: the Keras model.
        callbacks: Keras's list of them.
    """

    def __init__(self, model: Any, callbacks: Any) -> None:
        self._model = model
        self._callbacks = callbacks

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._callbacks.on_epoch_begin(epoch)

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        self._callbacks.on_train_batch_begin(batch)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self._callbacks.on_train_batch_end(batch, logs)

    def on_test_begin(self, logs: Logs | None = None) -> None:
        self._model.stop_evaluating = False
        self._callbacks.on_test_begin()

    def on_test_end(self, logs: Logs | None = None) -> None:
        self._callbacks.on_test_end(logs)


class KerasFitDriver(FitDriver, EvaluationDriver):
    """Rank 0's part in ``fit``.

    Args:
        trainer: of the model.
        callbacks: Keras's list of them.
        checkpoints: of the training.
        interrupt: the state of Ctrl-C.
    """

    def __init__(
        self,
        trainer: TrainerProtocol,
        callbacks: Any,
        checkpoints: FitCheckpoints,
        interrupt: Interrupt,
    ) -> None:
        self._module: Any = trainer.model
        self._has_user_callbacks = any(map(_is_user_defined, callbacks.callbacks))
        self._has_acting_callbacks = not all(map(_only_observes, callbacks.callbacks))
        self._swaps_averages = any(isinstance(one, SwapEMAWeights) for one in callbacks.callbacks)
        EvaluationDriver.__init__(self, self._module.model, callbacks)
        each = [KerasCallbacks(self._model, callbacks)]
        FitDriver.__init__(self, trainer, checkpoints, each, interrupt)
        self._user_parts: list[Any] = []
        self._reported_logs: Logs = {}  # of the current step, if it reports
        self.logs: Logs = {}
        self._begin_means()

    def _settings_watch(self) -> SettingsWatch:
        find = partial(objects_with_settings, self._model) if self._has_user_callbacks else dict
        return SettingsWatch(find, NO_SETTINGS)

    def watched(self, source: Source) -> Source:
        return source  # as in Keras, nobody is warned that training waits for its data

    def awaited(self, batches: Iterator[GlobalBatch]) -> Iterator[GlobalBatch]:
        return batches

    def begin_epoch(self, epoch: int) -> None:
        self._model.reset_metrics()
        super().begin_epoch(epoch)
        if self._has_user_callbacks:
            self._user_parts = user_defined_parts(self._model)
        self._begin_means()

    def _begin_means(self) -> None:
        """Forget the losses so far in the epoch."""
        self._means = LossMeans([metric.name for metric in _loss_metrics(self._model)])
        self._loss, self._reported_logs = LossMeans(), {}

    def resume_after(self, error: WorkerError) -> FitPosition | None:
        resume = super().resume_after(error)
        if resume is not None:  # an epoch that has begun continues from its sums
            self._model.reset_metrics()
            self._begin_means()
        return resume

    def begin_batch(self, index: int) -> None:
        self._journal.once(partial(super().begin_batch, index))

    def end_batch(self, index: int, losses: Logs | None) -> None:
        self._journal.once(partial(super().end_batch, index, losses))

    def report_losses(self, batches: Sequence[SizedLosses]) -> None:
        self._means.add(batches)
        self._reported_logs = self.results(self._means.logs)

    def end_step(self, index: int, result: StepResult) -> None:
        self._step_values = self._values_after(result)  # of a step that is repeated, too
        super().end_step(index, result)

    def _step_logs(self, result: StepResult) -> Logs:
        return self._step_values

    def _values_after(self, result: StepResult) -> Logs:
        """All values if the step reports; else the loss so far in the epoch."""
        if self._logs_of_step:
            logs: Logs = self._logs_of_step[0]
            return logs
        if self._reported_logs:
            reported, self._reported_logs = self._reported_logs, {}
            self._loss = self._means.of_total
            return reported
        self._loss.add([(result.num_samples, [result.loss if result.weight else 0.0])])
        return self._loss.logs

    def _notice(self, text: str) -> None:
        print_msg(text)

    def _set_options(self, options: list[dict[str, Any]]) -> None:
        set_options(self._model.optimizer, options[0])

    def end_epoch(self, epoch: int, logs: Logs) -> None:
        self.logs = self._journal.once(partial(self._logs_with_callbacks, epoch, logs))
        super().end_epoch(epoch, self.logs)

    def _logs_with_callbacks(self, epoch: int, logs: Logs) -> Logs:
        """The logs of an epoch, to which callbacks may add some."""
        self._record.end_epoch(epoch, logs)
        self._listed.on_epoch_end(epoch, logs)
        return logs

    def _show_epoch(self, epoch: int, logs: Logs) -> None:
        """Do nothing: callbacks were called, since the history has what they add."""

    def fingerprint(self) -> object:
        if not self._has_user_callbacks:
            return None
        model, optimizer = self._model, self._model.optimizer
        rate = optimizer._learning_rate
        here = (structure(self._module), id(optimizer), id(rate))
        if self._runner.plan.num_ranks == 1:
            return here
        return (
            *here,
            described(self._module),
            describe_values(model.loss),
            describe_values(model._compile_loss and model._compile_loss._user_loss_weights),
            None if isinstance(rate, keras.Variable) else describe_values(rate),
            self._slot_versions(),
        )

    def _slot_versions(self) -> list[tuple[int, int]]:
        """Addresses and version counters of slots of which other ranks have copies."""
        # Keras's own swap of averages and weights writes to slots, and undoes it.
        has_copies = not (ranks_see_writes(self._runner.plan) or self._swaps_averages)
        slots = (one.value for one in self.updater.unshared_slots(has_copies=has_copies))
        return [(slot.data_ptr(), slot._version) for slot in slots]

    def _describe_user_parts(self) -> object:
        optimizer = self._model.optimizer
        return id(optimizer), id(optimizer._learning_rate), describe_values(self._user_parts)

    def _act_on_values(self, act: Callable[[], None]) -> None:
        """Act, and refuse changes that other ranks get only when an epoch begins or ends."""
        parts, slots = self._describe_user_parts(), self._slot_versions()
        self._settings.over(act)  # it refuses changes of settings, by name
        if self._describe_user_parts() != parts:
            raise OptionError(
                "Within an epoch a callback may change only values: the other ranks keep losses, "
                "learning rates and functions as they were when the epoch began.",
                received="a change of the optimizer, or of what its learning rate, a loss or a "
                "layer's function uses",
                fix="Do it in on_epoch_begin or on_epoch_end; a number for the learning rate "
                "can be assigned at any time.",
            )
        if self._slot_versions() != slots:
            raise OptionError(
                "Within an epoch a callback cannot write to slots of the optimizer of which every "
                "rank has copies of its own.",
                received=f"a change of slots of {type(self._model.optimizer).__name__}",
                fix="Do it in on_epoch_begin or on_epoch_end.",
            )

    def watch(self, act: Callable[[], None], *, in_epoch: bool) -> dict[str, torch.Tensor]:
        if not self._has_acting_callbacks:
            act()
            return {}
        if in_epoch and self._has_user_callbacks and self._runner.plan.num_ranks > 1:
            act = partial(self._act_on_values, act)
        return self._watch.over(act, in_epoch=in_epoch, plan=self._runner.plan)
