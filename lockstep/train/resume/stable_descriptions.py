"""Descriptions of objects, and digests of values, that are equal in every process of a script.

Functions and classes are described by their names, and so are modules; torch's own modules also by
their options (the rate of a Dropout).
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn, optim

from lockstep.data.trees import bits_of

Facts = dict[str, object]


def digest(tensors: Iterable[torch.Tensor]) -> bytes:
    """A fingerprint of values."""
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        if tensor.numel():
            found.update(bits_of(tensor).numpy())  # type: ignore[arg-type]  # a buffer
    return found.digest()


def said(thing: Any) -> str:
    """A description of an object that is equal in every process of a script."""
    if isinstance(thing, nn.Module):
        return ", ".join(said_of_module(*each) for each in thing.named_modules())
    if isinstance(thing, optim.Optimizer):
        sizes = [str(len(group["params"])) for group in thing.param_groups]
        return f"{_name(type(thing))} of {' and '.join(sizes)} tensors"  # its values are host 0's
    if isinstance(thing, partial):
        return f"{said(thing.func)} with {said(thing.args)} {said(thing.keywords)}"
    if isinstance(thing, Mapping):
        return str({str(key): said(value) for key, value in thing.items()})
    if isinstance(thing, list | tuple):
        return str([said(each) for each in thing])
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return f"{_name(type(thing))} {said(vars(thing))}"
    if thing is None or isinstance(thing, bool | int | float | str):
        return repr(thing)
    return _name(thing) if hasattr(thing, "__qualname__") else _name(type(thing))


def said_of_module(name: str, module: nn.Module) -> str:
    """A description of a module: its class, and for torch's own its plain options."""
    options = ""
    if type(module).__module__.startswith("torch.nn."):
        plain = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str) and key != "training"
        }
        options = f" {plain}"
    return f"{name} {_name(type(module))}{options}".strip()


def _name(thing: Any) -> str:
    return str(thing.__qualname__)
