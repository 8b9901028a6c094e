"""The facts on which the result of a ``fit`` depends, by name, as plain values for a checkpoint.

They are compared between the script that made a checkpoint and the one that resumes from it
(``train.resume.differences``). They are taken before the first step of a ``fit``: later changes by
schedules and callbacks are a part of the training's state, not a difference of the scripts.
"""

import hashlib
import inspect
import math
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import nn, optim
from torch.optim.lr_scheduler import LRScheduler

from lockstep.train.optim.learning_rates import RunningSchedule
from lockstep.train.optim.optimizer_state import option_values
from lockstep.train.optim.optimizers import Optimizers
from lockstep.train.resume.stable_descriptions import digest, said, said_of_module

Facts = dict[str, Any]

# A scheduler's position, and rates that are already among the optimizer's options.
_POSITION = ("optimizer", "base_lrs", "last_epoch", "_last_lr", "_step_count")
# Attributes of torch's schedulers that are composed of others.
_PARTS = ("_schedulers", "_milestones")
# Options that change rounding only.
_KERNELS = ("foreach", "fused", "capturable", "differentiable")
_NUM_DIGITS = 8
_LIBRARIES = ("torch", "keras", "builtins", "functools")


def plain(value: Any) -> Any:
    """The value if it is a JSON value, else a description."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else repr(float(value))
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        return f"tensor {tuple(value.shape)} {digest([value]).hex()[:_NUM_DIGITS]}"
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return plain(value.item()) if hasattr(value, "item") else said(value)


# --- optimizers and schedules --------------------------------------------------------------------


def named_options(optimizer: optim.Optimizer | Optimizers) -> Iterator[tuple[str, dict[str, Any]]]:
    """The parameter groups of an optimizer, or of several, each with a name."""
    several = optimizer.items() if isinstance(optimizer, Optimizers) else [("", optimizer)]
    for owner, each in several:
        name = f"optimizer[{owner!r}]" if owner else "optimizer"
        groups = each.param_groups
        for number, group in enumerate(groups):
            yield f"{name}.param_groups[{number}]" if len(groups) > 1 else name, group


def optimizer_facts(optimizer: optim.Optimizer | Optimizers, model: nn.Module) -> Facts:
    """The class of an optimizer, its options, and the parameters of each group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: Facts = {"optimizer": said(optimizer)}
    for group_name, group in named_options(optimizer):
        members = "\n".join(names.get(id(one), "?") for one in group["params"])
        number = hashlib.sha256(members.encode()).hexdigest()[:_NUM_DIGITS]
        found[f"{group_name}.params"] = f"{len(group['params'])} tensors ({number})"
        for option, value in option_values(group).items():
            if option not in _KERNELS:
                found[f"{group_name}.{option}"] = plain(value)
    return found


def schedule_facts(schedule: RunningSchedule | None) -> Facts:
    """The class of a schedule, and its settings."""
    if schedule is None:
        return {"schedule": None}
    return {
        "schedule": type(schedule.scheduler).__name__,
        "schedule.every": schedule.every,
        "schedule.monitor": schedule.given_monitor,
        **_settings_of(schedule.scheduler, "schedule"),
    }


def _settings_of(scheduler: LRScheduler, name: str) -> Facts:
    found: Facts = {}
    is_own = not type(scheduler).__module__.startswith("torch.")
    for key, value in vars(scheduler).items():
        if key in _POSITION or (key.startswith("_") and key not in _PARTS and not is_own):
            continue
        several = isinstance(value, list | tuple) and bool(value)
        for number, one in enumerate(value if several else [value]):
            one_name = f"{name}.{key}[{number}]" if several else f"{name}.{key}"
            if isinstance(one, LRScheduler):
                found[one_name] = type(one).__name__
                found.update(_settings_of(one, one_name))
            elif callable(one):
                found.update(described(one_name, one))
            else:
                found[one_name] = plain(one)
    return found


# --- losses and functions ------------------------------------------------------------------------


def described(name: str, thing: Any) -> Facts:
    """Facts about a loss or a function: its class or name, its attributes, and its code.

    Args:
        name: of the facts.
        thing: the loss or function.
    """
    found: Facts = {name: None if thing is None else said(thing)}
    values = {key: plain(value) for key, value in _values_of(thing)}
    if values:
        found[f"{name}.values"] = values
    if isinstance(thing, nn.Module):
        tensors = [*thing.parameters(), *thing.buffers()]
        found[f"{name}.tensors"] = digest(tensors).hex()[:_NUM_DIGITS] if tensors else None
    code = _code_of(thing)
    if code:
        # Other versions of Python compile the same source to other code.
        version = ".".join(map(str, sys.version_info[:2]))
        number = hashlib.sha256(repr(code).encode()).hexdigest()[:_NUM_DIGITS]
        found[f"{name}.code"] = f"python {version}: {number}"
    return found


def _functions_of(thing: Any) -> list[Any]:
    """The user's own Python functions that a loss or a function calls directly."""
    if isinstance(thing, partial):
        return _functions_of(thing.func)
    if isinstance(thing, Mapping | list | tuple):
        each = thing.values() if isinstance(thing, Mapping) else thing
        return [function for one in each for function in _functions_of(one)]
    if isinstance(thing, nn.Module):
        found = [type(module).forward for module in thing.modules()]
    elif inspect.isroutine(thing):
        found = [thing]
    else:
        found = [vars(type(thing)).get(name) for name in ("__call__", "call")]
    return [
        inspect.unwrap(one)
        for one in found
        if hasattr(inspect.unwrap(one), "__code__")
        and not str(getattr(one, "__module__", "")).startswith(_LIBRARIES)
    ]


def _values_of(thing: Any) -> Iterator[tuple[str, Any]]:
    """Plain values that the user's own functions and classes hold or read."""
    for function in _functions_of(thing):
        function = getattr(function, "__func__", function)
        names = function.__code__.co_names
        free = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        read = {name: function.__globals__.get(name) for name in names}
        read |= {name: cell.cell_contents for name, cell in free.items()}
        read |= dict(enumerate(function.__defaults__ or ())) | (function.__kwdefaults__ or {})
        yield from ((str(key), one) for key, one in read.items() if _is_plain(one))
    modules = thing.named_modules() if isinstance(thing, nn.Module) else [("", thing)]
    for name, module in modules:
        is_own = not type(module).__module__.startswith(_LIBRARIES)
        has_values = is_own and not inspect.isroutine(module)
        attributes = getattr(module, "__dict__", {}) if has_values else {}
        for key, value in attributes.items():
            if _is_plain(value) and not key.startswith("_") and key != "training":
                yield f"{name}.{key}".lstrip("."), value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, bool | int | float | str)


def _code_of(thing: Any) -> list[Any]:
    functions = (getattr(one, "__func__", one) for one in _functions_of(thing))
    return [_without_source(function.__code__) for function in functions]


def _without_source(code: CodeType) -> Any:
    """A function's code without the place of its source."""
    constants = [
        _without_source(one) if isinstance(one, CodeType) else repr(one)
        for one in code.co_consts
        if not isinstance(one, frozenset)  # its order varies
    ]
    return code.co_code.hex(), code.co_names, constants


# --- models --------------------------------------------------------------------------------------


def model_facts(model: nn.Module) -> Facts:
    """The options of torch's own layers that are not tensors: a dropout's rate, a padding."""
    return {
        f"layer {name!r}": said_of_module("", module)
        for name, module in model.named_modules()
        if name and type(module).__module__.startswith("torch.nn.")
    }
