"""Fingerprints of a compiled model, to find whether it is unchanged since an earlier call.

Analysing a model takes as long as a small call. So a fingerprint is taken once per call, and
results of the last analysis hold for as long as it is equal. There are fingerprints of models with
Keras's own layers, losses, metrics and optimizers, whose attributes are known, and with functions
that hold no tensors. Other models have none.
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
    is_keras_own,
    is_plain,
    is_user_defined,
)
from lockstep.frontends.keras.layers.dry_run import metrics_of_layers
from lockstep.frontends.keras.layers.pickling import reduce
from lockstep.frontends.keras.model import KerasModel
from lockstep.frontends.keras.settings import KerasSettings
from lockstep.parallel.transfer.serialization import describe, has_tensors, reducing


@dataclass(frozen=True)
class ModelFingerprint:
    """The state of a model, its losses, metrics and optimizer, without weights.

    Attributes:
        attributes: of all their objects.
        functions: the user's functions that they call, pickled.
        trained: for each parameter, True if it is trained.
        settings: Keras's.
    """

    attributes: Attributes
    functions: bytes
    trained: tuple[bool, ...]
    settings: KerasSettings


class CompiledModelFingerprinter:
    """Takes fingerprints of a model.

    Args:
        module: the model.
    """

    def __init__(self, module: KerasModel) -> None:
        self._module = module
        self._last: ModelFingerprint | None = None
        self._is_complete = False

    def take(self) -> ModelFingerprint | None:
        """The model's fingerprint: the same object for as long as nothing has changed.

        None if a fingerprint would not be complete.
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
            self._is_complete = _is_complete(model, compiled, functions)
        return self._last if self._is_complete else None


def _compiled_parts(model: Any) -> list[Any]:
    """Objects that ``compile`` was given or made."""
    if not model.compiled:
        return []
    metrics, optimizer = model._compile_metrics, model.optimizer
    found = [*_losses(model), metrics, optimizer, getattr(optimizer, "_learning_rate", None)]
    found += [] if metrics is None else metrics.metrics
    found += metrics_of_layers(model)
    return [one for one in found if not isinstance(one, keras.Variable | None)]


def _losses(model: Any) -> list[Any]:
    losses = model._compile_loss
    return [] if losses is None else [losses, *(one.loss for one in losses._flat_losses or ())]


def _described(functions: list[Any]) -> bytes:
    if not functions:
        return b""
    with reducing(reduce):
        return describe(functions)


def _is_complete(model: Any, compiled: list[Any], functions: list[Any]) -> bool:
    """Whether a fingerprint compares everything, and nothing that can change in place."""
    with reducing(reduce):
        if has_tensors(functions):
            return False
    return (
        Attributes.are_enough(model)
        and all(map(is_keras_own, compiled))
        and all(is_plain(one) or _is_function_of_user(one) for one in _attribute_values(compiled))
        and not any(map(_is_array, _attribute_values([*model._flatten_layers(), *compiled])))
        and not any(isinstance(one, keras.Variable) for one in _attribute_values(_losses(model)))
    )


def _attribute_values(objects: Iterable[Any]) -> Iterator[Any]:
    """The attributes of objects, and the items of lists and dicts among them."""
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
    return isinstance(value, FunctionType) and is_user_defined(value)


def _is_array(value: object) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray)
