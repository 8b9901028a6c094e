"""Fingerprints of a compiled model, to find whether it is unchanged since an earlier call.

Analysing a model takes as long as a small call. So a fingerprint is taken once per call, and
results of the last analysis hold for as long as it is equal. There are fingerprints of models with
Keras's own layers, losses, metrics and optimizers, whose attributes are known, and with functions
that hold no tensors. Other models have none.
"""

from collections.abc import Iterable
from types import FunctionType
from typing import Any, NamedTuple

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


class ModelFingerprint(NamedTuple):
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
        model = self._module.model
        compiled = _compiled_parts(model)
        attributes = Attributes(model, *compiled)
        functions = list(filter(_is_function_of_user, attributes.values()))
        with reducing(reduce):
            now = ModelFingerprint(
                attributes=attributes,
                functions=describe(functions) if functions else b"",
                trained=tuple(one.requires_grad for one in self._module.parameters()),
                settings=KerasSettings.current(),
            )
            if now != self._last:
                self._last = now
                self._is_complete = not has_tensors(functions) and _is_complete(model, compiled)
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


def _is_complete(model: Any, compiled: list[Any]) -> bool:
    """Whether attributes show everything, and nothing that can change in place."""
    own, of_layers, of_losses = map(_leaves, (compiled, model._flatten_layers(), _losses(model)))
    return (
        Attributes.are_enough(model)
        and all(map(is_keras_own, compiled))
        and all(is_plain(one) or _is_function_of_user(one) for one in own)
        and not any(isinstance(one, torch.Tensor | np.ndarray) for one in [*own, *of_layers])
        and not any(isinstance(one, keras.Variable) for one in of_losses)
    )


def _leaves(objects: Iterable[Any]) -> list[Any]:
    """The attributes of objects, and the items of lists and dicts among them."""
    found: list[Any] = keras.tree.flatten([list(attributes_of(one).values()) for one in objects])
    return found


def _is_function_of_user(value: object) -> bool:
    return isinstance(value, FunctionType) and is_user_defined(value)
