"""A run's state: a model's and an updater's parts of a TrainingState, taken, checked and set."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lockstep.checkpoint.trees import Tree
from lockstep.errors import CheckpointError, Problems
from lockstep.parallel.update import Updater
from lockstep.train.callbacks.callback import Callback
from lockstep.train.callbacks.state_values import set_values
from lockstep.train.checkpointing.training_state import TrainingState, copied
from lockstep.units import first_few

_SAME_SCRIPT = "Load it into a Trainer that the same script has made."


def state_of(model: nn.Module, updater: Updater | None) -> TrainingState:
    """What a model and an updater know; no copy."""
    parts: dict[str, Tree] = {} if updater is None else updater.state()
    return TrainingState(
        parameters={name: one.detach() for name, one in model.named_parameters()},
        buffers=dict(model.named_buffers()),
        trained=[name for name, one in model.named_parameters() if one.requires_grad],
        **parts,
    )


def set_state(model: nn.Module, updater: Updater | None, state: TrainingState) -> None:
    """Have a model and an updater know what ``state_of`` has told of others like them."""
    set_values(model, {**state.parameters, **state.buffers})
    if updater is not None:
        updater.load_state(state)


def module_states(model: nn.Module) -> dict[str, Tree]:
    """What modules tell of themselves beside parameters and buffers."""
    return {
        name: module.get_extra_state()
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def set_module_states(model: nn.Module, states: dict[str, Tree]) -> None:
    """Give modules back what they have told."""
    modules = dict(model.named_modules())
    for name, state in states.items():
        modules[name].set_extra_state(copied(state))


def callback_states(callbacks: Sequence[Callback]) -> list[dict[str, Tree]]:
    """What callbacks keep, in their order, of those that keep anything."""
    states = [(one.kind, one.state_dict()) for one in callbacks]
    return [{"class": name, "state": state} for name, state in states if state]


def set_callback_states(callbacks: Sequence[Callback], states: list[dict[str, Tree]]) -> None:
    """Give callbacks back what they have kept: the first of a class gets the first of that name."""
    waiting = list(callbacks)
    for each in states:
        found = next(one for one in waiting if one.kind == each["class"])
        waiting.remove(found)
        found.load_state_dict(copied(each["state"]))


def check_state(
    state: TrainingState,
    own: TrainingState,
    callbacks: Sequence[Callback],
    *,
    has_schedule: bool,
) -> None:
    """See that a state can be set here.

    Args:
        state: the state.
        own: what is here now.
        callbacks: those that are here.
        has_schedule: there is one here.

    Raises:
        CheckpointError: with all that differs in kind.
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
                f"Where a state has `{part}`, the Trainer must have it, and the other way round.",
                received=f"a {'state' if there else 'Trainer'} alone that has it",
                fix=_SAME_SCRIPT,
            )
    kinds = [one.kind for one in callbacks]
    for name in (str(each.get("class")) for each in state.callbacks):
        if name in kinds:
            kinds.remove(name)
        else:
            problems.add(
                "A callback that has kept something must be there to go on with it.",
                received=f"a state with one more {name} than the Trainer has",
                fix=f'{_SAME_SCRIPT} Or take it out of the state\'s "callbacks".',
            )
    problems.raise_if_any(CheckpointError)


def check_tensors(state: TrainingState, own: TrainingState) -> None:
    """See that a state is of a model with these parameters and buffers.

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
    part: str,
    there: dict[str, torch.Tensor],
    here: dict[str, torch.Tensor],
    problems: Problems,
) -> None:
    missing, strange = sorted(here.keys() - there.keys()), sorted(there.keys() - here.keys())
    for kind, names in (("without", missing), ("with", strange)):
        if names:
            problems.add(
                f"A state must have the model's {part}.",
                received=f"one {kind} {first_few(names)}",
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
    """The optimizer's groups and slots must be of parameters that there are."""
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
            "The state of an optimizer goes with one.",
            received="a Trainer without an optimizer",
            fix="Give it one, or use load() for the weights alone.",
        )


def within_training() -> CheckpointError:
    """For what cannot be done while a training goes on."""
    return CheckpointError(
        "A state is loaded between two calls of fit.",
        received="load_state_dict within a call, by a callback",
        fix="Load it before fit.",
    )


def no_place() -> CheckpointError:
    """For a state that is asked for where training cannot be gone on from."""
    return CheckpointError(
        "Within a fit, a callback finds the state of the training in on_epoch_end, and in "
        "on_train_batch_end where its takes_state() says so; on data that can only be iterated "
        "with fit(checkpoint=...) only.",
        received="state_dict elsewhere",
        fix="Call it there, or after fit.",
    )
