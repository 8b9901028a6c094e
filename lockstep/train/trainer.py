"""The Trainer: fit, evaluate, predict, save, load, the same under every strategy.

It never branches on the strategy: it captures the model, lets the strategy's maker make a Plan, and
runs tasks on the Plan's ranks through a ``Session``.
"""

import copy
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from torch import nn

from lockstep.capture.layers import capture_layers
from lockstep.checkpoint.weights import load_weights, save_weights
from lockstep.cluster.devices import discover
from lockstep.data.sources import Source, as_input_source, as_source
from lockstep.data.trees import Tree, concatenate, map_tensors, tensors_of
from lockstep.errors import (
    DataError,
    ModelError,
    OptionError,
    problem,
)
from lockstep.parallel.blank import (
    allocate,
    blank_names,
    build_on_meta,
    forget_blanks,
    initialize,
)
from lockstep.parallel.groups import parameter_groups
from lockstep.parallel.losses import LossAdapter
from lockstep.parallel.settings import TorchSettings
from lockstep.plan.makers import Maker, SingleDevice
from lockstep.plan.spec import Plan
from lockstep.train.callbacks import Callback, Logs, acting, told_of_errors, traced_steps
from lockstep.train.checks import (
    check_arguments,
    check_counts,
    check_device,
    filled,
    prepare_model,
)
from lockstep.train.conducting import FitConductor
from lockstep.train.copies import OptimizerCopy, WeightCopy
from lockstep.train.history import History
from lockstep.train.interrupt import held_interrupts
from lockstep.train.metrics import Metrics
from lockstep.train.planning import Partitions, Planning
from lockstep.train.progress import ProgressDisplay
from lockstep.train.scope import current_strategy
from lockstep.train.session import Assignment, Session
from lockstep.train.tasks import (
    Conductor,
    EvaluateTask,
    FitResult,
    FitTask,
    PredictTask,
    Resume,
    Task,
)
from lockstep.train.updaters import TorchUpdater, check_divisible, make_optimizer

DEFAULT_BATCH_SIZE = 32
DEFAULT_TIMEOUT_SECONDS = 600.0


class StrategyLike(Protocol):
    """What the Trainer asks of a strategy."""

    timeout_seconds: float

    def maker(self, precision: str) -> Maker:
        """A maker of Plans of this precision."""


class Trainer:
    """Trains a PyTorch model under a strategy, with the weights one device would have given.

    Args:
        model: the model; it is trained in place. Or a function that makes it: then each rank of a
            pipeline makes its own part only, with the values that ``reset_parameters`` of its
            modules gives, and ``trainer.model`` is the whole by address.
        loss: ``loss(output, target)`` returning the mean over the batch, values of shape (n,), or
            a pair (total, weight). Needed for ``fit`` and ``evaluate``.
        optimizer: a torch optimizer over ``model.parameters()``, or a class or function that makes
            one from them. Needed for ``fit``.
        metrics: torchmetrics metrics by name.
        strategy: where and how to train; None is the strategy of the enclosing ``scope()``, else
            one device.
        precision: ``"fp32"``; ``"bf16-mixed"``, which keeps parameters, updates and the loss in
            float32 and lets the model compute in bfloat16 where that is safe (torch.autocast); or
            ``"fp64"``, which turns the model's parameters to float64.
        seed: of the order of the samples and of all random numbers in training.
        callbacks: called during every ``fit``.

    Raises:
        OptionError: an argument cannot be what it is.
        ModelError: the model cannot be trained as it is.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        *,
        loss: Any = None,
        optimizer: Any = None,
        metrics: Mapping[str, Any] | None = None,
        strategy: StrategyLike | None = None,
        precision: str = "fp32",
        seed: int = 0,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        check_arguments(model, loss, strategy, precision, seed, callbacks)
        self.model, shape_of_it = _made(model, precision)
        self.strategy = strategy if strategy is not None else current_strategy()
        self.precision = precision
        self.seed = seed
        self.callbacks = list(callbacks)
        self.stop_training = False
        self.metrics = Metrics(metrics)
        self.optimizer = None if optimizer is None else make_optimizer(optimizer, self.model)
        self._loss = None if loss is None else LossAdapter(loss)
        self._epochs_trained = 0
        self._steps_trained = 0
        self._plan: Plan | None = None
        self._planning = Planning(shape_of_it)
        self._is_running = False
        timeout = (
            DEFAULT_TIMEOUT_SECONDS if self.strategy is None else self.strategy.timeout_seconds
        )
        self._session = Session(timeout)
        self._finalizer = weakref.finalize(self, self._session.release)

    @property
    def plan(self) -> Plan:
        """The Plan of the last call, or the one a ``fit`` with the default batch would have.

        Raises:
            OptionError: before the first call, where the Plan depends on what layers cost.
        """
        if self._plan is not None:
            return self._plan
        maker, cluster = self._maker(), discover()
        if maker.sample_size(cluster, DEFAULT_BATCH_SIZE) is not None:
            raise OptionError(
                problem(
                    "Where to cut the model depends on what its layers cost, on your data.",
                    received="`plan` before fit, evaluate or predict",
                    fix="Call one of them first, or strategy.plan(model, batch_size=..., "
                    "sample=inputs).",
                )
            )
        return maker(capture_layers(self.model), cluster, DEFAULT_BATCH_SIZE)

    def fit(
        self,
        data: Any,
        *,
        epochs: int = 1,
        batch_size: int = DEFAULT_BATCH_SIZE,
        validation_data: Any = None,
        shuffle: bool = True,
        verbose: int = 1,
        on_snapshot: Any = None,
    ) -> History:
        """Train; a second ``fit`` goes on where the first ended.

        Args:
            data: ``(inputs, targets)`` or ``(inputs, targets, sample_weight)`` of arrays or tensors
                whose first dim is the samples, or a map-style Dataset of such items. A tuple of
                inputs is the model's positional arguments, a dict its keyword arguments.
            epochs: passes over the data.
            batch_size: samples of a global batch, over all devices together.
            validation_data: as ``data``; evaluated after every epoch.
            shuffle: take the samples in a new order every epoch, a function of the seed and the
                epoch alone.
            verbose: 1 shows progress, 0 is silent.
            on_snapshot: called with a ``train.tasks.Snapshot`` after every step: gradients, every
                rank's state and the optimizer's slots. For proofs; slow.

        Returns:
            Loss, metrics and validation values of every epoch.

        Raises:
            OptionError, DataError, DeviceError, PlanError, ShippingError: before a process starts.
            LossError, NonFiniteLossError, WorkerError: at the step they name.
            KeyboardInterrupt: after Ctrl-C and the step that was under way, with weights and
                optimizer as that step left them; at once after a second Ctrl-C.
        """
        epochs, batch_size = check_counts(epochs=epochs, batch_size=batch_size)
        loss = self._need_loss("fit")
        source = filled(as_source(data), "data")
        validation = None
        if validation_data is not None:
            validation = filled(
                as_source(validation_data, name="validation_data"), "validation_data"
            )
        self._check_trainable()
        self._maker().check_batch_size(batch_size)
        self.stop_training = False
        steps = -(-len(source) // batch_size)
        task = FitTask(
            source=source,
            validation=validation,
            epochs=epochs,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=self.seed,
            first_epoch=self._epochs_trained,
            first_step=self._steps_trained,
            metrics=self.metrics,
            watched=bool(self.callbacks),
            watches_beginnings=bool(acting(self.callbacks, "on_epoch_begin")),
            before_steps=bool(acting(self.callbacks, "on_train_batch_begin")),
            after_steps=bool(acting(self.callbacks, "on_train_batch_end")),
            traced=traced_steps(self.callbacks, self._steps_trained),
            record=on_snapshot is not None,
        )
        display = ProgressDisplay(epochs, steps) if verbose else None
        with told_of_errors(self.callbacks), held_interrupts() as interrupt:
            conductor = FitConductor(
                self,
                self.callbacks,
                display,
                lambda: self._session.readopt(self.model),
                on_snapshot,
                interrupt,
            )
            try:
                conductor.begin_train()
                self._train(task, loss, conductor, batch_size)
            finally:
                conductor.close()
        conductor.end_train()
        return conductor.history

    def evaluate(self, data: Any, *, batch_size: int = DEFAULT_BATCH_SIZE) -> Logs:
        """Loss and metrics over ``data``, every sample counted once.

        Args:
            data: as in ``fit``.
            batch_size: samples of a global batch.

        Returns:
            ``{"loss": ..., <metric>: ...}``.
        """
        (batch_size,) = check_counts(batch_size=batch_size)
        loss = self._need_loss("evaluate")
        source = filled(as_source(data), "data")
        # Within a fit, the user's metrics are busy with the training data.
        metrics = copy.deepcopy(self.metrics) if self._is_running else self.metrics
        task = EvaluateTask(source=source, batch_size=batch_size, metrics=metrics)
        for callback in self.callbacks:
            callback.set_trainer(self)
            callback.on_test_begin()
        logs: Logs = self._run(task, loss, None, Conductor(), batch_size)
        for callback in self.callbacks:
            callback.on_test_end(logs)
        return logs

    def predict(self, inputs: Any, *, batch_size: int = DEFAULT_BATCH_SIZE) -> Tree:
        """The model's outputs for ``inputs``, in their order.

        Args:
            inputs: arrays or tensors, a tuple of them (positional arguments) or a dict (keyword
                arguments), or a map-style Dataset, of whose items the first part is taken where
                they are tuples.
            batch_size: samples of a global batch.

        Returns:
            What the model returns, with all samples along the first dim of every tensor.
        """
        (batch_size,) = check_counts(batch_size=batch_size)
        source = as_input_source(inputs, name="inputs")
        for callback in self.callbacks:
            callback.set_trainer(self)
            callback.on_predict_begin()
        outputs = self._predict(source, batch_size) if len(source) else self._predict_none(source)
        for callback in self.callbacks:
            callback.on_predict_end()
        return outputs

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model's weights and buffers, whole and by name, as safetensors."""
        self._initialize()
        save_weights(self.model, path)
        self._session.release_pages()

    def load(self, path: str | os.PathLike[str]) -> None:
        """Read weights that ``save`` wrote under any strategy, into the model.

        Raises:
            CheckpointError: names or shapes do not fit the model; nothing is changed then.
        """
        self._initialize()
        load_weights(self.model, path)

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """Within the block train on trial: after it, all is as before, whatever has happened.

        Put back are weights and buffers, the optimizer's slots and options, and the position in the
        orders and random streams. So what is trained next has the same bits as without the block.
        That takes memory for a second copy of weights and slots.
        """
        self._initialize()
        weights = WeightCopy(self.model)
        optimizer = None if self.optimizer is None else OptimizerCopy(self.optimizer)
        position = self._epochs_trained, self._steps_trained
        try:
            yield
        finally:
            weights.give_back(self.model)
            if optimizer is not None and self.optimizer is not None:
                optimizer.give_back(self.optimizer)
            self._epochs_trained, self._steps_trained = position

    def close(self) -> None:
        """End the helper processes now instead of with the trainer."""
        self._session.close()

    # --- parts -----------------------------------------------------------------------------------

    def _train(
        self, task: FitTask, loss: LossAdapter, conductor: FitConductor, batch_size: int
    ) -> None:
        """Run the task, and go on with another where a callback has changed what was sent."""
        resume: Resume | None = task.start
        first_epoch, first_step = self._epochs_trained, self._steps_trained
        while resume is not None and resume.epoch < task.epochs:
            task = replace(task, start=resume, first_step=first_step)
            conductor.updater = self._make_updater()
            result: FitResult = self._run(task, loss, conductor.updater, conductor, batch_size)
            if result.resume is None:  # else the optimizer has them, with the callback's changes
                conductor.take_slots(result.slots)
            first_step += result.num_steps
            self._steps_trained = first_step
            self._epochs_trained = first_epoch + max(result.num_epochs, resume.epoch)
            resume = result.resume

    def _run(
        self,
        task: Task,
        loss: LossAdapter | None,
        updater: TorchUpdater | None,
        conductor: Conductor,
        batch_size: int,
    ) -> Any:
        session = self._session
        if self._is_running:
            session, (plan, partitions) = _nested(task), self._make_plan_for_one(batch_size)
        else:
            plan, partitions = self._planning.plan(
                self._maker(), self.precision, task.source, batch_size
            )
            self._plan = plan
        if updater is not None:
            check_divisible(self.model, updater, plan)
        if plan.pipeline is None:
            self._initialize()
        assignment = Assignment(
            plan=plan,
            model=self.model,
            loss=loss,
            updater=updater,
            task=task,
            seed=self.seed,
            device=check_device(self.model, plan),
            settings=TorchSettings.current(),
            partitions=partitions,
            groups=parameter_groups(plan, self.model, list(partitions.values())),
            blank=blank_names(self.model),
        )
        outermost, self._is_running = not self._is_running, True
        try:
            return session.run(assignment, conductor)
        finally:
            self._is_running = not outermost

    def _initialize(self) -> None:
        """Give the parameters of a model made by a function their first values, if they have none.

        Where a Plan with stages comes first, its ranks do this, each for its own.
        """
        blank = blank_names(self.model)
        if blank:
            initialize(self.model, blank, self.seed)
            forget_blanks(self.model)

    def _maker(self) -> Maker:
        if self.strategy is None:
            return SingleDevice(precision=self.precision)
        return self.strategy.maker(self.precision)

    def _make_plan_for_one(self, batch_size: int) -> tuple[Plan, Partitions]:
        maker = SingleDevice(precision=self.precision)
        return maker(capture_layers(self.model), discover(), batch_size), {}

    def _make_updater(self) -> TorchUpdater:
        assert self.optimizer is not None
        return TorchUpdater(self.optimizer, dict(self.model.named_parameters()))

    def _check_trainable(self) -> None:
        if self.optimizer is None:
            raise OptionError(
                problem(
                    "fit needs an optimizer.",
                    received="optimizer=None",
                    fix="Give the Trainer one: functools.partial(torch.optim.Adam, lr=1e-3).",
                )
            )
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise ModelError(
                problem(
                    "The model must have a trainable parameter.",
                    received=f"a {type(self.model).__name__} without any",
                    fix="Unfreeze a part of it, or use evaluate or predict.",
                )
            )

    def _need_loss(self, method: str) -> LossAdapter:
        if self._loss is None:
            raise OptionError(
                problem(
                    f"{method} needs a loss.",
                    received="loss=None",
                    fix="Give the Trainer one: torch.nn.CrossEntropyLoss(), for example.",
                )
            )
        return self._loss

    def _predict(self, source: Source, batch_size: int) -> Tree:
        task = PredictTask(source=source, batch_size=batch_size)
        return concatenate(self._run(task, None, None, Conductor(), batch_size))

    def _predict_none(self, source: Source) -> Tree:
        """No samples: outputs of the right kind and shape, found with one made-up sample."""
        made_up = map_tensors(
            lambda tensor: tensor.new_zeros(1, *tensor.shape[1:]), _inputs(source)
        )
        outputs = self._predict(as_input_source(made_up, name="inputs"), 1)
        return map_tensors(lambda tensor: tensor[:0], outputs)


def _made(
    model: nn.Module | Callable[[], nn.Module], precision: str
) -> tuple[nn.Module, nn.Module]:
    """The model, and one of the same shape to look at: itself, or one without memory."""
    if isinstance(model, nn.Module):
        prepare_model(model, precision)
        return model, model
    made, shape_of_it = build_on_meta(model), build_on_meta(model)
    for one in (made, shape_of_it):
        prepare_model(one, precision)
    allocate(made)
    return made, shape_of_it.to("meta")


def _nested(task: Task) -> Session:
    """How a callback's own ``evaluate`` or ``predict`` runs: on rank 0, while the others wait.

    Raises:
        OptionError: a ``fit`` within a ``fit``.
    """
    if isinstance(task, FitTask):
        raise OptionError(
            problem(
                "A callback cannot train the model that is being trained.",
                received="fit within fit",
                fix="Call evaluate or predict, or train another model with another Trainer.",
            )
        )
    return Session(DEFAULT_TIMEOUT_SECONDS)


def _inputs(source: Source) -> Tree:
    inputs = getattr(source, "inputs", None)
    if next(tensors_of(inputs), None) is None:
        raise DataError(
            problem(
                "An empty dataset says nothing of the shape of its samples.",
                received="a dataset of length 0",
                fix="Pass an array of shape (0, ...) instead.",
            )
        )
    return inputs
