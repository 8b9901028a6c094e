"""The methods of a Keras model made or compiled in a scope: ``fit`` and others, as Keras's.

They take Keras's arguments, do Keras's work around the steps (splitting off validation data,
building the model, calling callbacks), and leave the steps to a Trainer.
"""

import warnings
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from inspect import unwrap
from typing import Any

import keras
from keras.src import backend
from keras.src.callbacks import CallbackList
from keras.src.trainers.data_adapters import array_slicing, data_adapter_utils

from lockstep.data.batch_dims import BatchDims
from lockstep.data.trees import Tree, map_tensors
from lockstep.errors import ModelError, OptionError, level_of_user
from lockstep.frontends.keras.bound_methods import METHODS
from lockstep.frontends.keras.call_setup import CallSetup, first_length
from lockstep.frontends.keras.fit.checkpoints import FitSnapshot, checkpoint_in, restarts_in
from lockstep.frontends.keras.fit.data_adapter import warn_if_short
from lockstep.frontends.keras.fit.fit_facts import facts_of_fit
from lockstep.frontends.keras.fit.layout import layout_of
from lockstep.frontends.keras.fit_options import FitOptions
from lockstep.frontends.keras.layers.checks import check_batch_sizes, check_integers
from lockstep.frontends.keras.trainer import KerasTrainer
from lockstep.plan.spec import Plan
from lockstep.tracebacks import public_methods
from lockstep.train.callbacks.driver import Logs
from lockstep.train.checkpointing.memory_checkpoints import MemoryCheckpoints
from lockstep.train.fault_tolerance.lost_hosts import fit_with_restarts
from lockstep.train.history import History
from lockstep.train.input.data_adapter import DataPipeline
from lockstep.train.runtime.job_context import StrategyLike


@public_methods
class Methods:
    """A model's methods under a strategy.

    Args:
        model: the Keras model.
        strategy: where and how it trains.
        dims: where samples are in data, and for the model.
    """

    def __init__(self, model: Any, strategy: StrategyLike, dims: BatchDims) -> None:
        self._model = model
        self.strategy = strategy
        self.layout = layout_of(dims)
        self._setup = CallSetup(model, strategy, self.layout)
        self._job_context = self._setup.job_context

    @property
    def trainer(self) -> KerasTrainer | None:
        """The Trainer of the last call; None before the first."""
        return self._setup.trainer

    @property
    def plan(self) -> Plan:
        """The Plan of the last call.

        Raises:
            ModelError: no method was called yet.
        """
        if self.trainer is None:
            raise ModelError(
                "A model has a Plan after its first call.",
                received=f"a model {self._model.name!r} that was not called",
                fix="Call fit, evaluate or predict first.",
            )
        return self.trainer.runner.plan

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
        shuffle: bool | str = True,
        class_weight: Any = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: Any = 1,
    ) -> Any:
        """Train, as ``keras.Model.fit``."""
        self._model._assert_compile_called("fit")
        epochs = _limited(epochs)
        check_integers(
            {"steps_per_epoch": steps_per_epoch, "validation_steps": validation_steps},
            epochs=epochs,
            initial_epoch=initial_epoch,
        )
        check_batch_sizes(batch_size=batch_size, validation_batch_size=validation_batch_size)
        x, y = self.layout.arrays(x, y)
        if validation_data is not None:
            parts = data_adapter_utils.unpack_x_y_sample_weight(validation_data)
            validation_data = (*self.layout.arrays(*parts[:2]), parts[2])
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = array_slicing.train_validation_split(
                (x, y, sample_weight), validation_split=validation_split
            )
        checkpoint = checkpoint_in(callbacks)

        def adapt_all(feeds: ExitStack) -> tuple[DataPipeline, DataPipeline | None]:
            feed = self._setup.adapt(
                feeds,
                *(x, y, sample_weight),
                batch_size=batch_size,
                steps=steps_per_epoch,
                shuffle=shuffle,
                class_weight=class_weight,
                resets="once",
                prepare=self._setup.build,
                is_summed=checkpoint is not None,
            )
            if validation_data is None:
                return feed, None
            return feed, self._setup.adapt(
                feeds,
                *data_adapter_utils.unpack_x_y_sample_weight(validation_data),
                batch_size=validation_batch_size or batch_size,
                steps=validation_steps,
                name="validation_data",
            )

        options = FitOptions(
            epochs=epochs,
            initial_epoch=initial_epoch,
            # "batch" changes the order within each batch, on which no sum over it depends.
            shuffle=bool(shuffle) and shuffle != "batch",
            evaluates=tuple(
                epoch
                for epoch in range(min(initial_epoch, 0), epochs)
                if validation_data is not None
                and _evaluates_after(self._model, epoch, validation_freq)
            ),
            restarts=restarts_in(callbacks),
        )
        beginning = FitSnapshot(self._model, self.trainer, callbacks)

        def fit(memory: MemoryCheckpoints) -> None:
            if memory.is_restart:
                beginning.restore(self.trainer)
            with self._setup.joint_call("fit") as feeds:
                feed, validation = adapt_all(feeds)
                self._fit(feed, validation, options, callbacks, verbose, memory)

        fit_with_restarts(fit, options.restarts, self._job_context, verbose=verbose)
        return getattr(self._model, "history", None)

    def _fit(
        self,
        feed: DataPipeline,
        validation: DataPipeline | None,
        options: FitOptions,
        callbacks: Any,
        verbose: Any,
        memory: MemoryCheckpoints,
    ) -> None:
        """Train on adapted data, and fill the history."""
        checkpoint = checkpoint_in(callbacks)
        listed = self._setup.callback_list(
            callbacks, verbose, epochs=options.epochs, steps=feed.num_steps, add_history=True
        )
        trainer = self._setup.trainer_for(feed)
        facts = partial(facts_of_fit, trainer, feed, validation, **_result_options(options))
        train = partial(self._fit_with_callbacks, trainer, feed, validation, options, listed)
        checkpoints = trainer.checkpoints
        with checkpoints.around_fit(checkpoint, facts, listed, options, memory, verbose) as ended:
            history = trainer.on_all_processes(train if ended is None else lambda: vars(ended))
        if ended is not None or not self._job_context.is_chief:
            vars(self._model.history).update(history)

    def _fit_with_callbacks(
        self,
        trainer: KerasTrainer,
        feed: DataPipeline,
        validation: DataPipeline | None,
        options: FitOptions,
        callbacks: CallbackList,
    ) -> dict[str, Any]:
        """Train, with callbacks before and after; returns the contents of the history."""
        model = self._model
        model.stop_training = False
        callbacks.on_train_begin()
        trainer.checkpoints.begin_callbacks(options.restarts)
        options = replace(options, initial_epoch=model._initial_epoch or options.initial_epoch)
        warn_if_short(feed, options.epochs - options.initial_epoch)
        if validation is not None:
            warn_if_short(validation, 1)
        try:
            logs = trainer.fit(feed, validation, options, callbacks)
        finally:
            model.eval()
        if options.epochs > 0 and model.optimizer is not None:
            model.optimizer.finalize_variable_values(model.trainable_weights)
        callbacks.on_train_end(logs)
        trainer.finish_fit()
        history = getattr(model, "history", None)  # a user's CallbackList may lack one
        found = {} if history is None else {"epoch": history.epoch, "history": history.history}
        trainer.checkpoints.finish(History(**found))
        return self._job_context.from_chief(found)

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
        check_integers({"steps": steps})
        check_batch_sizes(batch_size=batch_size)
        x, y = self.layout.arrays(x, y)
        with self._setup.joint_call("evaluate") as feeds:
            feed = self._setup.adapt(
                feeds,
                *(x, y, sample_weight),
                batch_size=batch_size,
                steps=steps,
                prepare=self._setup.build,
            )
            logs = self._setup.run_pass(feed, callbacks, verbose, self._evaluate_with_callbacks)
        return logs if return_dict else self._model._flatten_metrics_in_order(logs)

    def _evaluate_with_callbacks(
        self, trainer: KerasTrainer, feed: DataPipeline, callbacks: CallbackList
    ) -> Logs:
        self._model.stop_evaluating = False
        callbacks.on_test_begin()
        warn_if_short(feed, 1)
        try:
            logs = trainer.evaluate(feed, callbacks)
        finally:
            self._setup.leave_mode()
        callbacks.on_test_end(logs)
        return logs

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """Outputs, as ``keras.Model.predict``."""
        check_integers({"steps": steps})
        check_batch_sizes(batch_size=batch_size)
        x, _ = self.layout.arrays(x)
        with self._setup.joint_call("predict") as feeds:
            feed = self._setup.adapt(
                feeds,
                x,
                batch_size=batch_size,
                steps=steps,
                resets="never",
                prepare=None if self._job_context.is_chief else self._setup.build_by_calling,
            )
            outputs = self._setup.run_pass(feed, callbacks, verbose, self._predict_with_callbacks)
        return map_tensors(backend.convert_to_numpy, self.layout.outputs(outputs))

    def _predict_with_callbacks(
        self, trainer: KerasTrainer, feed: DataPipeline, callbacks: CallbackList
    ) -> Tree:
        self._model.stop_predicting = False
        callbacks.on_predict_begin()
        warn_if_short(feed, 1)
        try:
            outputs = trainer.predict(feed, callbacks)
        finally:
            self._setup.leave_mode()
        callbacks.on_predict_end()
        return outputs

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
        x, y = self.layout.arrays(x, y)
        with self._setup.joint_call("train_on_batch") as feeds:
            feed = self._setup.adapt(
                feeds,
                *(x, y, sample_weight),
                batch_size=first_length(x),
                class_weight=class_weight,
                prepare=self._setup.build,
            )
            options = FitOptions(
                epochs=1, initial_epoch=0, shuffle=False, evaluates=(), is_one_batch=True
            )
            listed = self._setup.callback_list(None, 0, epochs=1, steps=1)
            trainer = self._setup.trainer_for(feed)
            logs = trainer.on_all_processes(
                partial(self._train_one_batch, trainer, feed, options, listed)
            )
        return logs if return_dict else model._flatten_metrics_in_order(logs)

    def _train_one_batch(
        self,
        trainer: KerasTrainer,
        feed: DataPipeline,
        options: FitOptions,
        callbacks: CallbackList,
    ) -> Logs:
        """Train on one batch, without Keras's callbacks around it."""
        self._model.stop_training = False
        return self._job_context.from_chief(trainer.fit(feed, None, options, callbacks))

    def test_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False
    ) -> Any:
        """Losses and metrics of a batch, as ``keras.Model.test_on_batch``."""
        return self.evaluate(
            x,
            y,
            batch_size=self._setup.num_samples(x),
            verbose=0,
            sample_weight=sample_weight,
            return_dict=return_dict,
        )

    def predict_on_batch(self, x: Any) -> Any:
        """Outputs for a batch, as ``keras.Model.predict_on_batch``."""
        return self.predict(x, batch_size=self._setup.num_samples(x), verbose=0)


for _name in METHODS:  # TypeErrors of wrong arguments name the model's method
    unwrap(getattr(Methods, _name)).__qualname__ = f"Model.{_name}"


def bind(model: Any, strategy: StrategyLike, dims: BatchDims) -> None:
    """Make a model train under a strategy from now on."""
    bound = vars(model).get("_lockstep")
    if bound is None or bound.strategy is not strategy or bound.layout.dims != dims:
        bound = Methods(model, strategy, dims)
        methods = {name: getattr(bound, name) for name in METHODS}
        vars(model).update(methods, _lockstep=bound)


def _evaluates_after(model: Any, epoch: int, validation_freq: Any) -> bool:
    """Whether an epoch ends with an evaluation."""
    if validation_freq == 0:
        raise OptionError(
            "`validation_freq` is the number of epochs between evaluations.",
            received="validation_freq=0",
            fix="Pass a positive integer, or no validation_data.",
        )
    return bool(model._should_eval(epoch, validation_freq))


def _result_options(options: FitOptions) -> dict[str, Any]:
    """The options on which the result of a ``fit`` depends, for a checkpoint."""
    return {
        "epochs": options.epochs,
        "initial_epoch": options.initial_epoch,
        "shuffle": options.shuffle,
        "evaluates": list(options.evaluates),
    }


def _limited(epochs: int) -> int:
    """The number of epochs, limited by ``keras.config.set_max_epochs``."""
    most = keras.config.max_epochs()
    if not most or most >= epochs:
        return epochs
    warnings.warn(f"Limiting epochs to {most}", stacklevel=level_of_user())
    return int(most)
