"""Lists the layers of a PyTorch model: names, parameters, ties. Nothing is run or traced."""

import sys
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from lockstep.errors import ModelError, Problems
from lockstep.formatting import first_few
from lockstep.graph.layer_graph import Layer, LayerGraph, ParameterInfo


class FrontEndModel(nn.Module):
    """A model of a front end: its modules represent the front end's objects, which are called."""

    @property
    @abstractmethod
    def has_low_precision(self) -> bool:
        """Whether layers compute in half precision, even if their outputs are in float32."""

    @abstractmethod
    def outputs_in(self, made: Any) -> Any:
        """The outputs in its return value, without the losses that it returns with them."""

    @abstractmethod
    def held(self) -> Iterable[Any]:
        """The objects with attributes, beside its modules, that a call may change."""

    @abstractmethod
    def watching(self, note: Callable[[str, Any], None]) -> AbstractContextManager[None]:
        """Within the block, ``note`` gets each layer's name and what it returns, call by call."""

    @abstractmethod
    def functions(self) -> Iterable[Any]:
        """The current functions that the layers compute with; a script can replace them."""


# Attributes with dots, so that no layer or variable of a front end can have the same name.
_KIND, _NUM_FEATURES = "lockstep.kind", "lockstep.num_features"


class FrontEndLayer(nn.Module):
    """Represents a layer of a front end, and holds its parameters. It is not called itself.

    Args:
        kind: the layer's class name.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        vars(self)[_KIND] = kind


class BatchLayer(FrontEndLayer):
    """Represents a layer that normalises by the mean and variance of the batch.

    Args:
        kind: the layer's class name.
        num_features: number of means that it computes.
    """

    def __init__(self, kind: str, num_features: int) -> None:
        super().__init__(kind)
        vars(self)[_NUM_FEATURES] = num_features


def kind_of(module: nn.Module) -> str:
    """The name of a layer's kind."""
    kind: str = vars(module).get(_KIND, type(module).__name__)
    return kind


def num_features_of(layer: nn.Module) -> int:
    """How many means a layer that normalises by those of the batch computes."""
    found = vars(layer).get(_NUM_FEATURES)
    return int(layer.num_features if found is None else found)  # type: ignore[arg-type]


def functions_of(model: nn.Module) -> int:
    """A number that changes when a script replaces functions that the layers compute with."""
    functions = [id(one) for space in (torch, F, torch.Tensor) for one in vars(space).values()]
    if isinstance(model, FrontEndModel):
        functions += map(id, model.functions())
    forwards = (id(kind.forward) for kind in {type(module) for module in model.modules()})
    return hash((*functions, *forwards))


def capture_layers(model: nn.Module) -> LayerGraph:
    """The model's layers in the order of ``named_modules``.

    Parameters that are one object are listed wherever they occur and grouped in ``tied``.

    Raises:
        ModelError: see ``check_modules``.
    """
    check_modules(model)
    layers = []
    for name, module in model.named_modules():
        parameters = tuple(
            parameter_info(_join(name, key), parameter)
            for key, parameter in module._parameters.items()
            if parameter is not None
        )
        buffers = tuple(key for key, value in module._buffers.items() if value is not None)
        sees_batch = isinstance(module, _BatchNorm | BatchLayer)
        if not (parameters or buffers or sees_batch):
            continue
        layers.append(
            Layer(
                name=name,
                kind=kind_of(module),
                parameters=parameters,
                buffers=buffers,
                uses_batch_statistics=sees_batch,
            )
        )
    return LayerGraph(layers=tuple(layers), tied=ties_of(model))


def ties_of(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Groups of names that are one Parameter, in the model's order."""
    names_of: dict[int, list[str]] = defaultdict(list)
    for path, module in model.named_modules():  # a module that is used twice is there once
        for key, parameter in module._parameters.items():
            if parameter is not None:
                names_of[id(parameter)].append(_join(path, key))
    return tuple(tuple(names) for names in names_of.values() if len(names) > 1)


def check_modules(model: nn.Module) -> None:
    """Refuse lazy parameters, TorchScript, modules without autograd, and parallel wrappers.

    Raises:
        ModelError: with their names.
    """
    lazy, fixed, scripts, problems = [], [], [], Problems()
    dividers = _dividers()
    for path, module in model.named_modules():
        if isinstance(module, dividers):
            _note_divider(path, module, dividers, problems)
        if isinstance(module, torch.jit.ScriptModule):
            scripts.append(path or type(module).__name__)
            continue
        for key, value in chain(module._parameters.items(), module._buffers.items()):
            if is_lazy(value):
                lazy.append(_join(path, key))
            elif value is not None and value.is_inference():
                fixed.append(_join(path, key))
    if lazy:
        problems.add(
            "The shapes of all parameters must be known.",
            received=f"lazy parameters {', '.join(lazy)}",
            fix="Call the model once on a sample first.",
        )
    if scripts:
        problems.add(
            "Modules of TorchScript cannot be trained here: their buffers cannot be replaced.",
            received=first_few(scripts),
            fix="Pass the modules that they were scripted or traced from.",
        )
    if fixed:
        problems.add(
            "Tensors that are made under torch.inference_mode() can never be trained.",
            received=first_few(fixed),
            fix="Make the model outside of it.",
        )
    problems.raise_if_any(ModelError)


def _dividers() -> tuple[type[nn.Module], ...]:
    """Modules of torch that replicate or shard their contents."""
    known = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    fsdp = sys.modules.get("torch.distributed.fsdp")  # slow to import; users of it have done so
    return known if fsdp is None else (*known, fsdp.FullyShardedDataParallel, fsdp.FSDPModule)


def _note_divider(
    path: str, module: nn.Module, dividers: tuple[type[nn.Module], ...], problems: Problems
) -> None:
    divider = next(kind.__name__ for kind in dividers if isinstance(module, kind))
    inner = f"{path}.module" if path else "model.module"
    problems.add(
        f"Lockstep divides the work among devices, and {divider} would do so, too.",
        received=f"{divider} at {path!r}" if path else f"a {divider}",
        fix="Leave out fully_shard."
        if divider == "FSDPModule"
        else f"Pass the model without it: {inner} is what it wraps.",
    )


def parameter_info(name: str, parameter: nn.Parameter) -> ParameterInfo:
    """The description of a parameter in a graph."""
    return ParameterInfo(
        name=name,
        shape=tuple(parameter.shape),
        dtype=str(parameter.dtype).removeprefix("torch."),
        trainable=parameter.requires_grad,
    )


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
