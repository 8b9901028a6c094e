"""The methods of a Keras model made or compiled in a scope: ``fit`` and the others, as Keras's.

They take what Keras's take, do what these do around the steps (splitting off validation data,
building the model, calling callbacks), and leave the steps to a Trainer.
"""

from typing import Any

import keras
import torch
from keras.src import backend
from keras.src.callbacks import CallbackList
from keras.src.trainers.data_adapters import array_slicing, data_adapter_utils

from lockstep.data.trees import map_tensors
from lockstep.errors import ModelError, problem
from lockstep.frontends.keras.checks import check_alone, check_model
from lockstep.frontends.keras.conducting import acts_in
from lockstep.frontends.keras.intake import take_in, warn_if_short
from lockstep.frontends.keras.model import KerasModel, is_model_of
from lockstep.frontends.keras.names import METHODS
from lockstep.frontends.keras.tasks import Evaluation
from lockstep.frontends.keras.trainer import FitOptions, KerasTrainer, random_seed
from lockstep.plan.spec import Plan
from lockstep.train.feeding import sample_of
from lockstep.train.intake import Feed, close_all
from lockstep.train.trainer import StrategyLike


class Methods:
    """A model's methods under a strategy.

    Args:
        model: the Keras model.
        strategy: where and how it trains.
    """

    def __init__(self, model: Any, strategy: StrategyLike) -> None:
        self._model = model
        self.strategy = strategy
        self._trainer: KerasTrainer | None = None

    @property
    def plan(self) -> Plan:
        """The Plan of the last call.

        Raises:
            ModelError: nothing was called yet.
        """
        if self._trainer is None:
            raise ModelError(
                problem(
                    "A model has a Plan from its first call on.",
                    received=f"a model {self._model.name!r} that was not called",
                    fix="Call fit, evaluate or predict first.",
                )
            )
        return self._trainer.plan

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: Any = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: Any = 1,
    ) -> Any:
        """Train, as ``keras.Model.fit``."""
        model = self._model
        model._assert_compile_called("fit")
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = array_slicing.train_validation_split(
                (x, y, sample_weight), validation_split=validation_split
            )
        feed = take_in(
            x,
            y,
            sample_weight,
            batch_size=batch_size,
            steps=steps_per_epoch,
            shuffle=shuffle,
            class_weight=class_weight,
            seed=random_seed(),
            goes_on=True,
            prepare=self._build,
        )
        validation = None
        try:
            if validation_data is not None:
                validation = take_in(
                    *data_adapter_utils.unpack_x_y_sample_weight(validation_data),
                    batch_size=validation_batch_size or batch_size,
                    steps=validation_steps,
                    seed=random_seed(),
                    name="validation_data",
                )
            trainer = self._ready(feed)
            listed = self._listed(
                callbacks, verbose, epochs=epochs, steps=feed.num_steps, add_history=True
            )
            model.stop_training = False
            listed.on_train_begin()
            options = FitOptions(
                epochs=epochs,
                initial_epoch=model._initial_epoch or initial_epoch,
                shuffle=bool(shuffle),
                evaluates=tuple(model._should_eval(one, validation_freq) for one in range(epochs)),
            )
            warn_if_short(feed, epochs - options.initial_epoch)
            evaluation = None if validation is None else _evaluation(validation, listed)
            logs = trainer.train(feed, evaluation, options, listed)
            if epochs > 0:
                model.optimizer.finalize_variable_values(model.trainable_weights)
        finally:
            model.eval()
            close_all(feed, validation)
        listed.on_train_end(logs)
        return model.history

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Any = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """Losses and metrics, as ``keras.Model.evaluate``."""
        self._model._assert_compile_called("evaluate")
        feed = take_in(x, y, sample_weight, batch_size=batch_size, steps=steps, prepare=self._build)
        try:
            trainer = self._ready(feed)
            listed = self._listed(callbacks, verbose, epochs=1, steps=feed.num_steps)
            self._model.stop_evaluating = False
            listed.on_test_begin()
            logs = trainer.assess(_evaluation(feed, listed), feed, listed)
        finally:
            self._model.eval()
            feed.close()
        listed.on_test_end(logs)
        return logs if return_dict else self._model._flatten_metrics_in_order(logs)

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """Outputs, as ``keras.Model.predict``."""
        feed = take_in(x, batch_size=batch_size, steps=steps)
        try:
            trainer = self._ready(feed)
            listed = self._listed(callbacks, verbose, epochs=1, steps=feed.num_steps)
            listed.on_predict_begin()
            outputs = trainer.infer(feed)
        finally:
            self._model.eval()
            feed.close()
        listed.on_predict_end()
        return map_tensors(backend.convert_to_numpy, outputs)

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """One step, as ``keras.Model.train_on_batch``."""
        model = self._model
        model._assert_compile_called("train_on_batch")
        feed = take_in(
            x,
            y,
            sample_weight,
            batch_size=_num_samples(x),
            class_weight=class_weight,
            prepare=self._build,
        )
        options = FitOptions(epochs=1, initial_epoch=0, shuffle=False, evaluates=(False,))
        listed = self._listed(None, 0, epochs=1, steps=1)
        model.stop_training = False
        logs = self._ready(feed).train(feed, None, options, listed)
        return logs if return_dict else model._flatten_metrics_in_order(logs)

    def test_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False
    ) -> Any:
        """Losses and metrics of a batch, as ``keras.Model.test_on_batch``."""
        return self.evaluate(
            x,
            y,
            batch_size=_num_samples(x),
            verbose=0,
            sample_weight=sample_weight,
            return_dict=return_dict,
        )

    def predict_on_batch(self, x: Any) -> Any:
        """Outputs for a batch, as ``keras.Model.predict_on_batch``."""
        return self.predict(x, batch_size=_num_samples(x), verbose=0)

    def _build(self, iterator: Any) -> None:
        """Build the model, its losses and metrics for the data, as Keras does, where need be."""
        check_model(self._model)
        self._model._symbolic_build(iterator=iterator)

    def _ready(self, feed: Feed) -> KerasTrainer:
        """The Trainer of the model."""
        model = self._model
        check_model(model)
        check_alone(self.strategy)
        if not model.built:  # as nobody has compiled it, it is built by calling it
            source = sample_of(feed.source)
            assert source is not None  # data is read here
            batch = source.read(torch.arange(min(2, len(source))), torch.get_default_dtype())
            with torch.no_grad():
                model(batch.inputs[0])
        if self._trainer is None or not is_model_of(self._trainer.model, model):
            self._trainer = KerasTrainer(KerasModel(model), self.strategy)
        return self._trainer

    def _listed(self, callbacks: Any, verbose: Any, **params: Any) -> Any:
        if isinstance(callbacks, CallbackList):
            return callbacks
        listed = CallbackList(
            callbacks,
            add_progbar=verbose != 0,
            verbose=verbose,
            model=self._model,
            **params,
        )
        # A thread for each call would take longer than most calls.
        listed._async_train = listed._async_test = listed._async_predict = False
        return listed


def bind(model: Any, strategy: StrategyLike) -> None:
    """Have a model train under a strategy, from now on."""
    bound = vars(model).get("_lockstep")
    if bound is None or bound.strategy is not strategy:
        bound = Methods(model, strategy)
        methods = {name: getattr(bound, name) for name in METHODS}
        vars(model).update(methods, _lockstep=bound)


def _evaluation(feed: Feed, callbacks: Any) -> Evaluation:
    return Evaluation(
        source=feed.source,
        batch_size=feed.batch_size,
        steps=feed.steps_per_epoch,
        tells=any(acts_in(one, "on_test_batch_end") for one in callbacks.callbacks),
    )


def _num_samples(x: Any) -> int:
    return len(keras.tree.flatten(x)[0])
