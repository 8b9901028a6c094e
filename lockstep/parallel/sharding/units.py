"""Units: groups of parameters that are gathered together, as a model has them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import nn

from lockstep.comm.collectives.piece_memory import storage_key
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


def separate_storages(model: nn.Module, units: Mapping[str, int | None]) -> None:
    """On a device: give parameters of units storages that nothing else has, since units free them.

    Args:
        model: on the device.
        units: of its trained parameters, by name; None for one that stays.
    """
    users: dict[int, set[int | None]] = defaultdict(set)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        users[storage_key(tensor)].add(units.get(name))
    for name, parameter in model.named_parameters():
        is_shared = len(users[storage_key(parameter)]) > 1
        if is_shared and units.get(name) is not None:
            parameter.data = parameter.data.clone()


def completed_order(used: Sequence[int], count: int) -> list[int]:
    """The order of all units: those that were not used come after the one before them."""
    order = list(dict.fromkeys(used))
    for unit in range(count):
        if unit not in order:
            order.insert(order.index(unit - 1) + 1 if unit else 0, unit)
    return order
