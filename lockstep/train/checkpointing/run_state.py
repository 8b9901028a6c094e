"""Takes, checks and sets the parts of a TrainingState of a model, an updater and callbacks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lockstep.checkpoint.trees import Tree
from lockstep.errors import CheckpointError, Problems
from lockstep.formatting import first_few
from lockstep.parallel.updater_interface import Updater
from lockstep.train.callbacks.callback import Callback
from lockstep.train.callbacks.state_values import set_values
from lockstep.train.checkpointing.training_state import TrainingState, copied

_SAME_SCRIPT = "Load it into a Trainer that the same script has made."


def state_of(model: nn.Module, updater: Updater | None) -> TrainingState:
    """The state of a model and an updater; no copy."""
    parts: dict[str, Tree] = {} if updater is None else updater.state()
    return TrainingState(
        parameters={name: one.detach() for name, one in model.named_parameters()},
        buffers=dict(model.named_buffers()),
        trained=[name for name, one in model.named_parameters() if one.requires_grad],
        **parts,
    )


def set_state(model: nn.Module, updater: Updater | None, state: TrainingState) -> None:
    """Set a model and an updater to a state."""
    set_values(model, {**state.parameters, **state.buffers})
    if updater is not None:
        updater.load_state(state)


def module_states(model: nn.Module) -> dict[str, Tree]:
    """The modules' extra states, beside parameters and buffers."""
    return {
        name: module.get_extra_state()
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def set_module_states(model: nn.Module, states: dict[str, Tree]) -> None:
    """Set the modules' extra states."""
    modules = dict(model.named_modules())
    for name, state in states.items():
        modules[name].set_extra_state(copied(state))


def callback_states(callbacks: Sequence[Callback]) -> list[dict[str, Tree]]:
    """The states of callbacks that have one, in their order."""
    states = [(one.kind, one.state_dict()) for one in callbacks]
    return [{"class": name, "state": state} for name, state in states if state]


def set_callback_states(callbacks: Sequence[Callback], states: list[dict[str, Tree]]) -> None:
    """Set the callbacks' states: the first of a class gets the first of that name."""
    waiting = list(callbacks)
    for each in states:
        found = next(one for one in waiting if one.kind == each["class"])
        waiting.remove(found)
        found.load_state_dict(copied(each["state"]))


def check_state(
    state: TrainingState, own: TrainingState, callbacks: Sequence[Callback], *, has_schedule: bool
) -> None:
    """Check that a state fits the Trainer.

    Args:
        state: the state.
        own: the Trainer's present state.
        callbacks: the Trainer's.
        has_schedule: the Trainer has one.

    Raises:
        CheckpointError: with all that does not fit.
    """
    problems = _tensor_problems(state, own)
    _check_names(state, own, problems)
    has = {
        "averages": own.averages is not None,
        "schedule": has_schedule,
        "loss_scale": own.loss_scale is not None,
    }
    for part, here in has.items():
        there = getattr(state, part) is not None
        if here != there:
            problems.add(
                f"A state and the Trainer must both have `{part}`, or neither.",
                received=f"only the {'state' if there else 'Trainer'} has it",
                fix=_SAME_SCRIPT,
            )
    kinds = [one.kind for one in callbacks]
    for name in (str(each.get("class")) for each in state.callbacks):
        if name in kinds:
            kinds.remove(name)
        else:
            problems.add(
                "Each callback's state needs a callback of its class.",
                received=f"a state with one more {name} than the Trainer has",
                fix=f'{_SAME_SCRIPT} Or remove it from the state\'s "callbacks".',
            )
    problems.raise_if_any(CheckpointError)


def check_tensors(state: TrainingState, own: TrainingState) -> None:
    """Check that a state is of a model with the same parameters and buffers.

    Raises:
        CheckpointError: with all that differs.
    """
    _tensor_problems(state, own).raise_if_any(CheckpointError)


def _tensor_problems(state: TrainingState, own: TrainingState) -> Problems:
    problems = Problems()
    for part in ("parameters", "buffers"):
        _check_tensors(part, getattr(state, part), getattr(own, part), problems)
    return problems


def _check_tensors(
    part: str, there: dict[str, torch.Tensor], here: dict[str, torch.Tensor], problems: Problems
) -> None:
    missing, strange = sorted(here.keys() - there.keys()), sorted(there.keys() - here.keys())
    for kind, names in (("without", missing), ("with", strange)):
        if names:
            problems.add(
                f"A state must have the model's {part}.",
                received=f"a state {kind} {first_few(names)}",
                fix=_SAME_SCRIPT,
            )
    for name in (name for name in here if name in there):
        forms = [(one.dtype, tuple(one.shape)) for one in (here[name], there[name])]
        if forms[0] != forms[1]:
            problems.add(
                f"{name!r} must be {forms[0][0]} of shape {forms[0][1]}.",
                received=f"{forms[1][0]} of shape {forms[1][1]}",
                fix=_SAME_SCRIPT,
            )


def _check_names(state: TrainingState, own: TrainingState, problems: Problems) -> None:
    """Check that the optimizer's groups and slots are of the model's parameters."""
    weights: dict[str, Any] = {} if state.averages is None else state.averages["weights"]
    named = {
        "trained": state.trained,
        "options": [name for group in state.options for name in group.get("params", ())],
        "masters": state.masters,
        "velocities": state.velocities,
        "averages": weights,
    }
    for part, names in named.items():
        strange = sorted(set(names) - own.parameters.keys())
        if strange:
            problems.add(
                f"`{part}` of a state must be of the model's parameters.",
                received=first_few(strange),
                fix=_SAME_SCRIPT,
            )
    if len(state.options) and not len(own.options):
        problems.add(
            "The state of an optimizer needs an optimizer.",
            received="a Trainer without an optimizer",
            fix="Give it one, or use load() for the weights alone.",
        )
