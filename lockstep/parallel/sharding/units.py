"""Units: groups of parameters that are gathered together, as a model has them."""

from collections import defaultdict

from torch import nn

from lockstep.plan.sharding import Sharding


def modules_of_units(sharding: Sharding, model: nn.Module) -> dict[nn.Module, int]:
    """Every module of a unit, and the unit's number."""
    found = {}
    for number, names in enumerate(sharding.units):
        for name in names:
            for module in model.get_submodule(name).modules():
                found[module] = number
    return found


def unit_of_parameters(sharding: Sharding, model: nn.Module) -> dict[str, int | None]:
    """The unit of each parameter, by its first name; None for one in no unit or in several.

    Such a parameter stays on every rank.
    """
    units = modules_of_units(sharding, model)
    users: dict[int, set[int | None]] = defaultdict(set)
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                users[id(parameter)].add(units.get(module))
    return {
        name: next(iter(users[id(parameter)])) if len(users[id(parameter)]) == 1 else None
        for name, parameter in model.named_parameters()
    }
