"""The state of torch optimizers: slots and options by the names of parameters, taken and set.

If an optimizer's class overrides ``state_dict()`` (a wrapper, say), the state is what that returns.
Of others, attributes beside slots and options are not covered, as in torch.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import optim

from lockstep.checkpoint.trees import Tree
from lockstep.errors import CheckpointError
from lockstep.train.checkpointing.training_state import TrainingState, copied, copy_onto

Parameters = Mapping[str, torch.Tensor]

# Slots that torch's optimizers keep in host memory; NAdam reads the last as a number at each step.
_COUNTS = ("step", "mu_product")


def option_values(group: dict[str, Any]) -> dict[str, Any]:
    """A copy: schedulers change a learning rate that is a tensor in place."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key not in ("params", "param_names")
    }


def optimizer_parts(optimizer: optim.Optimizer, parameters: Parameters) -> dict[str, Tree]:
    """An optimizer's parts of a TrainingState.

    Args:
        optimizer: the optimizer.
        parameters: its parameters, by name in the model.

    Raises:
        CheckpointError: it has parameters that are not the model's, so they have no name.
    """
    if type(optimizer).state_dict is not optim.Optimizer.state_dict:
        return {"own": {"": optimizer.state_dict()}}
    names = {id(parameter): name for name, parameter in parameters.items()}
    every = [one for group in optimizer.param_groups for one in group["params"]]
    if strange := sum(id(one) not in names for one in every):
        raise CheckpointError(
            "The state of a training has the optimizer's parameters by their names in the model.",
            received=f"an optimizer with {strange} that are not, or no longer, in the model",
            fix="Make an optimizer of the model's parameters.",
        )
    state: dict[Any, Any] = optimizer.state  # some have values of their own there
    slots = {name: state.get(one) for name, one in parameters.items()}
    slots |= {key: own for key, own in state.items() if isinstance(key, str)}
    return {
        "optimizer": {name: dict(own) for name, own in slots.items() if own},
        "options": [
            {**option_values(group), "params": [names[id(one)] for one in group["params"]]}
            for group in optimizer.param_groups
        ],
    }


def set_optimizer(optimizer: optim.Optimizer, parameters: Parameters, state: TrainingState) -> None:
    """Set an optimizer's slots and options of these parameters to those of a state."""
    if state.own:
        optimizer.load_state_dict(copied(state.own[""]))
        return
    _set_groups(optimizer, parameters, state.options)
    before = dict(optimizer.state)
    optimizer.state.clear()
    for name, slots in state.optimizer.items():
        key: Any = parameters.get(name, name)
        present = before.get(key, {})
        optimizer.state[key] = {
            slot: _value(one, present.get(slot), parameters.get(name))
            for slot, one in slots.items()
        }
    if not any(one.is_meta for one in parameters.values()):  # these have no memory yet
        place_slots(optimizer, [one for own in before.values() for one in own.values()])


def place_slots(optimizer: optim.Optimizer, staying: Iterable[object] = ()) -> None:
    """Move slots to the devices of their parameters, as ``load_state_dict`` does.

    Some that have been in host memory before stay there.

    Counts belong in host memory, where torch makes them, unless its step reads them on the device.
    """
    stay = {id(one) for one in staying}
    for group in optimizer.param_groups:
        on_host = () if group.get("fused") or group.get("capturable") else _COUNTS
        for parameter in group["params"]:
            slots = optimizer.state.get(parameter, {})
            for name, value in slots.items():
                if isinstance(value, torch.Tensor) and not (value.is_meta or id(value) in stay):
                    slots[name] = value.to("cpu" if name in on_host else parameter.device)


def _set_groups(
    optimizer: optim.Optimizer, parameters: Parameters, options: Sequence[dict[str, Tree]]
) -> None:
    groups = optimizer.param_groups
    present = [option_values(group) for group in groups]
    groups.extend({} for _ in options[len(groups) :])
    del groups[len(options) :]
    for index, (group, values) in enumerate(zip(groups, options, strict=True)):
        there = present[index] if index < len(present) else {}
        group.clear()
        group["params"] = [parameters[name] for name in values["params"]]
        for name, value in values.items():
            if name != "params":
                group[name] = _value(value, there.get(name))


def _value(value: Tree, present: object = None, like: torch.Tensor | None = None) -> Tree:
    """A slot or an option for use, with memory of its own."""
    return copy_onto(present, value, like) if isinstance(value, torch.Tensor) else copied(value)
