"""The Trainer of a Keras model: plans, processes and steps are those of any model."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from torch import optim

from lockstep.cluster.devices import discover
from lockstep.data.map_style.sources import ArraySource, Source
from lockstep.data.order import stream_seed
from lockstep.data.trees import Tree, concatenate
from lockstep.errors import ModelError
from lockstep.frontends.keras.custom_steps.custom_step import OwnSteps, check_plan, not_kept
from lockstep.frontends.keras.custom_steps.custom_step_tasks import (
    CustomStepEvaluationDriver,
    CustomStepFitDriver,
    OwnStepEvaluateTask,
    OwnStepFitTask,
    StepMetrics,
)
from lockstep.frontends.keras.custom_steps.staged_steps import StagedStep, check_staged
from lockstep.frontends.keras.custom_steps.step_trial import find_steps
from lockstep.frontends.keras.fit.checkpoint_runner import CheckpointRunner, check_copied
from lockstep.frontends.keras.fit.fit_driver import (
    EvaluationDriver,
    KerasFitDriver,
    PredictionDriver,
    any_acts_in,
    may_stop,
    telling,
)
from lockstep.frontends.keras.fit.tasks import (
    Evaluation,
    KerasEvaluateTask,
    KerasFitTask,
    KerasPredictTask,
)
from lockstep.frontends.keras.fit_options import FitOptions, FitStart
from lockstep.frontends.keras.layers.attributes import NO_SETTINGS, with_settings
from lockstep.frontends.keras.layers.checks import has_own_steps
from lockstep.frontends.keras.layers.consistency import facts_of
from lockstep.frontends.keras.layers.dry_run import (
    counts_kept,
    few_samples,
    fixed_batch_size,
    frozen_as_keras,
    in_evaluation,
)
from lockstep.frontends.keras.layers.metrics import KerasMetrics
from lockstep.frontends.keras.layers.model_fingerprint import (
    CompiledModelFingerprinter,
    ModelFingerprint,
)
from lockstep.frontends.keras.layers.pickling import reduce
from lockstep.frontends.keras.loss.add_loss import check_prediction, find_additions
from lockstep.frontends.keras.loss.computed_loss import loss_of
from lockstep.frontends.keras.loss.share_losses import Additions, KerasLoss
from lockstep.frontends.keras.model import KerasModel, giving_losses
from lockstep.frontends.keras.optim.updater import KerasUpdater, is_elementwise
from lockstep.frontends.keras.optim.updater_set import KerasUpdaterSet, OptimizerList, parts_of
from lockstep.frontends.keras.settings import random_seed
from lockstep.parallel.data_parallel.forward import call_model
from lockstep.parallel.independence.sample_independence import check_sample_independence
from lockstep.parallel.transfer.serialization import reducing
from lockstep.plan.makers.data_parallel import Maker, SingleDevice
from lockstep.train.callbacks.change_detection import ChangeWatch, settings_of
from lockstep.train.callbacks.driver import Logs, TaskDriver
from lockstep.train.callbacks.interrupt import Interrupt, held_interrupts, telling_of_interrupts
from lockstep.train.callbacks.rank_sync import Resume
from lockstep.train.fault_tolerance.backups import Backups
from lockstep.train.fault_tolerance.restarting import FollowerDriver
from lockstep.train.fit.tasks import Task
from lockstep.train.input.data_adapter import DataPipeline
from lockstep.train.input.stream_broadcast import SharedStream, sample_of
from lockstep.train.optim.update_config import UpdateConfig
from lockstep.train.runtime.assignment import Assignment
from lockstep.train.runtime.job_context import JobContext, StrategyLike
from lockstep.train.runtime.session import Session
from lockstep.units import first_few

_T = TypeVar("_T")


@dataclass(frozen=True)
class _Known:
    """What was found out about a model.

    Attributes:
        key: where it has changed, the model is looked at anew.
        loss: the model's: which is taken on whole batches once that was seen to be needed.
        has_rows: see ``Additions``.
    """

    key: object
    loss: KerasLoss
    has_rows: bool


class KerasTrainer(CheckpointRunner):
    """Trains a Keras model.

    Args:
        module: the model.
        strategy: where and how.
        company: with whom calls are made; whoever makes one is together with them already.
    """

    model: KerasModel

    def __init__(self, module: KerasModel, strategy: StrategyLike, job_context: JobContext) -> None:
        super().__init__(
            module,
            meta_model=module,
            job_context=job_context,
            strategy=strategy,
            # As Keras, which has a callback that looks at losses.
            update_config=UpdateConfig(precision=module.precision, on_nonfinite="ignore"),
            precision=module.precision,
            seed=random_seed(),
        )
        self.callbacks = []
        self._lookout = CompiledModelFingerprinter(module)
        self._sight: ModelFingerprint | None = None
        self._has_looked = False  # since ranks have run the model
        self._updater: tuple[ModelFingerprint | None, Any] | None = None
        self._known: _Known | None = None
        self._num_predictions = 0
        self._own: OwnSteps | None = None  # of the call that is made
        self._is_alone = False  # such a call is made on one device
        self._staged: StagedStep | None = None  # or in stages of a pipeline
        self._several = OptimizerList()  # of steps of the model's own
        self._is_apart = False  # outputs of samples are seen not to depend on others

    def on_all_processes(self, make: Callable[[], _T]) -> _T:
        """What a call comes to, on all processes that make it."""
        return self._shared(make)

    def fit(
        self, feed: DataPipeline, evaluation: Evaluation | None, options: FitOptions, callbacks: Any
    ) -> Logs:
        """Train on data; the last epoch's values."""
        self._has_looked = False
        self.optimizer = self.model.model.optimizer
        own = self._own_steps(feed.source, "train_step")
        loss, metrics = self._loss_and_metrics(feed.source, own, looks=not options.is_one_batch)
        kind: Any = KerasFitTask if own is None else partial(OwnStepFitTask, own=own)
        start = self._start_of_fit(evaluation, options, callbacks)
        self._epochs_trained = 0 if start.epoch else self._epochs_trained
        self._steps_trained = start.step
        kind = partial(kind, loss=loss, metrics=metrics)
        task = self._fit_task(kind, feed, evaluation, options, start)
        telling = telling_of_interrupts(lambda: self._steps_trained, self.keeper)
        with self._fitting(), telling, held_interrupts() as interrupt:
            backups = None  # unless somebody has asked for restarts
            if options.restarts or self._maker().outlives_servers:
                check_copied(self._maker())
                backups = self._backups_of(task.sources(), options.restarts)
            if backups is not None:
                task.takes_states = task.is_kept = True
            driver = self._driver(callbacks, interrupt, backups)
            self._maker().check_batch_size(feed.batch_size)
            self.batch_size = feed.batch_size
            self._go_on(driver, task.start)
            with driver.raising_failure(self._state_after_failure):
                self._train(task, loss, driver, feed.batch_size)
                self._is_apart = True
                self._job_context.share_values(self.model, driver.updater)
        return driver.logs if isinstance(driver, KerasFitDriver) else {}

    def _start_of_fit(
        self, evaluation: Evaluation | None, options: FitOptions, callbacks: Any
    ) -> FitStart:
        """Callbacks are on host 0, and one may have found where an earlier run has ended."""
        start: FitStart = self._job_context.from_chief(
            FitStart(
                epoch=options.initial_epoch,
                step=max(int(one._iterations.value) for one in self._optimizers),
                before_steps=any_acts_in(callbacks, "on_train_batch_begin", "on_batch_begin"),
                tells=telling(callbacks, "on_train_batch_end", "on_batch_end"),
                evaluation_tells="never" if evaluation is None else evaluation.tells,
                evaluation_may_stop=may_stop(callbacks, "test"),
                watches_validation=any_acts_in(callbacks, "on_test_begin", "on_test_end"),
            )
        )
        return start

    def _fit_task(
        self,
        kind: Callable[..., KerasFitTask],
        feed: DataPipeline,
        evaluation: Evaluation | None,
        options: FitOptions,
        start: FitStart,
    ) -> KerasFitTask:
        """The task of a ``fit``, which all hosts have alike."""
        resume = self._resume_of(feed, evaluation, options, start)
        if evaluation is not None:
            tells, stops = start.evaluation_tells, start.evaluation_may_stop
            evaluation = replace(evaluation, tells=tells, may_stop=stops)
        variables = self.model.variables.values()
        task = kind(
            source=feed.source,
            validation=None,
            evaluation=evaluation,
            evaluates=options.evaluates,
            epochs=options.epochs,
            initial_epoch=start.epoch,
            start=resume,
            batch_size=feed.batch_size,
            steps_per_epoch=feed.steps_per_epoch,
            shuffle=options.shuffle,
            seed=self.seed,
            first_epoch=self._epochs_trained,
            first_step=self._steps_trained,
            watched=True,
            watches_beginnings=True,
            before_steps=start.before_steps,
            after_steps=start.tells == "each",
            shows_slots=not all(is_elementwise(one, variables) for one in self._optimizers),
            watches_validation=start.watches_validation,
            tells=start.tells,
            takes_states=self.keeper is not None and self.keeper.acts_in("takes_state"),
            is_kept=self.keeper is not None,
        )
        if self._job_context.hosts is None:
            return task
        facts = {"`evaluates`": options.evaluates}
        return self._job_context.hosts.agree_on_task(task, facts)  # type: ignore[return-value]  # of the same class

    def _resume_of(
        self,
        feed: DataPipeline,
        evaluation: Evaluation | None,
        options: FitOptions,
        start: FitStart,
    ) -> Resume:
        """Where training begins; streams are read up to there."""
        if self._resumed is None:
            return Resume(start.epoch)
        resume = self._start(feed.batch_size, is_stream=isinstance(feed.source, SharedStream))
        others = [] if evaluation is None else [(evaluation.source, options.evaluates)]
        self._read_again(resume, start.epoch, feed, others)
        return resume

    def _driver(
        self, callbacks: Any, interrupt: Interrupt, backups: Backups | None
    ) -> KerasFitDriver | FollowerDriver:
        if not self._job_context.is_chief:
            return FollowerDriver(interrupt, self.keeper)
        kind = KerasFitDriver if self._own is None else CustomStepFitDriver
        return kind(
            self.model,
            callbacks,
            ChangeWatch(
                self.model,
                lambda: self._session.stores.readopt(self.model),
                sees_weights=backups is not None,
            ),
            interrupt,
            self,
            backups,
            self.record,
        )

    def finish_fit(self) -> None:
        """End a ``fit`` on all hosts, with what callbacks have set at its end."""
        if self._job_context.hosts is not None:
            self._job_context.hosts.wait()
            self._job_context.share_values(self.model)

    def evaluate(self, evaluation: Evaluation, feed: DataPipeline, callbacks: Any) -> Logs:
        """Losses and metrics over data."""
        self._has_looked = False
        own = self._own_steps(feed.source, "test_step")
        loss, metrics = self._loss_and_metrics(feed.source, own, looks=False)
        if own is None:
            self._try_apart(feed.source)
        tells, stops = self._job_context.from_chief((evaluation.tells, may_stop(callbacks, "test")))
        evaluation = replace(evaluation, tells=tells, may_stop=stops)
        options: dict[str, Any] = {"evaluation": evaluation, "metrics": metrics, "loss": loss}
        task = KerasEvaluateTask(**options)
        kind = EvaluationDriver
        if own is not None:
            task, kind = OwnStepEvaluateTask(**options, own=own), CustomStepEvaluationDriver
        driver = TaskDriver()
        if self._job_context.is_chief:
            driver = kind(self.model.model, callbacks)
        found: Logs = self._run(task, loss, None, driver, feed.batch_size)
        return self._job_context.from_chief(found)

    def predict(self, feed: DataPipeline, callbacks: Any) -> Tree:
        """The model's outputs for data, in its order."""
        with self.model.predicting():
            return self._predict(feed, callbacks)

    def _predict(self, feed: DataPipeline, callbacks: Any) -> Tree:
        self._has_looked, self._own, self._staged = False, None, None
        self._check_prediction(feed.source)
        self._try_apart(feed.source)
        tells, stops = self._job_context.from_chief(
            (any_acts_in(callbacks, "on_predict_batch_end"), may_stop(callbacks, "predict"))
        )
        task = KerasPredictTask(
            source=feed.source,
            batch_size=feed.batch_size,
            steps=feed.steps_per_epoch,
            tells=tells,
            may_stop=stops,
            seed=stream_seed(self.seed, "predict", self._num_predictions),
        )
        self._num_predictions += 1
        is_chief = self._job_context.is_chief
        driver = PredictionDriver(self.model, callbacks) if is_chief else TaskDriver()
        parts = self._run(task, None, None, driver, feed.batch_size)
        return self._job_context.from_chief(
            concatenate(parts) if self._job_context.is_chief else None
        )

    def _maker(self) -> Maker:
        """Of Plans for this call: what a step does without training is done on one device."""
        is_alone = self._own is not None and self._is_alone
        return self._maker_for_one() if is_alone else super()._maker()

    def _own_steps(self, source: Source | SharedStream, name: str) -> OwnSteps | None:
        """What a model's own step does, tried on a few samples; None where it has none."""
        self._own = self._staged = own = None
        if has_own_steps(self.model.model):
            sample = sample_of(source)
            assert isinstance(sample, ArraySource)
            if self.keeper is not None:
                raise not_kept()
            maker = self._maker()
            trains = self.model.model.trainable_variables or self._job_context.hosts is not None
            cuts = maker.sample_size(discover(), 1) is not None  # it asks what layers cost
            self._is_alone = not trains and (cuts or name == "train_step")
            is_divided = not (cuts or self._is_alone or isinstance(maker, SingleDevice))
            few = few_samples(self.model, sample, is_divided=is_divided)
            self._own = own = find_steps(self.model, name, few, is_divided=is_divided)
            if cuts and not self._is_alone:
                check_staged(self.model.model)
                seen = self._find_additions(source, is_divided=True)
                added = self._job_context.from_chief(seen)
                assert added is not None
                self._staged = StagedStep(own, added, self.model)
                self._staged.try_on(few, training=name == "train_step")
        return own

    @property
    def _optimizers(self) -> list[Any]:
        """Those that update the weights."""
        own = self._own and self._own.optimizers
        return own or parts_of(self.model.model.optimizer)

    def _loss_and_metrics(
        self, source: Source | SharedStream, own: OwnSteps | None, *, looks: bool
    ) -> tuple[Any, KerasMetrics]:
        """The model's losses and metrics, as they are compiled now.

        Of steps of its own there is a loss in a pipeline only.

        Args:
            source: the data.
            own: what is known of its steps.
            looks: what layers add is looked at anew, unless all can be seen and is as it was.
        """
        model = self.model.model
        if own is not None:
            return self._staged, StepMetrics(model)
        is_divided = not isinstance(self._maker(), SingleDevice)
        sight = self._look()
        key = sight or (
            model._compile_loss,
            settings_of(with_settings(model), NO_SETTINGS) if is_divided else None,
            [one.requires_grad for one in self.model.parameters()],
        )
        # Hosts look together, and always: what one of them remembers, another may not.
        known = self._known
        is_known = known is not None and known.key == key
        looks = (looks and sight is None) or self._job_context.hosts is not None
        if looks or not is_known:
            seen = self._find_additions(source, is_divided=is_divided)
            found = self._job_context.from_chief(seen)
            assert found is not None
            self._is_apart = False
            loss = loss_of(self.model, found, is_divided=is_divided)
            self._known = known = _Known(key, loss, found.has_rows)
        assert known is not None
        layers = model._flatten_layers(include_self=False)
        of_layers = [*model._metrics, *(one for layer in layers for one in layer._metrics)]
        metrics = KerasMetrics(model._compile_metrics, of_layers, has_rows=known.has_rows)
        return known.loss, metrics

    def _check_prediction(self, source: Source | SharedStream) -> None:
        """See that a model can predict on parts of a batch, unless it is known to be divisible."""
        sample, is_divided = sample_of(source), not isinstance(self._maker(), SingleDevice)
        if is_divided and not self._is_apart and self._job_context.is_chief:
            assert isinstance(sample, ArraySource)
            self.model.look_anew()
            check_prediction(self.model, sample)

    def _try_apart(self, source: Source | SharedStream) -> None:
        """See that in evaluation outputs do not depend on other samples, unless that is known.

        While a model trains, ranks try it with their own samples.
        """
        sample, model = sample_of(source), self.model
        is_divided = not isinstance(self._maker(), SingleDevice)
        if is_divided and not self._is_apart and self._job_context.is_chief:
            if isinstance(sample, ArraySource) and fixed_batch_size(model.model) is None:
                model.look_anew()
                with in_evaluation(model):
                    check_sample_independence(
                        model, partial(call_model, model), few_samples(model, sample)
                    )
            self._is_apart = True

    def _find_additions(
        self, source: Source | SharedStream, *, is_divided: bool
    ) -> Additions | None:
        """What layers add to the loss, where rank 0 is."""
        if not self._job_context.is_chief:
            return None
        self.model.look_anew()
        sample = sample_of(source)
        assert isinstance(sample, ArraySource)
        return find_additions(self.model, sample, is_divided=is_divided)

    def _make_updater(self) -> Any:
        if self._own is not None and self._own.optimizers:
            return self._updater_of(self._own.optimizers)
        self.optimizer = self.model.model.optimizer  # a callback may have given it another
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
        sight, updater = self._updater or (None, None)
        if updater is None or sight is None or sight is not self._look():
            updater = self._updater_of(parts_of(self.optimizer))
            self._updater = self._look(), updater
        return updater

    def _updater_of(self, optimizers: list[Any]) -> KerasUpdater | KerasUpdaterSet:
        """What steps some optimizers: in turn where the model's steps say so, else all at once."""
        if len(optimizers) == 1:
            return KerasUpdater(optimizers[0], self.model.variables)
        if not self._several.is_of(optimizers):
            self._several = OptimizerList(optimizers)
        whole = None if self._own is not None else self.optimizer
        return KerasUpdaterSet(self._several, self.model.variables, whole)

    def _own_updater(self) -> Any:
        self.optimizer = self.model.model.optimizer
        return super()._own_updater()

    def _look(self) -> ModelFingerprint | None:
        """See whether the model is what the last call has found, once before ranks run it."""
        if not self._has_looked:
            before, self._sight = self._sight, self._lookout.look()
            self._has_looked = True
            if self._sight is None or self._sight is not before:
                self.model.look_anew()
        return self._sight

    @property
    def _torch_optimizers(self) -> list[optim.Optimizer]:
        return []

    @property
    def _preload(self) -> tuple[str, ...]:
        return ("lockstep.frontends.keras.preloading",)

    def _assignment(self, task: Task, *others: Any) -> Assignment:
        assignment = super()._assignment(task, *others)
        if self._own is not None and isinstance(task, OwnStepFitTask | OwnStepEvaluateTask):
            check_plan(assignment.plan)
        return assignment

    def _prepare_proof(
        self, assignment: Assignment, session: Session, driver: TaskDriver
    ) -> object:
        if self._own is not None and self._staged is None:  # its step is no map to a loss
            return None
        return super()._prepare_proof(assignment, session, driver)

    def _run(self, task: Task, loss: Any, updater: Any, driver: TaskDriver, batch_size: int) -> Any:
        if self._job_context.hosts is not None:
            self._job_context.check_equal(facts_of(self.model.model))
        self._look()
        try:
            with (
                frozen_as_keras(self.model),
                giving_losses(self.model, loss is not None),
                counts_kept(self.model.model) if self._job_context.is_aside else nullcontext(),
                reducing(reduce),
            ):
                return super()._run(task, loss, updater, driver, batch_size)
        finally:
            self._has_looked = False
            self.model.model._clear_losses()
