"""The base of all strategies."""

import inspect
import os
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Self, TypeVar

from lockstep.cluster.devices import discover
from lockstep.cluster.environment import find_place
from lockstep.cluster.place import Reach
from lockstep.errors import OptionError
from lockstep.options import unknown_argument
from lockstep.plan.makers.data_parallel import Maker
from lockstep.plan.spec import Plan
from lockstep.strategies.distribute_names import missing
from lockstep.tracebacks import public_methods

_T = TypeVar("_T")


@public_methods
class Strategy(ABC):
    """Makes Plans.

    Attributes:
        timeout_seconds: longest wait of rank 0 for a helper; a longer one is an error with all
            ranks' stacks.
        reach: the processes that its Plans use, if a launcher has started several.
    """

    timeout_seconds: float = 600.0
    reach: Reach = "one host"
    _arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Keep the given arguments for ``repr``."""
        if not kwargs.keys() <= inspect.signature(cls).parameters.keys():
            raise unknown_argument(cls, kwargs)
        made = super().__new__(cls)
        made._arguments = args, kwargs
        return made

    def __repr__(self) -> str:
        args, kwargs = self._arguments
        given = inspect.signature(type(self)).bind_partial(*args, **kwargs).arguments
        return f"{type(self).__name__}({', '.join(f'{name}={given[name]!r}' for name in given)})"

    @abstractmethod
    def maker(self, precision: str = "fp32") -> Maker:
        """The pure function (LayerGraph, Cluster, batch size) -> Plan behind this strategy."""

    def plan(
        self,
        model: Any,
        *,
        batch_size: int,
        precision: str = "fp32",
        sample: Any = None,
        batch_dim: Any = 0,
    ) -> Plan:
        """The Plan for a model on this host, without training anything.

        Args:
            model: the PyTorch or Keras model.
            batch_size: of the global batch.
            precision: see ``Trainer``; a Keras model has its own.
            sample: data as ``fit`` or ``predict`` of the Trainer, or of the Keras model, take it,
                at least a microbatch. Needed by strategies that cut the model, which run and time
                its layers.
            batch_dim: where the samples are, as the Trainer takes it.

        Raises:
            OptionError: a missing sample, or invalid options.
            ModelError: a Keras model is not built, or has a step of its own.
        """
        from lockstep.data.batch_dims import BatchDims
        from lockstep.frontends.plan_inputs import plan_inputs

        module, precision, samples, dims = plan_inputs(
            model, precision, sample, BatchDims.of(batch_dim)
        )
        maker = self.maker(precision)
        maker.check_batch_size(batch_size)
        if maker.sample_size(discover(), batch_size) is None:
            from lockstep.capture.layers import capture_layers

            return maker(capture_layers(module), discover(), batch_size)
        if samples is None:
            raise OptionError(
                "To cut the model, the costs of its layers must be measured on your data.",
                received="sample=None",
                fix="Pass sample=(inputs, targets), or inputs alone.",
            )
        import torch

        from lockstep.train.runtime.planning import Planning

        with torch.inference_mode(False):  # tracing needs gradients
            return Planning(module, dims).plan(maker, precision, samples, batch_size)[0]

    @property
    @abstractmethod
    def num_replicas_in_sync(self) -> int:
        """Replicas that train on different shares of a batch and stay equal."""

    @property
    def is_chief(self) -> bool:
        """Whether this process is the one of all hosts that should print and write files.

        It is the first process of host 0, or the only process without a launcher. This does not
        communicate, so one host may ask alone.
        """
        place = None if self.reach == "one process" else find_place(os.environ)
        return place is None or (place.host == 0 and place.leads)

    def experimental_distribute_dataset(self, dataset: _T, options: object = None) -> _T:
        """Return a dataset of global batches unchanged: ``fit`` divides them among the replicas.

        For scripts from tf.distribute; its options have no meaning here.
        """
        return dataset

    def __getattr__(self, name: str) -> NoReturn:
        """Raise an error that says, for other names of tf.distribute, what to write instead."""
        raise missing(type(self).__name__, name)

    def scope(self, batch_dim: Any = 0) -> AbstractContextManager["Strategy"]:
        """Within ``with strategy.scope():`` a Trainer without a strategy uses this one.

        Keras models that are made or compiled within train under it, too.

        Args:
            batch_dim: where the samples are in the data, inputs and outputs of Keras models: 1 with
                time first. A dict gives it for ``"inputs"``, ``"targets"`` and ``"outputs"``, each
                by name or position if they differ. Losses, metrics and sample weights always have
                samples first. A Trainer has its own option.

        Raises:
            OptionError: Keras was imported with another backend than PyTorch; an invalid
                ``batch_dim``.
        """
        from lockstep.data.batch_dims import BatchDims
        from lockstep.frontends.keras.scope import scope_of

        return scope_of(self, BatchDims.of(batch_dim))
