"""What hosts compare before they work together, as texts by name.

Each host runs the user's script for itself. Where the scripts have come to different models, losses
or options, training would go on and be wrong without a word. So what decides the result is put into
words and compared; a name that differs is in the error.

Functions and classes are known by their names, and so are modules, but for torch's own, which also
tell their options (the rate of a Dropout). What the user's own classes hold is theirs: it may well
differ from host to host, as the number of the host does. Of data see ``train.same_data``.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import msgspec
import torch
from torch import nn, optim

from lockstep.data.trees import bits_of
from lockstep.plan.spec import Plan
from lockstep.train.assignment import Assignment

Facts = dict[str, object]


def assignment_facts(assignment: Assignment) -> Facts:
    """All that must be alike of an assignment, but for values."""
    loss, updater = assignment.loss, assignment.updater
    metrics = getattr(assignment.task, "metrics", None)
    return {
        **_plan_facts(assignment.plan),
        **_model_facts(assignment.model),
        "the loss": "none" if loss is None else said(loss.loss),
        "the factors of the loss": "none" if loss is None else loss.parts.factors,
        "the optimizer": "none" if updater is None else said(updater.owner),
        "batch_dim": str(assignment.dims),
        "the metrics": "none" if metrics is None else said(metrics.by_name),
        "train_step": said([each.function for each in assignment.functions]),
    }


def digest(tensors: Iterable[torch.Tensor]) -> bytes:
    """A fingerprint of values."""
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        if tensor.numel():
            found.update(bits_of(tensor).numpy())  # type: ignore[arg-type]  # a buffer
    return found.digest()


def said(thing: Any) -> str:
    """What something is, in words that are the same wherever a script makes the same."""
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


def _plan_facts(plan: Plan) -> Facts:
    return {f"the Plan's {name}": value for name, value in msgspec.to_builtins(plan).items()}


def _model_facts(model: nn.Module) -> Facts:
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {
        **{
            f"the tensor {name!r}": f"{tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}"
            for name, tensor in tensors
        },
        **{
            f"the layer {name!r}" if name else "the model": said_of_module("", module)
            for name, module in model.named_modules()
        },
    }


def said_of_module(name: str, module: nn.Module) -> str:
    """What a module is by itself: its class, and of torch's own the options that are plain."""
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
