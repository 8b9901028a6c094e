"""Interception of the calls of a custom step that concern all samples of a batch.

A ``train_step`` runs unchanged on a part of the batch. Applying gradients, updating a metric and
assigning a weight concern the whole batch, so these calls go to the object that runs the step.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from keras.src.backend.torch.core import Variable
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.trainers.trainer import Trainer

from lockstep.frontends.keras.layers.dry_run import metrics_of_layers
from lockstep.frontends.keras.model import KerasModel
from lockstep.parallel.data_parallel.functional_patch import Redirection

_apply = Redirection("apply", BaseOptimizer)
_assign = Redirection("_direct_assign", Variable)


class StepCalls(ABC):
    """Intercepts a step's calls. While it handles one, further calls pass through to Keras.

    Args:
        module: the model.
        moments: gives BatchNormalization its statistics; None is those of the whole batch.
    """

    def __init__(self, module: KerasModel, moments: Callable[..., Any] | None = None) -> None:
        self.module = module
        self._moments = moments
        self.metrics = metrics_of(module.model)
        self._weights = {id(one._value): name for name, one in module.variables.items()}
        self._passes_through = False
        self._results: dict[int, Any] = {}

    @contextmanager
    def intercepted(self) -> Iterator[None]:
        """Within the block a step's calls come to this object."""
        self._results.clear()
        with (
            self.module.stepping(self._moments),
            _apply.to(self._intercept_apply),
            _assign.to(self._intercept_assign),
            self._intercepted_metrics(),
        ):
            yield

    @abstractmethod
    def apply(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """The step applies gradients of this part of the batch; none of them is None."""

    @abstractmethod
    def update(self, number: int, args: Sequence[Any], named: Mapping[str, Any]) -> None:
        """The step updates a metric with values of this part of the batch."""

    @abstractmethod
    def assign(self, name: str, variable: Any, value: torch.Tensor) -> None:
        """The step assigns a weight of the model."""

    def is_result(self, value: Any) -> bool:
        """Whether a metric returned this very object in the step."""
        return id(value) in self._results

    def name_of(self, variable: Any) -> str | None:
        """The name of a weight; None for any other variable."""
        return self._weights.get(id(variable._value))

    def _passed_through(self, call: Callable[..., Any], *args: Any) -> None:
        self._passes_through = True
        try:
            call(*args)
        finally:
            self._passes_through = False

    def _intercept_apply(self, optimizer: Any, grads: Any, trainable_variables: Any = None) -> None:
        if self._passes_through:
            _apply.plain(optimizer, grads, trainable_variables)
            return
        gradients = list(grads)
        variables = trainable_variables or optimizer._trainable_variables
        used = [
            (gradient, variable)
            for gradient, variable in zip(gradients, variables, strict=True)
            if gradient is not None
        ]
        if not used:  # Keras raises its own error
            _apply.plain(optimizer, gradients, trainable_variables)
            return
        if not optimizer.built:
            optimizer.build(list(variables))
        self._passed_through(self.apply, optimizer, *map(list, zip(*used, strict=True)))

    def _intercept_assign(self, variable: Any, value: torch.Tensor) -> None:
        name = self.name_of(variable)
        if self._passes_through or name is None:
            _assign.plain(variable, value)
        else:
            self._passed_through(self.assign, name, variable, value)

    @contextmanager
    def _intercepted_metrics(self) -> Iterator[None]:
        before = [dict(vars(metric)) for metric in self.metrics]
        for number, metric in enumerate(self.metrics):
            vars(metric).update(
                update_state=partial(self._intercept_update, number, metric.update_state),
                result=partial(self._intercept_result, metric.result),
            )
        try:
            yield
        finally:
            for metric, attributes in zip(self.metrics, before, strict=True):
                for name in ("update_state", "result"):
                    vars(metric).pop(name)
                    if name in attributes:
                        vars(metric)[name] = attributes[name]

    def _intercept_update(
        self, number: int, plain: Callable[..., Any], *args: Any, **named: Any
    ) -> None:
        if self._passes_through:
            plain(*args, **named)
        else:
            self._passed_through(self.update, number, args, named)

    def _intercept_result(self, plain: Callable[[], Any]) -> Any:
        value = plain()
        for one in [value, *(value.values() if isinstance(value, dict) else ())]:
            self._results[id(one)] = one  # keeps it alive, so that its id stays unique
        return value


def metrics_of(model: Any) -> list[Any]:
    """The metrics that a model's steps may update, each once."""
    own = Trainer.metrics.fget(model)
    return list(
        {id(one): one for one in (*own, *model.metrics, *metrics_of_layers(model))}.values()
    )
