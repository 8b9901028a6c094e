"""The attributes of a model's layers, compared to find whether a callback has changed any.

Pickling a model describes it completely, but takes milliseconds. The attributes of Keras's own
layers are known to be complete, so they are compared one by one.
"""

import functools
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

import keras
import torch
from keras.src.layers.layer import Layer
from keras.src.saving.keras_saveable import KerasSaveable

from lockstep.frontends.keras.layers.pickling import COMPILED, omitted_attributes, reduce
from lockstep.frontends.keras.model import KerasModel
from lockstep.parallel.transfer.serialization import describe_values, reducing

_PLAIN = (bool, int, float, str, bytes, type(None))
# Helpers of a layer that have options of their own.
_WITH_OPTIONS = (keras.Regularizer, keras.constraints.Constraint, keras.initializers.Initializer)

# Attributes that calls set, and Keras's views of variables for torch.
_OF_CALLS = ("training", "_torch_params", "_inbound_nodes", "_outbound_nodes")
# Attributes that Keras itself keeps in every layer or model; none is a setting.
NO_SETTINGS = frozenset((*vars(Layer()), *COMPILED))

_Objects = list[tuple[str, Any]]


class Attributes:
    """The attributes at one moment; equal to those at another if none has changed.

    Args:
        model: a model for which ``are_enough`` holds.
        others: further objects, such as an optimizer.
    """

    def __init__(self, model: Any, *others: Any) -> None:
        objects = (*model._flatten_layers(), *model.variables, *others)
        self._entries = [each for one in objects for each in _entries_of(one)]

    @staticmethod
    def are_enough(model: Any, *others: Any) -> bool:
        """Whether all layers, and the objects with their options, are Keras's own."""
        return all(
            is_keras_own(one) and all(map(is_plain, attributes_of(one).values()))
            for one in (*model._flatten_layers(), *model.variables, *others)
        )

    def values(self) -> Iterator[Any]:
        """All values, with the items of lists and dicts."""
        return (value for _, value in self._entries)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Attributes) or len(self._entries) != len(other._entries):
            return False
        return all(
            name == other_name and (value is other_value or _is_same(value, other_value))
            for (name, value), (other_name, other_value) in zip(
                self._entries, other._entries, strict=True
            )
        )

    __hash__ = None  # type: ignore[assignment]  # values of any type


def described(module: KerasModel) -> object:
    """A description of a model without its weights, to compare with a later one."""
    if Attributes.are_enough(module.model):
        return Attributes(module.model)
    with reducing(reduce):
        return describe_values(module, [*module.parameters(), *module.buffers()])


def objects_with_settings(model: Any) -> dict[str, object]:
    """Objects with numbers, flags and text for settings, by name: layers, regularizers, losses."""
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


def user_defined_parts(model: Any) -> list[Any]:
    """The user's losses, learning rates and functions that a step calls: they may use anything."""
    found = [*keras.tree.flatten(model.loss), model.optimizer._learning_rate]
    if model._compile_loss is not None:
        weights = keras.tree.flatten(model._compile_loss._user_loss_weights)
        found += [one.value for one in weights if isinstance(one, keras.Variable)]
    for layer in model._flatten_layers():
        found += [value for value in vars(layer).values() if isinstance(value, FunctionType)]
    return [one for one in found if is_user_defined(one)]


def is_user_defined(value: Any) -> bool:
    """Whether a value is the user's, and may use anything."""
    if isinstance(value, FunctionType):
        return not str(value.__module__).startswith("keras.src.")
    return not (isinstance(value, str | keras.Variable | None) or is_keras_own(value))


def _entries_of(obj: Any) -> _Objects:
    entries: _Objects = [("", obj)]
    for name, value in attributes_of(obj).items():
        if isinstance(value, _WITH_OPTIONS):
            entries += [("", value), *vars(value).items()]
        elif isinstance(value, Mapping):
            items = [(str(key), one) for key, one in value.items() if key not in _OF_CALLS]
            entries += [(name, value), *items]
        elif isinstance(value, list | tuple):
            entries += [(name, value), *(("", one) for one in value)]
        else:
            entries.append((name, value))
    return entries


def attributes_of(obj: Any) -> dict[str, Any]:
    """All attributes, without those of a layer that helpers do not get, or make again."""
    own: dict[str, Any] = vars(obj)
    if not isinstance(obj, KerasSaveable):
        return own
    left = omitted_attributes(obj)
    return {
        name: value for name, value in own.items() if name not in left and name not in _OF_CALLS
    }


def _is_same(value: Any, other: Any) -> bool:
    """Whether plain values are equal, or others the same object."""
    if isinstance(value, _PLAIN):
        return type(value) is type(other) and bool(value == other)
    return value is other


def is_keras_own(obj: Any) -> bool:
    """Whether the object's class is Keras's own."""
    return type(obj).__module__.startswith("keras.src.")


def is_plain(value: Any) -> bool:
    """Whether comparing a value itself is enough: others have attributes of their own."""
    if isinstance(value, _WITH_OPTIONS):
        return is_keras_own(value) and all(isinstance(one, _PLAIN) for one in vars(value).values())
    if isinstance(value, Mapping | list | tuple):
        return all(map(is_plain, value.values() if isinstance(value, Mapping) else value))
    if isinstance(value, FunctionType):  # a user's may use anything
        return not is_user_defined(value)
    if isinstance(value, functools.partial):
        return all(map(is_plain, (value.func, value.args, value.keywords)))
    if isinstance(value, MethodType):
        return isinstance(value.__self__, KerasSaveable)
    if isinstance(value, KerasSaveable | torch.Tensor) or not hasattr(value, "__dict__"):
        return True
    if isinstance(value, torch.nn.Module):
        return isinstance(value, torch.nn.ParameterDict)
    return type(value).__module__.startswith(("keras.src.", "torch.", "inspect", "builtins"))
