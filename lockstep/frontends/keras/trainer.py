"""The Trainer of a Keras model: plans, processes and steps are those of any model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from torch import optim

from lockstep.data.sources import ArraySource, Source
from lockstep.data.trees import Tree, concatenate
from lockstep.errors import ModelError
from lockstep.frontends.keras.additions import find_additions
from lockstep.frontends.keras.attributes import NO_SETTINGS, with_settings
from lockstep.frontends.keras.checks import has_own_loss
from lockstep.frontends.keras.computed_loss import ComputedLoss
from lockstep.frontends.keras.conducting import (
    EvaluationConductor,
    KerasFitConductor,
    PredictionConductor,
    any_acts_in,
    may_stop,
    steps_between_metrics,
)
from lockstep.frontends.keras.direct_calls import is_plain_kind
from lockstep.frontends.keras.keeping import KeepingRunner, check_restarts
from lockstep.frontends.keras.looking import few_samples, fixed_batch_size, in_evaluation
from lockstep.frontends.keras.losses import Additions, KerasLoss
from lockstep.frontends.keras.metrics import KerasMetrics
from lockstep.frontends.keras.model import KerasModel, giving_losses
from lockstep.frontends.keras.settings import random_seed
from lockstep.frontends.keras.shipping import reduce
from lockstep.frontends.keras.sights import Lookout, Sight
from lockstep.frontends.keras.tasks import (
    Evaluation,
    KerasEvaluateTask,
    KerasFitTask,
    KerasPredictTask,
)
from lockstep.frontends.keras.updater import KerasUpdater, is_elementwise
from lockstep.parallel.forward import call_model
from lockstep.parallel.independence import check_apart
from lockstep.parallel.serialization import reducing
from lockstep.plan.makers import SingleDevice
from lockstep.train.backups import Backups
from lockstep.train.changes import ChangeWatch, settings_of
from lockstep.train.conducting import FollowingConductor
from lockstep.train.conductor import Conductor, Logs
from lockstep.train.ensemble import Resume
from lockstep.train.feeding import SharedStream, sample_of
from lockstep.train.intake import Feed
from lockstep.train.interrupt import Interrupt, held_interrupts
from lockstep.train.job_context import JobContext, StrategyLike
from lockstep.train.likeness import Facts, said
from lockstep.train.recipe import Recipe
from lockstep.train.tasks import Task
from lockstep.units import first_few

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """What ``fit`` was told.

    Attributes:
        epochs: the number of the last, plus one.
        initial_epoch: the number of the first.
        shuffle: take arrays in a new order every epoch.
        evaluates: the epochs that end with an evaluation.
        is_one_batch: this is ``train_on_batch``.
        restarts: how often to go on after the loss of a process.
    """

    epochs: int
    initial_epoch: int
    shuffle: bool
    evaluates: tuple[int, ...]
    is_one_batch: bool = False
    restarts: int = 0


@dataclass(frozen=True, kw_only=True)
class _Start:
    """Where a training begins, and what host 0's callbacks want of it; see ``KerasFitTask``."""

    epoch: int
    step: int
    tells_each: int
    evaluation_tells_each: int
    evaluation_may_stop: bool
    watches_validation: bool


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


class KerasTrainer(KeepingRunner):
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
            recipe=Recipe(precision=module.precision, on_nonfinite="ignore"),
            precision=module.precision,
            seed=random_seed(),
        )
        self.callbacks = []
        self._lookout = Lookout(module)
        self._sight: Sight | None = None
        self._has_looked = False  # since ranks have run the model
        self._updater: tuple[Sight | None, KerasUpdater] | None = None
        self._known: _Known | None = None
        self._is_apart = False  # outputs of samples are seen not to depend on others

    def on_all_processes(self, make: Callable[[], _T]) -> _T:
        """What a call comes to, on all processes that make it."""
        return self._shared(make)

    def fit(
        self, feed: Feed, evaluation: Evaluation | None, options: FitOptions, callbacks: Any
    ) -> Logs:
        """Train on data; the last epoch's values."""
        self._has_looked = False
        model = self.model.model
        self.optimizer = model.optimizer
        loss, metrics = self._loss_and_metrics(feed.source, looks=not options.is_one_batch)
        begins = any_acts_in(callbacks, "on_train_batch_begin", "on_batch_begin")
        # Callbacks are on host 0, and one may have found where an earlier run has ended.
        start: _Start = self._job_context.from_chief(
            _Start(
                epoch=options.initial_epoch,
                step=int(model.optimizer._iterations.value),
                tells_each=steps_between_metrics(callbacks, "on_train_batch_end", "on_batch_end"),
                evaluation_tells_each=0 if evaluation is None else evaluation.tells_each,
                evaluation_may_stop=may_stop(callbacks, "test"),
                watches_validation=any_acts_in(callbacks, "on_test_begin", "on_test_end"),
            )
        )
        self._epochs_trained = 0 if start.epoch else self._epochs_trained
        self._steps_trained = start.step
        resume = Resume(start.epoch)
        if self._resumed is not None:
            is_stream = isinstance(feed.source, SharedStream)
            resume = self._start(feed.batch_size, is_stream=is_stream)
            others = [] if evaluation is None else [(evaluation.source, options.evaluates)]
            self._read_again(resume, start.epoch, feed, others)
        task = KerasFitTask(
            source=feed.source,
            validation=None,
            evaluation=evaluation
            and replace(
                evaluation,
                tells_each=start.evaluation_tells_each,
                may_stop=start.evaluation_may_stop,
            ),
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
            metrics=metrics,
            loss=loss,
            watched=True,
            watches_beginnings=True,
            before_steps=begins,
            after_steps=start.tells_each == 1,
            shows_slots=not is_elementwise(model.optimizer, self.model.variables.values()),
            watches_validation=start.watches_validation,
            tells_each=start.tells_each,
            takes_states=options.restarts > 0
            or (self.keeper is not None and self.keeper.acts_in("takes_state")),
            is_kept=options.restarts > 0 or self.keeper is not None,
        )
        if self._job_context.hosts is not None:
            facts = {"`evaluates`": options.evaluates}
            task = self._job_context.hosts.agree_on_task(task, facts)  # type: ignore[assignment]  # of the same class
        with self._fitting(), held_interrupts() as interrupt:
            backups = None  # unless somebody has asked for restarts
            if options.restarts:
                check_restarts(self._maker(), self._job_context.hosts)
                backups = self._backups_of(task.sources(), options.restarts)
            conductor = self._conductor(callbacks, interrupt, backups)
            self._maker().check_batch_size(feed.batch_size)
            self.batch_size = feed.batch_size
            self._go_on(conductor, task.start)
            self._train(task, loss, conductor, feed.batch_size)
            self._is_apart = True
            self._job_context.share_values(self.model, conductor.updater)
        return conductor.logs if isinstance(conductor, KerasFitConductor) else {}

    def _conductor(
        self, callbacks: Any, interrupt: Interrupt, backups: Backups | None
    ) -> KerasFitConductor | FollowingConductor:
        if not self._job_context.is_chief:
            return FollowingConductor(interrupt)
        return KerasFitConductor(
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

    def evaluate(self, evaluation: Evaluation, feed: Feed, callbacks: Any) -> Logs:
        """Losses and metrics over data."""
        self._has_looked = False
        loss, metrics = self._loss_and_metrics(feed.source, looks=False)
        self._try_apart(feed.source)
        tells_each, stops = self._job_context.from_chief(
            (evaluation.tells_each, may_stop(callbacks, "test"))
        )
        evaluation = replace(evaluation, tells_each=tells_each, may_stop=stops)
        task = KerasEvaluateTask(evaluation=evaluation, metrics=metrics, loss=loss)
        is_chief = self._job_context.is_chief
        conductor = EvaluationConductor(self.model.model, callbacks) if is_chief else Conductor()
        found: Logs = self._run(task, loss, None, conductor, feed.batch_size)
        return self._job_context.from_chief(found)

    def predict(self, feed: Feed, callbacks: Any) -> Tree:
        """The model's outputs for data, in its order."""
        self._has_looked = False
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
        )
        is_chief = self._job_context.is_chief
        conductor = PredictionConductor(self.model.model, callbacks) if is_chief else Conductor()
        parts = self._run(task, None, None, conductor, feed.batch_size)
        return self._job_context.from_chief(
            concatenate(parts) if self._job_context.is_chief else None
        )

    def _loss_and_metrics(
        self, source: Source | SharedStream, *, looks: bool
    ) -> tuple[KerasLoss, KerasMetrics]:
        """The model's losses and metrics, as they are compiled now.

        Args:
            source: the data.
            looks: what layers add is looked at anew, unless all can be seen and is as it was.
        """
        model = self.model.model
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
            own = self._find_additions(source, is_divided=is_divided)
            found = self._job_context.from_chief(own)
            assert found is not None
            self._is_apart = False
            self._known = known = _Known(
                key, self._loss(found, is_divided=is_divided), found.has_rows
            )
        assert known is not None
        layers = model._flatten_layers(include_self=False)
        of_layers = [*model._metrics, *(one for layer in layers for one in layer._metrics)]
        metrics = KerasMetrics(model._compile_metrics, of_layers, has_rows=known.has_rows)
        return known.loss, metrics

    def _loss(self, additions: Additions, *, is_divided: bool) -> KerasLoss:
        compiled = self.model.model._compile_loss
        if has_own_loss(self.model.model):
            return ComputedLoss(compiled, additions, self.model, is_divided=is_divided)
        return KerasLoss(compiled, additions, is_divided=is_divided)

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
                    check_apart(model, partial(call_model, model), few_samples(model, sample))
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
            updater = KerasUpdater(self.optimizer, self.model.variables)
            self._updater = self._look(), updater
        return updater

    def _own_updater(self) -> Any:
        self.optimizer = self.model.model.optimizer
        return super()._own_updater()

    def _look(self) -> Sight | None:
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

    def _run(
        self, task: Task, loss: Any, updater: Any, conductor: Conductor, batch_size: int
    ) -> Any:
        if self._job_context.hosts is not None:
            self._job_context.check_equal(self._keras_facts())
        self._look()
        try:
            with (
                self._frozen_as_keras(),
                giving_losses(self.model, loss is not None),
                self._counts_kept() if self._job_context.is_aside else nullcontext(),
                reducing(reduce),
            ):
                return super()._run(task, loss, updater, conductor, batch_size)
        finally:
            self._has_looked = False
            self.model.model._clear_losses()

    @contextmanager
    def _frozen_as_keras(self) -> Iterator[None]:
        """A frozen model trains none of its layers, be they frozen themselves or not."""
        trained = set(map(id, self.model.model.trainable_variables))
        frozen = [
            one._value
            for one in self.model.variables.values()
            if one._value.requires_grad and id(one) not in trained
        ]
        for parameter in frozen:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(True)

    @contextmanager
    def _counts_kept(self) -> Iterator[None]:
        """A callback's own ``evaluate`` counts with the metrics that training counts with."""
        counts = [(one, one.value.clone()) for one in self.model.model.metrics_variables]
        try:
            yield
        finally:
            for variable, value in counts:
                variable.assign(value)

    def _keras_facts(self) -> Facts:
        """What must be alike on all hosts, beside what must of any model."""
        model = self.model.model
        layers = model._flatten_layers()
        facts: Facts = {
            "the layers": [(_layer_path(layer), type(layer).__name__) for layer in layers]
        }
        for layer in filter(is_plain_kind, layers):
            for option, value in layer.get_config().items():
                if option != "trainable":  # a callback may change that, and it is told
                    facts[f"`{option}` of the layer {_layer_path(layer)!r}"] = value
        if model._compile_loss is not None:
            facts["the loss of compile"] = said(model._compile_loss._user_loss)
            facts["the loss weights"] = said(model._compile_loss._user_loss_weights)
        if model._compile_metrics is not None:
            facts["the metrics of compile"] = said(model._compile_metrics._user_metrics)
        return facts


def _layer_path(layer: Any) -> str:
    """What a layer is called; one without weights has no path of its own."""
    return str(layer.path or layer.name)
