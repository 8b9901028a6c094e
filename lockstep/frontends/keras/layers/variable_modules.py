"""Torch modules that hold the variables of Keras layers, under the paths that Keras gives these."""

from itertools import chain, count
from typing import Any

import torch
from keras.src.layers.normalization.batch_normalization import BatchNormalization
from keras.src.utils.torch_utils import TorchModuleWrapper
from torch import nn

from lockstep.capture.layers import BatchLayer, FrontEndLayer

_DEVICE_MARK = "_lockstep_device"


def trainable_variables(model: Any) -> list[Any]:
    """All variables that can be trained, frozen ones included, each once."""
    found = [own for layer in model._flatten_layers() for own in layer._trainable_variables]
    return list({id(variable): variable for variable in found}.values())


def add_layer_module(root: nn.Module, layer: Any) -> nn.Module | None:
    """Add a module with a layer's variables to ``root``; None for a layer without variables."""
    parameters, buffers = layer._trainable_variables, layer._non_trainable_variables
    if not (parameters or buffers):
        return None
    first = next(iter([*parameters, *buffers]))
    *path, name = first.path.split("/")[:-1] or [layer.name]
    kind = type(layer).__name__
    own = FrontEndLayer(kind)
    if isinstance(layer, BatchNormalization):
        own = BatchLayer(kind, first.shape[0])
    module = add_module(_submodule(root, path), name, own)
    if _DEVICE_MARK in vars(layer):
        vars(module)[_DEVICE_MARK] = vars(layer)[_DEVICE_MARK]
    if isinstance(layer, TorchModuleWrapper):  # it has buffers, and layers that are known by kind
        module._modules["module"] = layer.module
        return module
    for variable in parameters:
        module._parameters[_free_name(module, variable.path.split("/")[-1])] = variable._value
    for variable in buffers:
        module._buffers[_free_name(module, variable.path.split("/")[-1])] = variable._value
    return module


def tensor_attributes(model: Any) -> nn.Module:
    """A module with the tensors that layers and their regularizers have as attributes."""
    module = nn.Module()
    for layer in model._flatten_layers():
        owners = [layer, layer.activity_regularizer]
        owners += [variable.regularizer for variable in layer._trainable_variables]
        for owner in owners:
            for value in vars(owner).values() if hasattr(owner, "__dict__") else ():
                if isinstance(value, torch.Tensor):
                    vars(module)[f"number_{len(vars(module))}"] = value
    return module


def add_module(parent: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """Add a module to another, under a free name; returns the module."""
    parent._modules[_free_name(parent, name)] = module
    return module


def _submodule(root: nn.Module, path: list[str]) -> nn.Module:
    """The module at a path, which is made if it is missing."""
    module = root
    for part in path:
        child = module._modules.get(_attribute(part))
        module = add_module(module, part, nn.Module()) if child is None else child
    return module


def _free_name(module: nn.Module, name: str) -> str:
    """The name, numbered if a variable or layer has it already."""
    attribute = _attribute(name)
    taken = {*module._parameters, *module._buffers, *module._modules}
    numbered = (f"{attribute}_{number}" for number in count(1))
    return next(one for one in chain([attribute], numbered) if one not in taken)


def _attribute(name: str) -> str:
    """The name as torch allows it for a module or parameter."""
    name = name.replace(".", "_")
    return f"{name}_" if hasattr(nn.Module, name) or name in vars(_EMPTY_LAYER) else name


_EMPTY_LAYER = BatchLayer("", 0)
