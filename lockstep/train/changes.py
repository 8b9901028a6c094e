"""Sees whether callbacks have changed more than values.

Weights lie in shared memory, and options of the optimizer and buffers are sent to all ranks. What
else a callback may do between two epochs (freeze a layer, change a dropout's rate, add a parameter
group, load an optimizer's state) makes the ranks be sent everything anew, and this is how it shows.
"""

from typing import NamedTuple

import torch
from torch import nn, optim

from lockstep.parallel.parcel import describe
from lockstep.plan.spec import Plan
from lockstep.train.optimizers import Optimizers, each_optimizer


class Look(NamedTuple):
    """A model at one moment: two of them show what has changed in between.

    Attributes:
        structure: what there is, what of it is trained, and in which mode.
        places: where parameters lie.
        versions: place and version of every buffer, by name.
    """

    structure: list[object]
    places: list[object]
    versions: dict[str, tuple[int, int]]


class Lookout:
    """Looks at a model before and after every step that a callback watches, so it must be quick.

    It knows the modules from the beginning: a model with other modules is of another structure.

    Args:
        model: what to look at.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(f"{name}." if name else "", one) for name, one in model.named_modules()]

    def look(self) -> Look:
        """The model as it is now."""
        found = Look([], [], {})
        structure, places, versions = found
        for prefix, module in self._modules:
            structure.append((module.training, [*map(id, module._modules.values())]))
            for parameter in module._parameters.values():
                if parameter is not None:
                    structure.append((id(parameter), parameter.requires_grad))
                    places.append((parameter.data_ptr(), parameter.stride(), parameter.dtype))
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    versions[prefix + name] = buffer.data_ptr(), buffer._version
        return found


def changed_buffers(model: nn.Module, before: Look, after: Look) -> dict[str, torch.Tensor]:
    """The buffers that were written to, or made, between two looks."""
    if before.versions == after.versions:
        return {}
    return {
        name: buffer
        for name, buffer in model.named_buffers()
        if after.versions[name] != before.versions.get(name)
    }


def structure(model: nn.Module) -> object:
    """What is trained, and in which mode."""
    return [id(module) for module in model.modules()], Lookout(model).look().structure


def fingerprint(
    model: nn.Module, optimizer: optim.Optimizer | Optimizers | None, plan: Plan
) -> object:
    """Everything that the other ranks were sent, but for values that are brought to them anyway."""
    if plan.num_ranks == 1:
        return structure(model)
    slots = [_slots_of(each) for each in each_optimizer(optimizer)]
    return structure(model), describe(model, list(model.parameters())), slots


def _slots_of(optimizer: optim.Optimizer) -> object:
    groups = [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
    slots = {
        id(parameter): [
            (name, id(value), getattr(value, "_version", None)) for name, value in values.items()
        ]
        for parameter, values in optimizer.state.items()
    }
    return groups, slots
