"""Sights: a compiled model as it is at one moment, to see whether a later call finds it the same.

A small call takes no longer than finding out anew what is known of a model. So it is looked at once
per call, and what was found out, made and sent before holds for as long as it looks the same. That
can be told of models of Keras's own layers, losses, metrics and optimizers, whose attributes are
known, and of functions that hold no tensors. Of any other there is no sight.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import keras
import numpy as np
import torch

from lockstep.frontends.keras.layers.attributes import (
    Attributes,
    attributes_of,
    is_foreign,
    is_known,
    is_own,
)
from lockstep.frontends.keras.layers.pickling import reduce
from lockstep.frontends.keras.model import KerasModel
from lockstep.frontends.keras.settings import KerasSettings
from lockstep.parallel.transfer.serialization import describe, has_tensors, reducing


@dataclass(frozen=True)
class ModelFingerprint:
    """What is to be seen of a model, its losses, metrics and optimizer.

    Attributes:
        attributes: theirs.
        functions: the user's own that they call, as they would be sent.
        trained: of each parameter, whether it is.
        settings: Keras's.
    """

    attributes: Attributes
    functions: bytes
    trained: tuple[bool, ...]
    settings: KerasSettings


class CompiledModelFingerprinter:
    """Looks at a model whenever a call begins.

    Args:
        module: the model.
    """

    def __init__(self, module: KerasModel) -> None:
        self._module = module
        self._last: ModelFingerprint | None = None
        self._says_all = False

    def take(self) -> ModelFingerprint | None:
        """The model as it is now: the very same sight for as long as nothing has changed.

        None where a sight does not say all of it.
        """
        module, model = self._module, self._module.model
        compiled = _compiled_parts(model)
        attributes = Attributes(model, *compiled)
        functions = list(filter(_is_function_of_user, attributes.values()))
        now = ModelFingerprint(
            attributes=attributes,
            functions=_described(functions),
            trained=tuple(one.requires_grad for one in module.parameters()),
            settings=KerasSettings.current(),
        )
        if now != self._last:
            self._last = now
            self._says_all = _says_all(model, compiled, functions)
        return self._last if self._says_all else None


def _compiled_parts(model: Any) -> list[Any]:
    """What ``compile`` was given and has made of it: objects with attributes."""
    if not model.compiled:
        return []
    metrics, optimizer = model._compile_metrics, model.optimizer
    found = [*_losses(model), metrics, optimizer, getattr(optimizer, "_learning_rate", None)]
    found += [] if metrics is None else metrics.metrics
    found += [one for layer in model._flatten_layers() for one in layer._metrics]
    return [one for one in found if not isinstance(one, keras.Variable | None)]


def _losses(model: Any) -> list[Any]:
    losses = model._compile_loss
    return [] if losses is None else [losses, *(one.loss for one in losses._flat_losses or ())]


def _described(functions: list[Any]) -> bytes:
    if not functions:
        return b""
    with reducing(reduce):
        return describe(functions)


def _says_all(model: Any, compiled: list[Any], functions: list[Any]) -> bool:
    """Whether what a sight compares is all there is, and no values that can change in place."""
    with reducing(reduce):
        if has_tensors(functions):
            return False
    return (
        Attributes.are_enough(model)
        and all(map(is_own, compiled))
        and all(is_known(one) or _is_function_of_user(one) for one in _held_by(compiled))
        and not any(map(_is_array, _held_by([*model._flatten_layers(), *compiled])))
        and not any(isinstance(one, keras.Variable) for one in _held_by(_losses(model)))
    )


def _held_by(objects: Iterable[Any]) -> Iterator[Any]:
    """What objects have for attributes, or in lists and dicts of these."""
    for one in objects:
        yield from _leaves(attributes_of(one).values())


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, Mapping):
            yield from _leaves(value.values())
        elif isinstance(value, list | tuple):
            yield from _leaves(value)
        else:
            yield value


def _is_function_of_user(value: object) -> bool:
    return isinstance(value, FunctionType) and is_foreign(value)


def _is_array(value: object) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray)
