"""What the layers of a model have as attributes, to see whether a callback has changed any.

Describing a model by pickling it sees everything, and takes milliseconds. Of Keras's own layers it
is known where their attributes end, so there they are compared one by one.
"""

import functools
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

import keras
import torch
from keras.src.layers.layer import Layer
from keras.src.saving.keras_saveable import KerasSaveable

from lockstep.frontends.keras.layers.pickling import COMPILED, left_attributes, reduce
from lockstep.frontends.keras.model import KerasModel
from lockstep.parallel.transfer.serialization import describe_values, reducing

_PLAIN = (bool, int, float, str, bytes, type(None))
# Helpers of a layer that have options of their own.
_WITH_OPTIONS = (keras.Regularizer, keras.constraints.Constraint, keras.initializers.Initializer)

# What calls set, and what torch is shown of the variables.
_OF_CALLS = ("training", "_torch_params", "_inbound_nodes", "_outbound_nodes")
# What Keras itself keeps of any layer or model, and is no setting of it.
NO_SETTINGS = frozenset((*vars(Layer()), *COMPILED))

_Objects = list[tuple[str, Any]]


class Attributes:
    """The attributes at one moment; equal to those at another if none has changed.

    Args:
        model: a model for which ``are_enough`` holds.
        others: what else is looked at, such as an optimizer.
    """

    def __init__(self, model: Any, *others: Any) -> None:
        objects = (*model._flatten_layers(), *model.variables, *others)
        self._seen = [each for one in objects for each in _seen_of(one)]

    @staticmethod
    def are_enough(model: Any, *others: Any) -> bool:
        """Whether all layers, and all that these have options in, are Keras's own."""
        return all(
            is_own(one) and all(map(is_known, attributes_of(one).values()))
            for one in (*model._flatten_layers(), *model.variables, *others)
        )

    def values(self) -> Iterator[Any]:
        """All that was seen; of lists and dicts what they hold, too."""
        return (value for _, value in self._seen)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Attributes) or len(self._seen) != len(other._seen):
            return False
        return all(
            name == other_name and (value is other_value or _is_same(value, other_value))
            for (name, value), (other_name, other_value) in zip(
                self._seen, other._seen, strict=True
            )
        )

    __hash__ = None  # type: ignore[assignment]  # a list of what may be anything


def described(module: KerasModel) -> object:
    """All of a model but its weights, to be compared with what it is later."""
    if Attributes.are_enough(module.model):
        return Attributes(module.model)
    with reducing(reduce):
        return describe_values(module, [*module.parameters(), *module.buffers()])


def with_settings(model: Any) -> dict[str, object]:
    """What has numbers, flags and text for settings, by name: layers, regularizers, losses."""
    objects: dict[str, object] = {}
    for layer in model._flatten_layers():
        name = f"the layer {layer.path or layer.name!r}"
        objects[name] = layer
        for attribute, value in vars(layer).items():
            if isinstance(value, _WITH_OPTIONS):
                objects[f"{attribute} of {name}"] = value
    losses = keras.tree.flatten(model.loss)
    objects |= {f"loss {i}": one for i, one in enumerate(losses) if isinstance(one, keras.Loss)}
    return objects


def foreign_parts(model: Any) -> list[Any]:
    """Of what a step calls, what may look at anything: losses, rates, functions of the user's."""
    found = [*keras.tree.flatten(model.loss), model.optimizer._learning_rate]
    if model._compile_loss is not None:
        weights = keras.tree.flatten(model._compile_loss._user_loss_weights)
        found += [one.value for one in weights if isinstance(one, keras.Variable)]
    for layer in model._flatten_layers():
        found += [value for value in vars(layer).values() if isinstance(value, FunctionType)]
    return [one for one in found if is_foreign(one)]


def is_foreign(value: Any) -> bool:
    """Whether it is the user's, and may look at anything."""
    if isinstance(value, FunctionType):
        return not str(value.__module__).startswith("keras.src.")
    return not (isinstance(value, str | keras.Variable | None) or is_own(value))


def _seen_of(obj: Any) -> _Objects:
    seen: _Objects = [("", obj)]
    for name, value in attributes_of(obj).items():
        if isinstance(value, _WITH_OPTIONS):
            seen += [("", value), *vars(value).items()]
        elif isinstance(value, Mapping):
            held = [(str(key), one) for key, one in value.items() if key not in _OF_CALLS]
            seen += [(name, value), *held]
        elif isinstance(value, list | tuple):
            seen += [(name, value), *(("", one) for one in value)]
        else:
            seen.append((name, value))
    return seen


def attributes_of(obj: Any) -> dict[str, Any]:
    """All, but for those of a layer that helpers do not get, or get anew."""
    own: dict[str, Any] = vars(obj)
    if not isinstance(obj, KerasSaveable):
        return own
    left = left_attributes(obj)
    return {
        name: value for name, value in own.items() if name not in left and name not in _OF_CALLS
    }


def _is_same(value: Any, other: Any) -> bool:
    """Plain values by what they are, and all else by which object it is."""
    if isinstance(value, _PLAIN):
        return type(value) is type(other) and bool(value == other)
    return value is other


def is_own(obj: Any) -> bool:
    """Whether it is of a class of Keras's own."""
    return type(obj).__module__.startswith("keras.src.")


def is_known(value: Any) -> bool:
    """Whether a value ends where it is looked at: others have attributes of their own."""
    if isinstance(value, _WITH_OPTIONS):
        return is_own(value) and all(isinstance(one, _PLAIN) for one in vars(value).values())
    if isinstance(value, Mapping | list | tuple):
        return all(map(is_known, value.values() if isinstance(value, Mapping) else value))
    if isinstance(value, FunctionType):  # a user's may look at anything
        return not is_foreign(value)
    if isinstance(value, functools.partial):
        return all(map(is_known, (value.func, value.args, value.keywords)))
    if isinstance(value, MethodType):
        return isinstance(value.__self__, KerasSaveable)
    if isinstance(value, KerasSaveable | torch.Tensor) or not hasattr(value, "__dict__"):
        return True
    if isinstance(value, torch.nn.Module):
        return isinstance(value, torch.nn.ParameterDict)
    return type(value).__module__.startswith(("keras.src.", "torch.", "inspect", "builtins"))
