"""Sees whether callbacks have changed more than values.

Weights lie in shared memory, and options of the optimizer and buffers are sent to all ranks. What
else a callback may do between two epochs (freeze a layer, change a dropout's rate, add a parameter
group, load an optimizer's state) makes the ranks be sent everything anew, and this is how it shows.
"""

from torch import nn, optim

from lockstep.parallel.parcel import describe
from lockstep.plan.spec import Plan
from lockstep.train.optimizers import Optimizers


def structure(model: nn.Module) -> object:
    """What is trained, and in which mode: quick to tell."""
    return (
        [(id(parameter), parameter.requires_grad) for parameter in model.parameters()],
        [(id(module), module.training) for module in model.modules()],
    )


def fingerprint(
    model: nn.Module, optimizer: optim.Optimizer | Optimizers | None, plan: Plan
) -> object:
    """Everything that the other ranks were sent, but for values that are brought to them anyway."""
    if plan.num_ranks == 1:
        return structure(model)
    every = optimizer.values() if isinstance(optimizer, Optimizers) else [optimizer]
    slots = [_slots_of(each) for each in every if each is not None]
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
