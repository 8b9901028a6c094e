"""Canonical names: those of the user's own model, whatever a library has wrapped around it."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lockstep.proof.recording.keras_variables import fixed_variables

# What wrappers put into the names of parameters and modules.
_WRAPPERS = (
    "_forward_module",
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "_flat_param_wrapped_module",
)
# Classes whose child ``module`` is the user's; others may have a child of that name themselves.
_WRAPPER_CLASSES = ("DistributedDataParallel", "DataParallel", "DeepSpeedEngine", "_FabricModule")


class Names:
    """The canonical names of a model's modules, parameters and buffers."""

    def __init__(self, model: nn.Module) -> None:
        self._known: dict[str, str] = {}
        self._added = {
            f"{name}.module".removeprefix(".")
            for name, module in model.named_modules()
            if type(module).__name__ in _WRAPPER_CLASSES
        }

    def __call__(self, name: str) -> str:
        """The name without the parts that wrappers have added."""
        found = self._known.get(name)
        if found is None:
            found = self._known[name] = self._find(name)
        return found

    def _find(self, name: str) -> str:
        parts = name.split(".")
        return ".".join(
            part
            for index, part in enumerate(parts)
            if part not in _WRAPPERS and ".".join(parts[: index + 1]) not in self._added
        )


def unwrapped(model: Any) -> nn.Module:
    """The user's own model, inside of DDP, of an engine, or of what torch.compile returns."""
    while (inner := _inner_of(model)) is not None:
        model = inner
    return model  # type: ignore[no-any-return]  # of a library without types


def _inner_of(model: Any) -> nn.Module | None:
    """What a wrapper has as its only child, or None."""
    for name in ("module", *_WRAPPERS):
        inner = getattr(model, "_modules", {}).get(name)
        is_only = isinstance(inner, nn.Module) and len(model._modules) == 1
        if is_only and not list(model.parameters(recurse=False)):
            return inner
    return None


def parameters_of(
    model: nn.Module, canonical: Names | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters with their canonical names; a shared one under its first."""
    keras_names = {id(each.value): each.path for each in getattr(model, "variables", ())}
    canonical = canonical or Names(model)
    fixed = {id(each.value) for each in fixed_variables(model)}
    for name, parameter in model.named_parameters():
        if id(parameter) in fixed:
            continue
        yield keras_names.get(id(parameter), canonical(name)), parameter


def buffers_of(model: Any, canonical: Names | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers with their canonical names; of Keras the variables that do not train."""
    canonical = canonical or Names(model)
    for name, buffer in model.named_buffers():
        yield canonical(name), buffer
    for variable in fixed_variables(model):
        yield variable.path, variable.value


def torch_optimizer(optimizer: Any) -> Any:
    """The optimizer of torch inside of Accelerate's, Lightning's or another wrapper."""
    while hasattr(inner := wrapped_by(optimizer), "step"):
        optimizer = inner
    return optimizer


def wrapped_by(optimizer: Any) -> Any:
    """What a wrapper around an optimizer steps; None if it is no wrapper."""
    own = getattr(optimizer, "__dict__", {})
    return own.get("optimizer", own.get("_optimizer"))
