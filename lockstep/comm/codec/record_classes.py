"""Classes of models' outputs, by name: dataclasses, named tuples, dicts of other kinds.

Bytes from another host may name a class, but nothing is imported or called for them. The class must
be found under its own name in a module that this process has loaded anyway, and be a mere record.
Instances are put together field by field: neither ``__init__`` nor ``__setattr__`` nor a property
of the class runs.
"""

import dataclasses
import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

_MADE_IN_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE

# Allowed factories of a defaultdict: no others are called for bytes.
_FACTORIES: tuple[type | None, ...] = (None, list, dict, set, tuple, int, float, str, bool)


def is_record(cls: type) -> bool:
    """Whether instances are no more than their items and attributes."""
    if issubclass(cls, tuple):
        return _is_named_tuple(cls) or _is_struct_sequence(cls)
    return issubclass(cls, dict) or (dataclasses.is_dataclass(cls) and _is_plain(cls))


def _is_named_tuple(cls: type) -> bool:
    has_fields = isinstance(getattr(cls, "_fields", None), tuple)
    return issubclass(cls, tuple) and has_fields and not _is_struct_sequence(cls)


def _is_struct_sequence(cls: type) -> bool:
    """Whether it is like torch's result of ``max(dim)``: a tuple with names, made in C."""
    made_in_c = isinstance(cls.__new__, types.BuiltinMethodType)
    return issubclass(cls, tuple) and hasattr(cls, "n_sequence_fields") and made_in_c


def _is_plain(cls: type) -> bool:
    """Whether no base is made in C, which would need its own constructor."""
    return all(base is object or base.__flags__ & _MADE_IN_PYTHON for base in cls.__mro__)


def is_hashed_as_tuple(cls: type) -> bool:
    """Whether a record can be a key without a call of its class's code."""
    used: tuple[object, object] = (cls.__hash__, cls.__eq__)
    return used == (tuple.__hash__, tuple.__eq__)


def can_be_found(cls: type) -> bool:
    """Whether it is a record class, and the one that ``find`` returns for its module and name."""
    return is_record(cls) and _look_up(cls.__module__, cls.__qualname__) is cls


def find(module: str, name: str) -> type | None:
    """The record class of a name; None if there is none."""
    found = _look_up(module, name)
    return found if isinstance(found, type) and is_record(found) else None


def _look_up(module: str, name: str) -> object:
    """Reads namespaces only: a module's or class's ``__getattr__`` might import, or do anything."""
    found: object = sys.modules.get(module)
    for part in name.split("."):
        namespace = found.__dict__ if isinstance(found, types.ModuleType | type) else {}
        found = namespace.get(part)
    return found


def take_apart(record: Any) -> tuple[Any, dict[str, Any]]:
    """Items and attributes; see ``put_together``.

    Raises:
        TypeError: it holds a value that cannot be named.
    """
    return _items(record), _attributes(record)


def _items(record: Any) -> Any:
    if isinstance(record, tuple):
        return list(record)
    if isinstance(record, defaultdict):
        if record.default_factory not in _FACTORIES:
            raise TypeError(f"the default_factory {record.default_factory!r}")
        return [_FACTORIES.index(record.default_factory), list(dict.items(record))]
    if isinstance(record, dict):
        return list(_dict_base(type(record)).items(record))
    return None


def _attributes(record: Any) -> dict[str, Any]:
    found = dict(getattr(record, "__dict__", {}))
    for name, slot in _slots(type(record)).items():
        try:
            found[name] = slot.__get__(record)
        except AttributeError:  # not set
            continue
    return found


def _slots(cls: type) -> dict[str, types.MemberDescriptorType]:
    return {
        name: value
        for base in reversed(cls.__mro__)
        if "__slots__" in vars(base)
        for name, value in vars(base).items()
        if isinstance(value, types.MemberDescriptorType)
    }


def put_together(cls: type, items: Any, attributes: Mapping[str, Any]) -> Any:
    """An instance of a record class.

    Raises:
        TypeError, ValueError, AttributeError, IndexError: the parts are not those of the class.
    """
    record = _with_items(cls, items)
    slots = _slots(cls)
    for name, value in attributes.items():
        if name in slots:
            slots[name].__set__(record, value)
        else:
            record.__dict__[name] = value
    return record


def _with_items(cls: type, items: Any) -> Any:
    if _is_named_tuple(cls):
        if len(items) != len(cls._fields):  # type: ignore[attr-defined]
            raise ValueError(f"{len(items)} fields of a {cls.__name__}")
        return tuple.__new__(cls, items)
    if issubclass(cls, tuple):
        return cls(items)  # a struct sequence, made in C
    if issubclass(cls, dict):
        return _with_pairs(cls, items)
    return object.__new__(cls)


def _with_pairs(cls: type[dict[Any, Any]], items: Any) -> Any:
    base = _dict_base(cls)
    record = base.__new__(cls)
    pairs: Iterable[tuple[Any, Any]] = items
    if issubclass(cls, defaultdict):
        number, pairs = items
        record.default_factory = _FACTORIES[number]
    for key, value in pairs:
        base.__setitem__(record, key, value)
    return record


def _dict_base(cls: type) -> Any:
    """The kind of dict whose methods see the items unchanged, even if the class overrides them."""
    return next(base for base in (OrderedDict, defaultdict, dict) if issubclass(cls, base))
