"""Resumes a training with other optimizer options, or another schedule, than the checkpoint has.

An option that the script has changed gets its new value. Others keep the checkpoint's values, with
the changes by callbacks. If rates under a schedule change, they are those of the script's schedule
after as many of its steps as were made.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch

from lockstep.train.checkpointing.training_state import copied
from lockstep.train.optim.learning_rates import RunningSchedule
from lockstep.train.optim.optimizer_state import option_values
from lockstep.train.resume.differences import Difference
from lockstep.train.resume.fit_facts import named_options, plain
from lockstep.train.resume.fit_record import FitState

_RATES = ("lr", "initial_lr")
_SCHEDULED = (*_RATES, "momentum", "betas")


def decides_rates(taken: Collection[Difference]) -> bool:
    """True if the differences change the rates of a schedule."""
    return any(one.is_of_schedule or one.option in _RATES for one in taken)


def set_new_options(
    optimizer: Any,
    schedule: RunningSchedule | None,
    begun: dict[str, Any] | None,
    found: FitState,
    asked: Mapping[str, Any],
    taken: Collection[Difference],
) -> None:
    """Set an optimizer and a schedule, loaded from a checkpoint, to the script's new values.

    Args:
        optimizer: the optimizer, or several.
        schedule: of its rates.
        begun: the schedule's state before the ``fit``.
        found: the checkpoint.
        asked: the facts of the script.
        taken: the differences for which the script's value is used.
    """
    names = {one.name for one in taken}
    if schedule is not None and begun is not None and decides_rates(taken):
        if not schedule.has_metric:
            num_steps = _num_steps(schedule, begun, found, names)
            _replay(optimizer, schedule, begun, num_steps, asked, names)
            return
        schedule.load_state_dict(_with_settings(found.state.schedule, begun, names))
    is_dropped = schedule is None and "schedule" in names
    for name, group in named_options(optimizer):
        for option in option_values(group):
            fact = f"{name}.{option}"
            if fact in names or (is_dropped and option in _SCHEDULED):
                _set(group, option, asked.get(fact))


def _replay(
    optimizer: Any,
    schedule: RunningSchedule,
    begun: dict[str, Any],
    num_steps: int,
    asked: Mapping[str, Any],
    names: Collection[str],
) -> None:
    groups = [*named_options(optimizer)]
    trained = [option_values(group) for _, group in groups]
    for name, group in groups:
        for option in option_values(group):
            if f"{name}.{option}" in asked:
                _set(group, option, asked[f"{name}.{option}"])
    schedule.replay(copied(begun), num_steps)
    for (name, group), before in zip(groups, trained, strict=True):
        for option, value in before.items():
            fact = f"{name}.{option}"
            is_moved = fact in asked and plain(group[option]) != asked[fact]
            if not is_moved and option not in _RATES and fact not in names:
                _set(group, option, value)


def _num_steps(
    schedule: RunningSchedule, begun: dict[str, Any], found: FitState, names: Collection[str]
) -> int:
    """How often the scheduler has stepped since the ``fit`` began."""
    then = found.state.schedule
    if then is not None and not {"schedule", "schedule.every"} & {*names}:
        last, first = (_last_epoch(one["scheduler"]) for one in (then, begun))
        if last is not None and first is not None:
            return last - first
    if schedule.every == "step":
        return int(found.state.position["steps"]) - found.record.steps
    return int(found.position["epoch"])


def _last_epoch(scheduler: Mapping[str, Any]) -> int | None:
    if "last_epoch" in scheduler:
        return int(scheduler["last_epoch"])
    return _last_epoch(scheduler["_schedulers"][0]) if scheduler.get("_schedulers") else None


def _with_settings(
    then: dict[str, Any] | None, begun: dict[str, Any], names: Collection[str]
) -> dict[str, Any]:
    """The state of a schedule that monitors a metric, with the new settings."""
    if then is None or "schedule" in names:
        return {**begun, "scheduler": copied(begun["scheduler"])}
    changed = {
        key: value
        for key, value in begun["scheduler"].items()
        if any(name.startswith((f"schedule.{key}[", f"schedule.{key}.")) for name in names)
        or f"schedule.{key}" in names
    }
    scheduler = {**then["scheduler"], **changed}
    return {**then, "scheduler": copied(scheduler)}


def _set(group: dict[str, Any], option: str, value: Any) -> None:
    present = group[option]
    if value is None and option == "initial_lr":  # the schedule was removed
        del group[option]
    elif isinstance(present, torch.Tensor):
        present.fill_(value)
    else:
        group[option] = tuple(value) if isinstance(present, tuple) else value
