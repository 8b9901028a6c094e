"""Sees whether callbacks have changed more than values.

Weights lie in shared memory, and options of the optimizer and buffers are sent to all ranks. What
else a callback may do between two epochs (freeze a layer, change a dropout's rate, add a parameter
group, load an optimizer's state) makes the ranks be sent everything anew, and this is how it shows.
"""

from torch import nn, optim

from lockstep.parallel.parcel import describe
from lockstep.plan.spec import Plan


def structure(model: nn.Module) -> object:
    """What is trained, and in which mode: quick to tell."""
    return [(id(module), module.training, _parameters_of(module)) for module in model.modules()]


def _parameters_of(module: nn.Module) -> list[tuple[int, bool]]:
    own = module._parameters.values()
    return [(id(one), one.requires_grad) for one in own if one is not None]


def fingerprint(model: nn.Module, optimizer: optim.Optimizer | None, plan: Plan) -> object:
    """Everything that the other ranks were sent, but for values that are brought to them anyway."""
    if plan.num_ranks == 1:
        return structure(model)
    return structure(model), describe(model, list(model.parameters())), _slots_of(optimizer)


def _slots_of(optimizer: optim.Optimizer | None) -> object:
    if optimizer is None:
        return None
    groups = [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
    slots = {
        id(parameter): [
            (name, id(value), getattr(value, "_version", None)) for name, value in values.items()
        ]
        for parameter, values in optimizer.state.items()
    }
    return groups, slots
