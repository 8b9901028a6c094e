"""What a step that a model defines itself does for all samples of a batch, to be done elsewhere.

A ``train_step`` runs on a part of the batch as it is. Where it applies gradients, updates a metric,
or assigns a weight, this concerns the whole batch: while it runs such calls go to whoever runs it.
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

from lockstep.frontends.keras.model import KerasModel
from lockstep.parallel.data_parallel.functional_patch import Redirection

_apply = Redirection("apply", BaseOptimizer)
_assign = Redirection("_direct_assign", Variable)


class StepCalls(ABC):
    """Gets what a step calls; while it does something about it, calls are what they always are.

    Args:
        module: the model.
        moments: how BatchNormalization takes statistics; None is those of the whole batch.
    """

    def __init__(self, module: KerasModel, moments: Callable[..., Any] | None = None) -> None:
        self.module = module
        self._moments = moments
        self.metrics = metrics_of(module.model)
        self._weights = {id(one._value): name for name, one in module.variables.items()}
        self._is_busy = False
        self._results: dict[int, Any] = {}

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Within the block a step's calls come here."""
        self._results.clear()
        with (
            self.module.stepping(self._moments),
            _apply.to(self._take_apply),
            _assign.to(self._take_assign),
            self._metrics_taken(),
        ):
            yield

    @abstractmethod
    def apply(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """An optimizer is to apply gradients of this part of the batch; none of them is None."""

    @abstractmethod
    def update(self, number: int, args: Sequence[Any], named: Mapping[str, Any]) -> None:
        """A metric is to be updated with what belongs to this part of the batch."""

    @abstractmethod
    def assign(self, name: str, variable: Any, value: torch.Tensor) -> None:
        """A weight of the model is to have this value."""

    def is_result(self, value: Any) -> bool:
        """Whether a metric has returned this very value in the step."""
        return id(value) in self._results

    def name_of(self, variable: Any) -> str | None:
        """The name of a weight; None for any other variable."""
        return self._weights.get(id(variable._value))

    def _aside(self, call: Callable[..., Any], *args: Any) -> None:
        self._is_busy = True
        try:
            call(*args)
        finally:
            self._is_busy = False

    def _take_apply(self, optimizer: Any, grads: Any, trainable_variables: Any = None) -> None:
        if self._is_busy:
            _apply.plain(optimizer, grads, trainable_variables)
            return
        gradients = list(grads)
        variables = trainable_variables or optimizer._trainable_variables
        used = [
            (gradient, variable)
            for gradient, variable in zip(gradients, variables, strict=True)
            if gradient is not None
        ]
        if not used:  # Keras says what it thinks of that
            _apply.plain(optimizer, gradients, trainable_variables)
            return
        if not optimizer.built:
            optimizer.build(list(variables))
        self._aside(self.apply, optimizer, *map(list, zip(*used, strict=True)))

    def _take_assign(self, variable: Any, value: torch.Tensor) -> None:
        name = self.name_of(variable)
        if self._is_busy or name is None:
            _assign.plain(variable, value)
        else:
            self._aside(self.assign, name, variable, value)

    @contextmanager
    def _metrics_taken(self) -> Iterator[None]:
        before = [dict(vars(metric)) for metric in self.metrics]
        for number, metric in enumerate(self.metrics):
            vars(metric).update(
                update_state=partial(self._take_update, number, metric.update_state),
                result=partial(self._take_result, metric.result),
            )
        try:
            yield
        finally:
            for metric, attributes in zip(self.metrics, before, strict=True):
                for name in ("update_state", "result"):
                    vars(metric).pop(name)
                    if name in attributes:
                        vars(metric)[name] = attributes[name]

    def _take_update(
        self, number: int, plain: Callable[..., Any], *args: Any, **named: Any
    ) -> None:
        if self._is_busy:
            plain(*args, **named)
        else:
            self._aside(self.update, number, args, named)

    def _take_result(self, plain: Callable[[], Any]) -> Any:
        value = plain()
        for one in [value, *(value.values() if isinstance(value, dict) else ())]:
            self._results[id(one)] = one  # kept, so that no other gets its number
        return value

    def plainly(self, number: int, args: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Update a metric itself."""
        with torch.no_grad():
            self.metrics[number].update_state(*args, **named)


def metrics_of(model: Any) -> list[Any]:
    """The metrics that a model's steps may update, each once."""
    layers = [one for layer in model._flatten_layers() for one in layer._metrics]
    own = Trainer.metrics.fget(model)
    return list({id(one): one for one in (*own, *model.metrics, *layers)}.values())


def detached(value: Any) -> Any:
    """A value that may be sent to another rank."""
    value = getattr(value, "value", value) if hasattr(value, "assign") else value
    return value.detach() if isinstance(value, torch.Tensor) else value
