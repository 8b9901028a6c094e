"""Checks the options that say what becomes of gradients and weights."""

from collections.abc import Mapping
from typing import get_args

import msgspec

from lockstep.errors import OptionError, Problems
from lockstep.options import check_choice, check_count, check_flag, check_positive
from lockstep.parallel.gradient_rules import OnNonFinite
from lockstep.plan.spec import Plan
from lockstep.train.wrapped_updaters import EMA


def check_gradient_options(
    clip_norm: object, clip_value: object, accumulate: object, on_nonfinite: object
) -> None:
    """What happens to gradients, all problems at once.

    Raises:
        OptionError: an argument cannot be what it is.
    """
    problems = Problems()
    for name, value in (("clip_norm", clip_norm), ("clip_value", clip_value)):
        if value is not None:
            check_positive(name, value, problems, fix="Leave it out to clip nothing.")
    if clip_norm is not None and clip_value is not None:
        problems.add(
            "Gradients are clipped by norm or by value.",
            received=f"clip_norm={clip_norm!r} and clip_value={clip_value!r}",
            fix="Give one of them.",
        )
    fix = "Use the number of parts in which each device goes through its share of a batch."
    check_count("accumulate", accumulate, problems, fix=fix)
    fix = "Use 'raise' to stop, or 'skip' to leave such steps out."
    check_choice("on_nonfinite", on_nonfinite, get_args(OnNonFinite), problems, fix=fix)
    problems.raise_if_any(OptionError)


def check_additions(average: object, compile: object) -> None:
    """Refuse what is no way to average, or no choice.

    Raises:
        OptionError: it is none.
    """
    problems = Problems()
    check_flag("compile", compile, problems, fix="Leave it out to run the model as it is.")
    if average is not None and not isinstance(average, EMA):
        problems.add(
            "`average` must be a lockstep.EMA.",
            received=f"average={average!r}",
            fix="Pass average=lockstep.EMA(0.999), for example.",
        )
    problems.raise_if_any(OptionError)


def check_train_step(
    train_step: object, schedule: object, average: object, precision: str, compile: bool
) -> None:
    """Training steps of the user's own, and what does not go with them.

    Raises:
        OptionError: they are no functions, or something does not.
    """
    if train_step is None:
        return
    problems = Problems()
    several = isinstance(train_step, Mapping)
    for step in train_step.values() if isinstance(train_step, Mapping) else [train_step]:
        if isinstance(step, type) or not callable(step):
            problems.add(
                "`train_step` must be a function of model and batch, or a dict of them.",
                received=repr(step),
                fix="Pass one that returns the loss.",
            )
    unfit = {
        "schedule": several and schedule is not None,
        "average": several and average is not None,
        'precision="bf16"': several and precision == "bf16",
    }
    for name in [name for name, is_given in unfit.items() if is_given]:
        problems.add(
            "With several optimizers this option would be of none of them.",
            received=name,
            fix="Leave it out; a callback may change learning rates of trainer.optimizer[name].",
        )
    if compile:
        problems.add(
            "A train_step calls what it likes: there is no one model to compile.",
            received="compile=True",
            fix="Compile what it calls, within it.",
        )
    problems.raise_if_any(OptionError)


def check_steps_fit(plan: Plan) -> None:
    """Refuse the user's own training steps where no rank has the whole model.

    Raises:
        OptionError: it is in stages.
    """
    if plan.pipeline is not None:
        raise OptionError(
            "A train_step needs the whole model, and in a pipeline each rank has a part.",
            received="train_step with a pipeline",
            fix="Use a data parallel strategy.",
        )


def compiled(plan: Plan) -> Plan:
    """The Plan with a model that is compiled.

    Raises:
        OptionError: it is in stages.
    """
    if plan.pipeline is not None:
        raise OptionError(
            "The stages of a pipeline run a model's layers one by one: there is no whole to "
            "compile.",
            received="compile=True with a pipeline",
            fix="Leave it out, or use a data parallel strategy.",
        )
    return msgspec.structs.replace(plan, compiled=True)
