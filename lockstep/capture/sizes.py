"""Numbers that remember their origin: sizes of tensors, and results calculated with them.

They are ints and floats, so any code takes them. Calculations with them are noted, and so are
comparisons: their outcomes are fixed in the trace, and must be the same whenever it runs. ``range``
and ``int`` see plain numbers.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from lockstep.capture.instructions import rebuild


class _Traced:
    """A number that is the value of the record ``number``; a ``Recorder`` notes its use."""

    number: int
    calculator: Any

    def __new__(cls, value: Any, calculator: Any, number: int) -> Any:
        made = super().__new__(cls, value)  # type: ignore[call-arg]
        made.calculator = calculator
        made.number = number
        return made

    def __reduce__(self) -> Any:
        return _plain_number, (_plain_number(self),)

    def __hash__(self) -> int:
        return hash(_plain_number(self))


def _calculates(function: Callable[..., Any], *, reflected: bool = False) -> Callable[..., Any]:
    def method(self: Any, *others: Any) -> Any:
        args = (*others, self) if reflected else (self, *others)
        return self.calculator.compute(function, args)

    return method


def _compares(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, other: Any) -> Any:
        return self.calculator.compare(function, (self, other))

    return method


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(_Traced, f"__{_name}__", _compares(getattr(operator, _name)))
for _name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow"):
    _function = getattr(operator, _name)
    setattr(_Traced, f"__{_name}__", _calculates(_function))
    setattr(_Traced, f"__r{_name}__", _calculates(_function, reflected=True))
for _name, _function in (
    ("neg", operator.neg),
    ("abs", operator.abs),
    ("floor", math.floor),
    ("ceil", math.ceil),
    ("round", round),
):
    setattr(_Traced, f"__{_name}__", _calculates(_function))


class TracedInt(_Traced, int):
    """A size."""


class TracedFloat(_Traced, float):
    """A result calculated with sizes."""


def _plain_number(value: Any) -> Any:
    return int.__int__(value) if isinstance(value, int) else float.__float__(value)


def plain(tree: Any) -> Any:
    """The same arguments with plain numbers; the same containers if there are none to replace."""
    if isinstance(tree, TracedInt | TracedFloat):
        return _plain_number(tree)
    is_new = False

    def change(part: Any) -> Any:
        nonlocal is_new
        new = plain(part)
        is_new |= new is not part
        return new

    changed = rebuild(change, tree)
    if not is_new:
        return tree
    return torch.Size(changed) if isinstance(tree, torch.Size) else changed


def has_numbers(value: Any) -> bool:
    """Whether it has properties of a tensor that may differ elsewhere: sizes, the device."""
    if isinstance(value, tuple | list):
        return any(map(has_numbers, value))
    return isinstance(value, int | float | torch.device) and not isinstance(value, bool)
