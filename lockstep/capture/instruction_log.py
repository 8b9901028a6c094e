"""The log of a model's run: records of its instructions, and which record made which value.

Values are recognised by identity. All values in it stay alive, so that no other object gets the
id of one.
"""

import dataclasses
import enum
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from lockstep.capture.calls import LeafCall
from lockstep.capture.instructions import (
    CallFunction,
    GetAttribute,
    Instruction,
    Made,
    Ref,
    attributes_of,
    rebuild,
)
from lockstep.capture.sizes import TracedFloat, TracedInt, has_numbers

# Types that instructions hold unchanged.
_CONSTANTS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(...),
    range,
    enum.Enum,
    np.generic,
    np.ndarray,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    type,
)


class UntraceableError(Exception):
    """The forward pass does something that instructions cannot express.

    Attributes:
        place: file and line; empty if unknown.
    """

    place = ""

    def __str__(self) -> str:
        return super().__str__() + (f" ({self.place})" if self.place else "")


class DataError(UntraceableError):
    """Its Python code looks at values, which differ in the next batch."""


@dataclasses.dataclass(kw_only=True)
class Record:
    """One instruction as recorded.

    Attributes:
        instruction: with references to other records.
        scope: path of the module whose forward ran it.
        inside: see ``InstructionLog``.
        value: its result on the example.
        removable: it has no effect if its value is not used.
        draws: it draws random numbers.
    """

    instruction: Instruction
    scope: str
    inside: str
    value: Any
    removable: bool = False
    draws: bool = False


class InstructionLog:
    """The records of one model.

    Args:
        model: the model.
        calculator: notes calculations with sizes.

    Attributes:
        records: so far.
        scope: path of the module whose forward is running.
        inside: for messages, the module that runs in there and has no path: a front end's layer;
            empty if there is none.
    """

    def __init__(self, model: nn.Module, calculator: Any) -> None:
        self.records: list[Record] = []
        self.scope = ""
        self.inside = ""
        self._calculator = calculator
        self._modules = {id(module): name for name, module in model.named_modules()}
        self._attributes = _tensor_attributes(model)
        self._values: dict[int, int] = {}  # by id of a value: its record
        self._fetched: dict[str, int] = {}  # by path of an attribute: its record
        self._open: set[int] = set()  # ids of the objects that are being visited

    def add(
        self, instruction: Instruction, value: Any, *, removable: bool = False, draws: bool = False
    ) -> Any:
        """Append an instruction; returns its value in the form that the model gets."""
        return self._adopt(value, self._append(instruction, value, removable, draws))

    def _append(
        self, instruction: Instruction, value: Any, removable: bool = True, draws: bool = False
    ) -> int:
        self.records.append(
            Record(
                instruction=instruction,
                scope=self.scope,
                inside=self.inside,
                value=value,
                removable=removable,
                draws=draws,
            )
        )
        return len(self.records) - 1

    def ask_device(self, device: torch.device) -> torch.device:
        """Note a read of the device from the newest value on it, if any; returns the device."""
        for number in reversed(range(len(self.records))):
            record = self.records[number]
            is_made = not isinstance(record.instruction, GetAttribute)
            if is_made and isinstance(record.value, torch.Tensor) and record.value.device == device:
                asked = CallFunction(target=getattr, args=(Ref(number), "device"))
                self.add(asked, device, removable=True)
                break
        return device

    def _adopt(self, value: Any, number: int) -> Any:
        """Register a value as that of a record, and its parts as taken from it."""
        if isinstance(value, bool) or value is None:
            return value
        if isinstance(value, int | float):
            return (TracedInt if isinstance(value, int) else TracedFloat)(
                value, self._calculator, number
            )
        if isinstance(value, torch.Tensor | torch.device):
            self._values[id(value)] = number
            return value
        if isinstance(value, _CONSTANTS):
            return value
        if isinstance(value, dict):
            for key, part in value.items():
                self._take(operator.getitem, number, key, part)
            return value
        if isinstance(value, tuple | list):
            return self._adopt_sequence(value, number)
        if dataclasses.is_dataclass(value):
            for one in dataclasses.fields(value):
                if hasattr(value, one.name):
                    self._take(getattr, number, one.name, getattr(value, one.name))
        self._values[id(value)] = number
        return value

    def _adopt_sequence(self, value: Any, number: int) -> Any:
        parts = [
            self._take(operator.getitem, number, place, part) for place, part in enumerate(value)
        ]
        if type(value) in (tuple, list, torch.Size) and has_numbers(value):
            value = type(value)(parts)
            self.records[number].value = value
        if isinstance(value, tuple) and value:  # lists may change, and there is only one ()
            self._values[id(value)] = number
        return value

    def _take(self, function: Callable[..., Any], number: int, key: Any, part: Any) -> Any:
        """Get one part of a record's value."""
        if isinstance(part, _CONSTANTS) and not has_numbers(part):
            return part
        instruction = CallFunction(target=function, args=(Ref(number), key))
        return self.add(instruction, part, removable=True)

    def argument(self, value: Any) -> Any:
        """A value in the form for instructions: references in place of other records' values.

        Raises:
            UntraceableError: it cannot be in an instruction.
        """
        if isinstance(value, TracedInt | TracedFloat):
            return Ref(value.number)
        if id(value) in self._values:
            return Ref(self._values[id(value)])
        if isinstance(value, _CONSTANTS):
            return value
        path = self.path_of(value)
        if path is not None:
            return Ref(self._fetch(path, value))
        if isinstance(value, torch.Tensor):
            raise UntraceableError(
                "uses a tensor that is no input, parameter, buffer or attribute, nor made of these"
            )
        make = getattr(type(value), "_make", None)
        if isinstance(value, tuple) and make is not None:  # its contents may have to be tensors
            parts = [self.argument(part) for part in value]
            number = self._append(CallFunction(target=make, args=(parts,)), value)
            self._values[id(value)] = number
            return Ref(number)
        attributes = attributes_of(value)
        copied = rebuild(self.argument, value) if attributes is None else self._made(value)
        if copied is value and value != ():
            raise UntraceableError(f"passes on a {type(value).__name__}")
        return copied

    def _made(self, value: Any) -> Made:
        if id(value) in self._open:
            raise UntraceableError(f"passes on a {type(value).__name__} that holds itself")
        self._open.add(id(value))
        try:
            return Made(type(value), self.argument(vars(value)))
        finally:
            self._open.remove(id(value))

    def path_of(self, value: Any) -> str | None:
        """The path of a tensor or module in the model, if it is there."""
        if isinstance(value, torch.Tensor):
            return self._attributes.get(id(value))
        return self._modules.get(id(value)) if isinstance(value, nn.Module) else None

    def check_own(self, leaf: LeafCall, used: set[int]) -> None:
        """Check that a layer uses no tensors of others beside its arguments: they may be elsewhere.

        Raises:
            UntraceableError: it does.
        """
        inside = f"{leaf.path}." if leaf.path else ""
        paths = sorted(self._attributes.get(one, inside) for one in used - leaf.own)
        others = [path for path in paths if not path.startswith(inside)]
        if others:
            raise UntraceableError(f"calls {leaf.path!r}, which uses {others[0]!r}")

    def _fetch(self, path: str, value: Any) -> int:
        if path not in self._fetched:
            self._fetched[path] = self._append(GetAttribute(target=path), value)
        return self._fetched[path]


def _tensor_attributes(model: nn.Module) -> dict[int, str]:
    """Paths of a model's tensors by id, each under its first name."""
    found: dict[int, str] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                found.setdefault(id(value), f"{name}.{key}" if name else key)
    for name, value in (*model.named_buffers(), *model.named_parameters()):
        found[id(value)] = name
    return found
