"""Packs objects for helpers, and names the part that cannot be sent.

Pickle's errors hardly tell where in a large object it failed. So after an error the parts are
packed one by one, then the parts of the part that fails, down to the innermost.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from lockstep.errors import LockstepError, ShippingError
from lockstep.parallel.transfer.serialization import SerializedObject, pack

_DEEPEST = 20


def pack_named(
    obj: Any, parts: Mapping[str, Any], parameters: Sequence[torch.Tensor]
) -> SerializedObject:
    """Pack an object; see ``parcel.pack``.

    Args:
        obj: the object.
        parts: its parts by the names a user knows ("the model"), to search when packing fails.
        parameters: Parameters that the receiver has already.

    Raises:
        ShippingError: with the name of the innermost part that cannot be sent.
    """
    try:
        return pack(obj, parameters)
    except LockstepError:
        raise
    except Exception as error:
        culprit, reason = _find_culprit(parts, parameters, error)
        raise ShippingError(
            f"{culprit} cannot be sent to a helper process.",
            received=f"{type(reason).__name__}: {reason}",
            fix="Create it where it is used (in forward, __getitem__, ...), or remove it from the "
            "objects that training needs.",
        ) from error


def _find_culprit(
    parts: Mapping[str, Any], parameters: Sequence[torch.Tensor], error: Exception
) -> tuple[str, Exception]:
    for label, part in parts.items():
        reason = _failure(part, parameters)
        if reason is not None:
            return _descend(label, part, parameters, reason)
    return "The training job", error


def _descend(
    label: str, part: Any, parameters: Sequence[torch.Tensor], reason: Exception
) -> tuple[str, Exception]:
    for _ in range(_DEEPEST):
        inner = _first_failing(part, parameters)
        if inner is None:
            break
        name, part, reason = inner
        label = f"{name} of {label}"
    return f"{label[0].upper()}{label[1:]} ({type(part).__name__})", reason


def _first_failing(
    part: Any, parameters: Sequence[torch.Tensor]
) -> tuple[str, Any, Exception] | None:
    for name, value in _children(part):
        reason = _failure(value, parameters)
        if reason is not None:
            return name, value, reason
    return None


def _children(part: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(part, nn.Module):
        yield from part._modules.items()
    if isinstance(part, FunctionType):
        for name, value in _used_by(part):
            yield f"`{name}`", value
    elif isinstance(part, MethodType):
        yield "the object", part.__self__
    elif isinstance(part, partial):
        yield from (("the function", part.func), ("the arguments", [*part.args, part.keywords]))
    if isinstance(part, dict):
        for key, value in part.items():
            yield f"[{key!r}]", value
    elif isinstance(part, list | tuple):
        for index, value in enumerate(part):
            yield f"[{index}]", value
    elif hasattr(part, "__dict__") and not isinstance(part, type):
        for key, value in vars(part).items():
            if key not in ("_modules", "_parameters", "_buffers"):
                yield f"`{key}`", value
        for key, value in vars(type(part)).items():
            if isinstance(value, FunctionType):
                yield f"`{key}`", value


def _used_by(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The variables of enclosing scopes and the globals that a function uses."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # it has no value yet
            yield name, cell.cell_contents
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _failure(part: Any, parameters: Sequence[torch.Tensor]) -> Exception | None:
    try:
        pack(part, parameters).close()
    except Exception as error:
        return error
    return None
