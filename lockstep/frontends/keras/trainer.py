"""The Trainer of a Keras model: plans, processes and steps are those of any model."""

from dataclasses import dataclass
from typing import Any

from keras.src.utils import rng_utils

from lockstep.data.sources import ArraySource
from lockstep.data.trees import Tree, concatenate
from lockstep.frontends.keras.additions import find_additions
from lockstep.frontends.keras.conducting import EvaluationConductor, KerasFitConductor, acts_in
from lockstep.frontends.keras.losses import Additions, KerasLoss
from lockstep.frontends.keras.metrics import KerasMetrics
from lockstep.frontends.keras.model import KerasModel
from lockstep.frontends.keras.shipping import reduce
from lockstep.frontends.keras.tasks import Evaluation, KerasEvaluateTask, KerasFitTask
from lockstep.frontends.keras.updater import KerasUpdater
from lockstep.parallel.parcel import reducing
from lockstep.train.feeding import sample_of
from lockstep.train.intake import Feed
from lockstep.train.interrupt import held_interrupts
from lockstep.train.tasks import Conductor, Logs, PredictTask, Resume, Task
from lockstep.train.trainer import StrategyLike, Trainer

# What a helper of a Keras model needs, beside what all need.
_PRELOAD = ("lockstep.frontends.keras.trainer",)


def random_seed() -> int:
    """What ``keras.utils.set_random_seed`` was called with; 0 where it was not."""
    return rng_utils.get_random_seed() or 0


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """What ``fit`` was told.

    Attributes:
        epochs: the number of the last, plus one.
        initial_epoch: the number of the first.
        shuffle: take arrays in a new order every epoch.
        evaluates: for each epoch, whether it ends with an evaluation.
    """

    epochs: int
    initial_epoch: int
    shuffle: bool
    evaluates: tuple[bool, ...]


class KerasTrainer(Trainer):
    """Trains a Keras model.

    Args:
        module: the model.
        strategy: where and how.
    """

    model: KerasModel

    def __init__(self, module: KerasModel, strategy: StrategyLike) -> None:
        is_double = all(parameter.dtype.itemsize == 8 for parameter in module.parameters())
        super().__init__(
            module,
            strategy=strategy,
            precision="fp64" if is_double else "fp32",
            seed=random_seed(),
            on_nonfinite="ignore",  # as Keras; it has a callback that looks at losses
        )
        self._additions: tuple[object, Additions] | None = None

    def _begin_session(self) -> None:
        super()._begin_session()
        self._session.preload = _PRELOAD

    def train(
        self, feed: Feed, evaluation: Evaluation | None, options: FitOptions, callbacks: Any
    ) -> Logs:
        """Train on data; the last epoch's values."""
        model = self.model.model
        self.optimizer = model.optimizer
        loss, metrics = self._measures(feed)
        acting = callbacks.callbacks
        tells = any(acts_in(one, "on_train_batch_end", "on_batch_end") for one in acting)
        self._epochs_trained = 0 if options.initial_epoch else self._epochs_trained
        self._steps_trained = int(model.optimizer._iterations.value)
        task = KerasFitTask(
            source=feed.source,
            validation=None,
            evaluation=evaluation,
            evaluates=options.evaluates,
            epochs=options.epochs,
            initial_epoch=options.initial_epoch,
            start=Resume(options.initial_epoch),
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
            before_steps=any(
                acts_in(one, "on_train_batch_begin", "on_batch_begin") for one in acting
            ),
            after_steps=tells,
            tells=tells,
        )
        with held_interrupts() as interrupt:
            conductor = KerasFitConductor(
                self.model,
                callbacks,
                lambda: self._session.readopt(self.model),
                interrupt,
                tells=tells,
            )
            self._maker().check_batch_size(feed.batch_size)
            self.batch_size = feed.batch_size
            self._train(task, loss, conductor, feed.batch_size)
        return conductor.logs

    def assess(self, evaluation: Evaluation, feed: Feed, callbacks: Any) -> Logs:
        """Losses and metrics over data."""
        loss, metrics = self._measures(feed)
        task = KerasEvaluateTask(evaluation=evaluation, metrics=metrics, loss=loss)
        conductor = EvaluationConductor(self.model.model, callbacks)
        found: Logs = self._run(task, loss, None, conductor, feed.batch_size)
        return found

    def infer(self, feed: Feed) -> Tree:
        """The model's outputs for data, in its order."""
        task = PredictTask(source=feed.source, batch_size=feed.batch_size)
        return concatenate(self._run(task, None, None, Conductor(), feed.batch_size))

    def _measures(self, feed: Feed) -> tuple[KerasLoss, KerasMetrics]:
        """The model's losses and metrics, as they are compiled now."""
        model = self.model.model
        key = (model._compile_loss, len(model.losses))
        if self._additions is None or self._additions[0] != key:
            sample = sample_of(feed.source)
            assert isinstance(sample, ArraySource)
            self._additions = key, find_additions(self.model, model._compile_loss, sample)
        loss = KerasLoss(model._compile_loss, self._additions[1])
        layers = model._flatten_layers(include_self=False)
        of_layers = [*model._metrics, *(one for layer in layers for one in layer._metrics)]
        return loss, KerasMetrics(model._compile_metrics, of_layers)

    def _make_updater(self) -> Any:
        return KerasUpdater(self.optimizer, self.model.variables)

    def _run(
        self, task: Task, loss: Any, updater: Any, conductor: Conductor, batch_size: int
    ) -> Any:
        self.model.with_losses = loss is not None
        try:
            with reducing(reduce):
                return super()._run(task, loss, updater, conductor, batch_size)
        finally:
            self.model.with_losses = False
            self.model.model._clear_losses()
