"""Copies of a Keras optimizer that can be built for other variables."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import torch
from keras.src.utils.tracking import Tracker

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Slot:
    """The place of one of an optimizer's slot variables.

    Attributes:
        index: of the variable that it belongs to, among those that the optimizer was built for.
        name: of the slot, among the slots of that variable.
    """

    index: int
    name: str


def own_variables(optimizer: Any) -> list[Any]:
    """The step count, and the learning rate if it is a variable."""
    own = (optimizer._iterations, optimizer._learning_rate)
    return [one for one in own if isinstance(one, keras.Variable)]


def built_variables(optimizer: Any) -> list[Any]:
    """The variables that ``build`` made, in order: slots, and those that exist once."""
    own = {id(one) for one in own_variables(optimizer)}
    return [one for one in optimizer._variables if id(one) not in own]


def unbuilt(optimizer: Any) -> Any:
    """A copy that is not built, with the same step count and learning rate."""
    copied = object.__new__(type(optimizer))
    made = {id(one) for one in built_variables(optimizer)}
    contents = {
        name: value for name, value in vars(optimizer).items() if not _holds_any(value, made)
    }
    own = own_variables(optimizer)
    vars(copied).update(
        contents,
        _variables=own,
        _tracker=Tracker({"variables": (_is_variable, own)}),
        _trainable_variables=[],
        _trainable_variables_indices={},
        built=False,
    )
    return copied


def _is_variable(value: object) -> bool:
    return isinstance(value, keras.Variable)


def _holds_any(value: Any, ids: set[int]) -> bool:
    if isinstance(value, list | tuple):
        return any(id(one) in ids for one in value)
    return id(value) in ids


def built(template: Any, variables: Sequence[Any]) -> tuple[Any, list[Slot | None]]:
    """A built copy of an unbuilt optimizer, and the slot that each of its variables is.

    None is for variables that are no slot.
    """
    copied = unbuilt(template)
    numbers = {id(variable): number for number, variable in enumerate(variables)}
    found: dict[int, Slot] = {}
    make: Callable[..., Any] = copied.add_variable_from_reference

    def record(reference_variable: Any, name: str = "var", initializer: Any = "zeros") -> Any:
        made = make(reference_variable, name=name, initializer=initializer)
        found[id(made)] = Slot(numbers[id(reference_variable)], name)
        return made

    vars(copied)["add_variable_from_reference"] = record
    copied.build(list(variables))
    del vars(copied)["add_variable_from_reference"]
    found = {**listed_slots(copied, len(variables)), **found}
    return copied, [found.get(id(one)) for one in built_variables(copied)]


def listed_slots(optimizer: Any, num_variables: int) -> dict[int, Slot]:
    """Slots by id, found in attributes that are lists with one for each variable."""
    return {
        id(one): Slot(number, name)
        for name, value in vars(optimizer).items()
        if isinstance(value, list) and len(value) == num_variables
        for number, one in enumerate(value)
    }


def variable_like(variable: Any, value: torch.Tensor) -> Any:
    """A copy of a variable with another value, such as a piece of its own."""
    made = object.__new__(type(variable))
    vars(made).update(vars(variable), _value=value, _shape=tuple(value.shape))
    if tuple(value.shape) != tuple(variable.shape):
        vars(made).update(_constraint=None, _regularizer=None)
    return made


def options_of(optimizer: Any) -> dict[str, Any]:
    """The options of an optimizer: numbers, flags, the step count, the learning rate."""
    options = {name: value for name, value in vars(optimizer).items() if isinstance(value, _PLAIN)}
    options["iterations"] = int(optimizer._iterations.value)
    rate = optimizer._learning_rate
    if isinstance(rate, keras.Variable):
        options["learning_rate"] = float(rate.value)
    return options


def set_options(optimizer: Any, options: dict[str, Any]) -> None:
    """Set options that ``options_of`` returned for another copy."""
    plain = dict(options)
    rate = plain.pop("learning_rate", None)
    optimizer._iterations.assign(plain.pop("iterations"))
    vars(optimizer).update(plain)
    if rate is not None:
        optimizer._learning_rate.assign(rate)
