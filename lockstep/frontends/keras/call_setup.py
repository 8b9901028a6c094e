"""What every call of a Keras model's methods begins with: data, a built model, a trainer."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import keras
import torch
from keras.src.callbacks import CallbackList

from lockstep.frontends.keras.fit.data_adapter import adapt_data
from lockstep.frontends.keras.fit.layout import Layout
from lockstep.frontends.keras.layers.checks import check_turnable, prepare_model
from lockstep.frontends.keras.model import KerasModel, is_model_of
from lockstep.frontends.keras.settings import random_seed
from lockstep.frontends.keras.trainer import KerasTrainer
from lockstep.launch.health.failure import ending_with
from lockstep.train.input.data_adapter import DataPipeline
from lockstep.train.input.stream_broadcast import sample_of
from lockstep.train.runtime.job_context import JobContext, StrategyLike


class CallSetup:
    """Prepares the calls of a model's methods under a strategy.

    Args:
        model: the Keras model.
        strategy: where and how it trains.
        layout: where samples are in data, and for the model.

    Attributes:
        job_context: the other processes that make the same calls.
        trainer: of the last call; None before the first.
    """

    def __init__(self, model: Any, strategy: StrategyLike, layout: Layout) -> None:
        self._model = model
        self._strategy = strategy
        self._layout = layout
        self.job_context = JobContext(strategy)
        self.trainer: KerasTrainer | None = None

    @contextmanager
    def joint_call(self, name: str) -> Iterator[ExitStack]:
        """Within the block all processes make the same call; gives the stack that closes data."""
        with self.job_context.together(name), ExitStack() as feeds:
            yield feeds

    def adapt(self, feeds: ExitStack, *data: Any, name: str = "x", **options: Any) -> DataPipeline:
        """Adapt data, to be closed with ``feeds``; see ``adapt_data``."""
        feed = adapt_data(
            *data,
            name=name,
            seed=random_seed(),
            is_read_here=self.job_context.is_chief,
            layout=self._layout,
            **options,
        )
        feeds.enter_context(ending_with(feed.close))
        return self.job_context.agreed_feed(feed, name)

    def build(self, iterator: Any) -> None:
        """Build the model, its losses and metrics for the data, as Keras does, where needed."""
        prepare_model(self._model)
        as_model = self._layout.as_model(iterator) if self._layout else iterator
        self._model._symbolic_build(iterator=as_model)

    def build_by_calling(self, iterator: Any) -> None:
        """Build a model that is not compiled, on hosts that do not read its data."""
        if not self._model.built:
            batches = next(batches for _, _, batches in self._layout.as_model(iterator))
            self._call_once(next(iter(batches))[0])

    def _call_once(self, inputs: Any) -> None:
        with torch.no_grad():
            self._model(inputs)

    def trainer_for(self, feed: DataPipeline) -> KerasTrainer:
        """The Trainer of the model, which is built if need be."""
        model = self._model
        prepare_model(model)
        if self._layout:
            check_turnable(model)
        if not model.built:  # it is not compiled, so a call builds it
            source = sample_of(feed.source)
            assert source is not None  # this process reads the data
            batch = source.read(torch.arange(min(2, len(source))), torch.get_default_dtype())
            self._call_once(self._layout.inputs(batch.inputs[0]))
        if self.trainer is None or not is_model_of(self.trainer.model, model):
            module = KerasModel(model, self._layout)
            self.trainer = KerasTrainer(module, self._strategy, self.job_context)
        self.trainer.runner.seed = random_seed()
        return self.trainer

    def run_pass(
        self, feed: DataPipeline, callbacks: Any, verbose: Any, act: Callable[..., Any]
    ) -> Any:
        """Make one pass over data on all processes; ``act`` makes it where rank 0 is."""
        trainer = self.trainer_for(feed)
        listed = self.callback_list(callbacks, verbose, epochs=1, steps=feed.num_steps)
        return trainer.on_all_processes(partial(act, trainer, feed, listed))

    def leave_mode(self) -> None:
        """Leave the model in evaluation mode, as Keras does, unless a ``fit`` is under way."""
        self._model.train(self.job_context.is_rank_zero_only)

    def num_samples(self, x: Any) -> int:
        """The number of samples in a batch of the user's."""
        return first_length(self._layout.arrays(x)[0])

    def callback_list(self, callbacks: Any, verbose: Any, **params: Any) -> Any:
        """Keras's list of callbacks, with a progress bar; both are empty where rank 0 is not."""
        if not self.job_context.is_chief:
            callbacks, verbose = None, 0
        if isinstance(callbacks, CallbackList):
            return callbacks
        listed = CallbackList(
            callbacks, add_progbar=verbose != 0, verbose=verbose, model=self._model, **params
        )
        # Starting a thread for each call would take longer than most calls.
        listed._async_train = listed._async_test = listed._async_predict = False
        return listed


def first_length(x: Any) -> int:
    """The length of the first array of a structure."""
    return len(keras.tree.flatten(x)[0])
