"""The Trainer of a Keras model: plans, processes and steps are those of any model."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import torch

from lockstep.cluster.devices import discover
from lockstep.data.map_style.sources import ArraySource, Source
from lockstep.data.order import stream_seed
from lockstep.data.trees import Tree, concatenate
from lockstep.errors import ModelError, OptionError
from lockstep.formatting import first_few
from lockstep.frontends.keras.custom_steps.custom_step import (
    CustomSteps,
    check_call,
    check_plan,
    stages_refused,
)
from lockstep.frontends.keras.custom_steps.custom_step_tasks import (
    CustomStepEvaluation,
    CustomStepFitTask,
    StepMetrics,
)
from lockstep.frontends.keras.custom_steps.step_trial import find_steps
from lockstep.frontends.keras.fit.fit_driver import (
    EvaluationDriver,
    KerasFitDriver,
    PredictionDriver,
    any_acts_in,
    may_stop,
    report_times,
)
from lockstep.frontends.keras.fit.keras_checkpoints import KerasCheckpoints
from lockstep.frontends.keras.fit.tasks import KerasBatchOrder, KerasFitTask, MeansOfBatches
from lockstep.frontends.keras.fit_options import FitOptions
from lockstep.frontends.keras.layers.checks import has_custom_steps
from lockstep.frontends.keras.layers.consistency import facts_of
from lockstep.frontends.keras.layers.dry_run import few_samples, frozen_as_keras, values_restored
from lockstep.frontends.keras.layers.metrics import KerasMetrics
from lockstep.frontends.keras.layers.model_fingerprint import ModelFingerprint
from lockstep.frontends.keras.layers.pickling import reduce
from lockstep.frontends.keras.model import KerasModel, giving_losses
from lockstep.frontends.keras.model_analysis import ModelAnalysis
from lockstep.frontends.keras.optim.optimizer_copy import options_of, set_options
from lockstep.frontends.keras.optim.updater import KerasUpdater, is_elementwise
from lockstep.frontends.keras.optim.updater_set import KerasUpdaterSet, OptimizerList, parts_of
from lockstep.frontends.keras.settings import compute_on, random_seed
from lockstep.parallel.transfer.serialization import reducing
from lockstep.plan.devices import kind_of
from lockstep.plan.makers.data_parallel import Maker, SingleDevice
from lockstep.plan.search.automatic import Automatic
from lockstep.plan.spec import Plan
from lockstep.train.callbacks.driver import Logs, TaskDriver
from lockstep.train.callbacks.interrupt import Interrupt
from lockstep.train.checkpointing.fit_position import FitPosition
from lockstep.train.checkpointing.trainer_state import TrainerState
from lockstep.train.fit.fit_hooks import FitHooks
from lockstep.train.fit.tasks import DataPass, EvaluateTask, PredictTask, Validation
from lockstep.train.fit.training_run import run_training
from lockstep.train.input.data_adapter import DataPipeline
from lockstep.train.input.stream_broadcast import SharedStream, sample_of
from lockstep.train.optim.update_config import UpdateConfig
from lockstep.train.resume.differences import Difference
from lockstep.train.resume.fit_facts import Facts
from lockstep.train.resume.fit_record import FitState
from lockstep.train.runtime.front_end import FrontEnd
from lockstep.train.runtime.job_context import JobContext, StrategyLike
from lockstep.train.runtime.runner import Runner
from lockstep.train.trainer_protocol import TrainerProtocol
from lockstep.train.validation.checks import device_of

_T = TypeVar("_T")


class KerasTrainer(FrontEnd):
    """Trains a Keras model.

    Args:
        module: the model.
        strategy: where and how.
        job_context: the other processes that make the same calls; callers have joined them.

    Attributes:
        model: the one given.
        runner: runs its tasks.
        state: of its training.
        checkpoints: of its training.
    """

    model: KerasModel

    def __init__(self, module: KerasModel, strategy: StrategyLike, job_context: JobContext) -> None:
        self.model = module
        self.runner = Runner(
            self,
            meta_model=module,
            job_context=job_context,
            strategy=strategy,
            # As in Keras, which has a callback for losses that are not finite.
            update_config=UpdateConfig(precision=module.precision, on_nonfinite="ignore"),
            precision=module.precision,
            seed=random_seed(),
        )
        self.state = TrainerState(self.runner)
        self.checkpoints = KerasCheckpoints(self.state)
        self._job_context = job_context
        self._analysis = ModelAnalysis(module, job_context)
        self._updater: tuple[ModelFingerprint, Any] | None = None
        self._num_predictions = 0
        self._custom: CustomSteps | None = None  # of the call under way
        self._is_alone = False  # custom steps of that call run on one device
        self._optimizer_list = OptimizerList()  # of custom steps

    @property
    def optimizer(self) -> Any:
        """The optimizer with which the model is compiled; a callback may replace it."""
        return self.model.model.optimizer

    @property
    def stop_training(self) -> bool:  # type: ignore[override]  # an attribute in the base
        """Whether a callback has ended training."""
        return bool(self.model.model.stop_training)

    def on_all_processes(self, make: Callable[[], _T]) -> _T:
        """The result of a call, on all processes that make it."""
        return self.runner.shared(make)

    def fit(
        self,
        feed: DataPipeline,
        validated: DataPipeline | None,
        options: FitOptions,
        callbacks: Any,
    ) -> Logs:
        """Train on data; returns the last epoch's logs."""
        self._analysis.expire()
        custom = self._find_custom_steps(feed.source, "train_step")
        loss, metrics = self._loss_and_metrics(feed.source, custom, is_fit=not options.is_one_batch)
        kind: Any = KerasFitTask if custom is None else partial(CustomStepFitTask, custom=custom)
        runner = self.runner
        # A callback of host 0 may have found an earlier run.
        steps = max(int(one._iterations.value) for one in self._optimizers)
        epoch, runner.steps_trained = self._job_context.from_chief((options.initial_epoch, steps))
        options = replace(options, initial_epoch=epoch)
        runner.epochs_trained = 0 if epoch else runner.epochs_trained
        kind = partial(kind, loss=loss, metrics=metrics)
        validation = None
        if validated is not None:
            validation = self._pass_over(validated, callbacks, "test", shows_bar=False)
        hooks = self._hooks(callbacks)
        task = self._fit_task(kind, feed, validation, options, hooks)
        runner.maker().check_batch_size(feed.batch_size)
        runner.batch_size = feed.batch_size

        def make_driver(interrupt: Interrupt) -> KerasFitDriver:
            trainer = cast(TrainerProtocol, self)
            return KerasFitDriver(trainer, callbacks, self.checkpoints, interrupt)

        driver = run_training(self.checkpoints, task, loss, options.restarts, make_driver)
        self._analysis.is_independent = True
        return driver.logs if isinstance(driver, KerasFitDriver) else {}

    def _pass_over(
        self, feed: DataPipeline, callbacks: Any, loop: str, *, shows_bar: bool
    ) -> DataPass:
        """A pass over data, for which callbacks of host 0 may act; ``loop`` as in ``may_stop``."""
        reports = report_times(callbacks, f"on_{loop}_batch_end", shows_bar=shows_bar)
        reports, stops = self._job_context.from_chief((reports, may_stop(callbacks, loop)))
        return DataPass(
            source=feed.source,
            batch_size=feed.batch_size,
            steps=feed.steps_per_epoch,
            reports=reports,
            may_stop=stops,
        )

    def _hooks(self, callbacks: Any) -> FitHooks:
        """What callbacks need between the steps of a ``fit``."""
        reports = report_times(callbacks, "on_train_batch_end", "on_batch_end")
        variables = self.model.variables.values()
        return FitHooks(
            callbacks=True,
            epoch_begin=True,
            step_begin=any_acts_in(callbacks, "on_train_batch_begin", "on_batch_begin"),
            step_end=reports == "each",
            slots=not all(is_elementwise(one, variables) for one in self._optimizers),
            state=self.checkpoints.writer is not None,
            full_state=self.checkpoints.writer is not None,
            validation=any_acts_in(callbacks, "on_test_begin", "on_test_end"),
            reports=reports,
        )

    def _fit_task(
        self,
        kind: Callable[..., KerasFitTask],
        feed: DataPipeline,
        validation: DataPass | None,
        options: FitOptions,
        hooks: FitHooks,
    ) -> KerasFitTask:
        """The task of a ``fit``, equal on all hosts."""
        task = kind(
            source=feed.source,
            order=KerasBatchOrder(
                batch_size=feed.batch_size,
                shuffle=options.shuffle,
                seed=self.runner.seed,
                first_epoch=self.runner.epochs_trained,
                steps_per_epoch=feed.steps_per_epoch,
                initial_epoch=options.initial_epoch,
            ),
            validation=None
            if validation is None
            else Validation(data=validation, epochs=options.evaluates),
            epochs=options.epochs,
            start=self._resume_of(feed, validation, options),
            first_step=self.runner.steps_trained,
            hooks=hooks,
        )
        if self._job_context.hosts is None:
            return task
        facts = {"`evaluates`": options.evaluates}
        return self._job_context.hosts.agree_on_task(task, facts)  # type: ignore[return-value]  # of the same class

    def _resume_of(
        self, feed: DataPipeline, validation: DataPass | None, options: FitOptions
    ) -> FitPosition:
        """Where training begins; streams are read up to that place."""
        start = self.state.start_of(feed, options.initial_epoch)
        others = [] if validation is None else [(validation.source, options.evaluates)]
        self.state.read_again(start, options.initial_epoch, feed, others)
        return start

    def finish_fit(self) -> None:
        """End a ``fit`` on all hosts, which get the values that callbacks set at its end."""
        if self._job_context.hosts is not None:
            self._job_context.hosts.wait()
            self._job_context.share_values(self.model)

    def evaluate(self, feed: DataPipeline, callbacks: Any) -> Logs:
        """Losses and metrics over data."""
        self._analysis.expire()
        custom = self._find_custom_steps(feed.source, "test_step")
        loss, metrics = self._loss_and_metrics(feed.source, custom, is_fit=False)
        if custom is None and self._is_divided():
            self._analysis.check_independence(feed.source)
        data = self._pass_over(feed, callbacks, "test", shows_bar=True)
        evaluation = MeansOfBatches(loss) if custom is None else CustomStepEvaluation(custom)
        task = EvaluateTask(data=data, metrics=metrics, evaluation=evaluation)
        is_chief = self._job_context.is_chief
        driver = EvaluationDriver(self.model.model, callbacks) if is_chief else TaskDriver()
        found: Logs = self.runner.run(task, loss, None, driver, feed.batch_size)
        return self._job_context.from_chief(found)

    def predict(self, feed: DataPipeline, callbacks: Any) -> Tree:
        """The model's outputs for data, in its order."""
        with self.model.predicting():
            return self._predict(feed, callbacks)

    def _predict(self, feed: DataPipeline, callbacks: Any) -> Tree:
        self._custom = None
        self._analysis.expire()
        if self._is_divided():
            self._analysis.check_prediction(feed.source)
            self._analysis.check_independence(feed.source)
        data = self._pass_over(feed, callbacks, "predict", shows_bar=False)
        seed = stream_seed(self.runner.seed, "predict", self._num_predictions)
        task = PredictTask(data=data, seed=seed)
        self._num_predictions += 1
        is_chief = self._job_context.is_chief
        driver = PredictionDriver(self.model, callbacks) if is_chief else TaskDriver()
        parts = self.runner.run(task, None, None, driver, feed.batch_size)
        return self._job_context.from_chief(concatenate(parts) if is_chief else None)

    @property
    def is_on_one_device(self) -> bool:  # type: ignore[override]  # an attribute in the base
        """Whether the call must run there: steps that train nothing may."""
        return self._custom is not None and self._is_alone

    def _find_custom_steps(self, source: Source | SharedStream, name: str) -> CustomSteps | None:
        """Try a custom step on a few samples; None for a model without custom steps."""
        self._custom = custom = None
        if has_custom_steps(self.model.model):
            sample = sample_of(source)
            assert isinstance(sample, ArraySource)
            if self.checkpoints.writer is not None:
                raise OptionError(
                    "A lockstep.keras.Checkpoint cannot save the state of custom steps.",
                    received="a model with a train_step or test_step, or with nothing to train",
                    fix="Use keras.callbacks.ModelCheckpoint.",
                )
            maker = self.runner.maker()
            trains = self.model.model.trainable_variables or self._job_context.hosts is not None
            measures = maker.sample_size(discover(), 1) is not None
            self._is_alone = not trains and (measures or name == "train_step")
            # Who measures layers cuts between them, or chooses among plans (`check_plan`).
            if measures and not (self._is_alone or isinstance(maker, Automatic)):
                raise stages_refused(self.model.model)
            is_divided = not (self._is_alone or isinstance(maker, SingleDevice))
            few = few_samples(self.model, sample, is_divided=is_divided)
            if isinstance(maker, Automatic):
                check_call(self.model, few)
            self._custom = custom = find_steps(self.model, name, few, is_divided=is_divided)
        return custom

    @property
    def _optimizers(self) -> list[Any]:
        """The optimizers that update the weights."""
        own = self._custom and self._custom.optimizers
        return own or parts_of(self.model.model.optimizer)

    def _loss_and_metrics(
        self, source: Source | SharedStream, custom: CustomSteps | None, *, is_fit: bool
    ) -> tuple[Any, KerasMetrics]:
        """The model's losses and metrics, as they are compiled now.

        With custom steps there is no loss.

        Args:
            source: the data.
            custom: what is known of custom steps; None for a model without.
            is_fit: see ``ModelAnalysis.loss_and_metrics``.
        """
        if custom is not None:
            return None, StepMetrics(self.model.model)
        return self._analysis.loss_and_metrics(source, is_divided=self._is_divided(), is_fit=is_fit)

    def _is_divided(self) -> bool:
        """Whether devices work on parts of a batch."""
        return not isinstance(self.runner.maker(), SingleDevice)

    def make_updater(self, maker: Maker) -> Any:
        if self._custom is not None and self._custom.optimizers:
            return self._updater_of(self._custom.optimizers)
        if not self.optimizer.built:
            self.optimizer.build(self.model.model.trainable_variables)
        known = set(map(id, self.optimizer._trainable_variables))
        unknown = [one.path for one in self.model.model.trainable_variables if id(one) not in known]
        if unknown:
            raise ModelError(
                "Every trainable variable must have been trainable when the model was compiled.",
                received=f"trainable since then: {first_few(unknown)}",
                fix="Call compile again after setting `trainable`.",
            )
        fingerprint = self._analysis.fingerprint()
        if self._updater is not None and self._updater[0] is fingerprint:
            return self._updater[1]
        updater = self._updater_of(parts_of(self.optimizer))
        self._updater = None if fingerprint is None else (fingerprint, updater)
        return updater

    def _updater_of(self, optimizers: list[Any]) -> KerasUpdater | KerasUpdaterSet:
        """An updater of some optimizers: in turn for custom steps, else all at once."""
        if len(optimizers) == 1:
            return KerasUpdater(optimizers[0], self.model.variables)
        if not self._optimizer_list.is_of(optimizers):
            self._optimizer_list = OptimizerList(optimizers)
        whole = None if self._custom is not None else self.optimizer
        return KerasUpdaterSet(self._optimizer_list, self.model.variables, whole)

    @property
    def preload(self) -> tuple[str, ...]:
        return ("lockstep.frontends.keras.preloading",)

    def check_plan(self, plan: Plan) -> None:
        if plan.sharding is not None and plan.sharding.offload is not None:
            raise OptionError(
                "Keras's optimizers step on all their slots at once, which are in memory.",
                received=f"FullyShardedStrategy(offload={plan.sharding.offload!r})",
                fix="Leave `offload` out, or train a torch module with lockstep.Trainer.",
            )
        if self._custom is not None:
            check_plan(plan, self.model.model)

    def place(self, device: torch.device) -> None:
        compute_on(device.type)
        if device.type != "cpu" and self.optimizer is not None:
            for one in self._optimizers:
                for variable in one.variables:
                    variable._value = variable._value.to(device)

    def set_new_options(
        self, begun: Any, found: FitState, asked: Facts, taken: Sequence[Difference]
    ) -> None:
        own = options_of(self.optimizer)
        names = {one.option for one in taken if one.name.startswith("optimizer.")}
        new = {name: asked[f"optimizer.{name}"] for name in own if name in names}
        set_options(self.optimizer, {**own, **new})

    @property
    def proves(self) -> bool:  # type: ignore[override]  # an attribute in the base
        """Whether ranks can compare a loss: a custom step returns none."""
        return self._custom is None

    @contextmanager
    def running(self, loss: Any) -> Iterator[ModelFingerprint | None]:
        if self._job_context.hosts is not None:
            self._job_context.check_equal(facts_of(self.model.model))
        compute_on(kind_of(device_of(self.model)))
        fingerprint = self._analysis.fingerprint()
        is_rank_zero_only = self._job_context.is_rank_zero_only
        try:
            with (
                frozen_as_keras(self.model),
                giving_losses(self.model, loss is not None),
                values_restored(self.model.model.metrics_variables if is_rank_zero_only else ()),
                reducing(reduce),
            ):
                yield fingerprint
        finally:
            self._analysis.expire()
            self.model.model._clear_losses()
