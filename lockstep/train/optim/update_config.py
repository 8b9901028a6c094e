"""UpdateConfig: the Trainer's options for gradients and weights beside its optimizer.

It checks them, and makes the session's parts of them: gradient rules, updaters, step functions.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, get_args

import msgspec
import torch
from torch import nn, optim

from lockstep.errors import LockstepError, OptionError, Problems
from lockstep.options import check_choice, check_count, check_flag, check_positive
from lockstep.parallel.data_parallel.forward import DTYPES
from lockstep.parallel.data_parallel.gradient_rules import GradientRules, LossScale, OnNonFinite
from lockstep.parallel.data_parallel.step_functions import StepFunction
from lockstep.parallel.loss.share_losses import ONE_LOSS, LossParts
from lockstep.plan.makers.data_parallel import Accumulating, Maker
from lockstep.plan.spec import Plan
from lockstep.train.optim.optimizers import Optimizers, names_of
from lockstep.train.optim.updater_sets import UpdaterSet
from lockstep.train.optim.updaters import TorchUpdater
from lockstep.train.optim.wrapped_updaters import (
    EMA,
    Averages,
    AveragingUpdater,
    OuterUpdater,
    WrappedUpdater,
    with_masters,
)
from lockstep.train.resume.fit_facts import Facts, described

AnyUpdater = TorchUpdater | WrappedUpdater | UpdaterSet


class UpdateConfig:
    """See the module, and ``Trainer`` for the options.

    Attributes:
        rules: for gradients.
        averages: of the weights; None without.
        train_step: the user's own, a function or several by name.

    Raises:
        OptionError: an option is invalid, or cannot be combined with another.
    """

    def __init__(
        self,
        *,
        precision: str,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        accumulate: int = 1,
        on_nonfinite: OnNonFinite = "raise",
        average: EMA | None = None,
        compile: bool = False,
        schedule: object = None,
        train_step: Any = None,
    ) -> None:
        _check_gradient_options(clip_norm, clip_value, accumulate, on_nonfinite)
        _check_additions(average, compile)
        _check_train_step(train_step, schedule, average, precision, compile)
        self.rules = GradientRules(
            clip_norm=clip_norm,
            clip_value=clip_value,
            on_nonfinite=on_nonfinite,
            loss_scale=LossScale() if precision == "fp16-mixed" else None,
        )
        self.averages = None if average is None else Averages(average)
        self.train_step = train_step
        self._precision = precision
        self._accumulate = accumulate
        self._compile = compile
        self._masters: dict[str, torch.Tensor] = {}
        self._velocities: dict[str, torch.Tensor] = {}

    def __repr__(self) -> str:
        """All that affects the time and memory of a step."""
        rules = self.rules
        steps = self.train_step if isinstance(self.train_step, Mapping) else {"": self.train_step}
        names = [getattr(step, "__qualname__", type(step).__name__) for step in steps.values()]
        return (
            f"Recipe(clip_norm={rules.clip_norm}, clip_value={rules.clip_value}, "
            f"on_nonfinite={rules.on_nonfinite}, average={self.averages and self.averages.ema}, "
            f"compile={self._compile}, accumulate={self._accumulate}, train_step={names})"
        )

    def facts(self) -> Facts:
        """All that the result depends on."""
        rules, averages = self.rules, self.averages
        return {
            "clip_norm": rules.clip_norm,
            "clip_value": rules.clip_value,
            "on_nonfinite": rules.on_nonfinite,
            "accumulate": self._accumulate,
            "average": None if averages is None else repr(averages.ema),
            **described("train_step", self.train_step),
        }

    def maker(self, maker: Maker) -> Maker:
        """The strategy's maker, with accumulation if configured."""
        return maker if self._accumulate == 1 else Accumulating(maker=maker, parts=self._accumulate)

    def plan(self, plan: Plan) -> Plan:
        """A Plan, with a compiled model if configured.

        Raises:
            OptionError: a compiled model would have to be recomputed.
        """
        return _compiled(plan) if self._compile else plan

    @property
    def turns(self) -> LossParts:
        """The names of the losses of several functions, for logs."""
        if not isinstance(self.train_step, Mapping):
            return ONE_LOSS
        names = tuple(map(str, self.train_step))
        return LossParts(names=names, factors=(1.0,) * len(names))

    def functions(
        self, optimizer: optim.Optimizer | Optimizers, model: nn.Module, plan: Plan
    ) -> tuple[StepFunction, ...]:
        """The user's own training steps, each with the parameters of its optimizer.

        Raises:
            OptionError: the Plan is a pipeline.
        """
        if self.train_step is None:
            return ()
        _check_steps_fit(plan)
        if not isinstance(optimizer, Optimizers):
            return (StepFunction(function=self.train_step),)
        return tuple(
            StepFunction(function=self.train_step[name], parameters=names_of(one, model))
            for name, one in optimizer.items()
        )

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Around the making of a Plan, which may run the model on its data.

        Raises:
            OptionError: the model cannot be run so, and the user's own steps need not do it.
        """
        try:
            yield
        except Exception as error:
            if self.train_step is None or isinstance(error, LockstepError):
                raise
            raise OptionError(
                "This strategy plans by the model's `forward` on the data, which need not be what "
                "train_step does with it.",
                received=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}",
                fix="Use MirroredStrategy, or give the model a `forward` that takes the inputs of "
                "its data.",
            ) from error

    def updater(
        self,
        optimizer: optim.Optimizer | Optimizers,
        model: nn.Module,
        *,
        changes_by_step: bool,
        has_outer: bool = False,
    ) -> AnyUpdater:
        """The updater that steps the user's optimizer.

        Args:
            optimizer: the user's.
            model: whose parameters it has.
            changes_by_step: a schedule changes its options at every step.
            has_outer: an outer optimizer steps on the replicas' averages.

        Raises:
            OptionError: ``precision="bf16"`` with an optimizer that is not torch's own.
        """
        parameters = dict(model.named_parameters())
        if isinstance(optimizer, Optimizers):
            return UpdaterSet.of_torch(optimizer, parameters)
        updater: TorchUpdater | WrappedUpdater = TorchUpdater(
            optimizer, parameters, changes_by_step=changes_by_step
        )
        if self.averages is not None:  # of the masters, where there are any
            dtype = DTYPES["bf16"] if self._precision == "bf16" else None
            updater = AveragingUpdater(updater, self.averages, dtype)
        if self._precision == "bf16":
            updater = with_masters(updater, self._masters)
        if has_outer:
            updater = OuterUpdater(updater, self._velocities)
        return updater


# --- checks ---------------------------------------------------------------------------------------


def _check_gradient_options(
    clip_norm: object, clip_value: object, accumulate: object, on_nonfinite: object
) -> None:
    """Check the options for gradients.

    Raises:
        OptionError: with all that is invalid.
    """
    problems = Problems()
    for name, value in (("clip_norm", clip_norm), ("clip_value", clip_value)):
        if value is not None:
            check_positive(name, value, problems, fix="Leave it out to clip nothing.")
    if clip_norm is not None and clip_value is not None:
        problems.add(
            "Gradients are clipped by norm or by value, not both.",
            received=f"clip_norm={clip_norm!r} and clip_value={clip_value!r}",
            fix="Give one of them.",
        )
    fix = "Use the number of parts in which each device goes through its share of a batch."
    check_count("accumulate", accumulate, problems, fix=fix)
    fix = "Use 'raise' to stop, or 'skip' to leave such steps out."
    check_choice("on_nonfinite", on_nonfinite, get_args(OnNonFinite), problems, fix=fix)
    problems.raise_if_any(OptionError)


def _check_additions(average: object, compile: object) -> None:
    """Check ``average`` and ``compile``.

    Raises:
        OptionError: one is invalid.
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


def _check_train_step(
    train_step: object, schedule: object, average: object, precision: str, compile: bool
) -> None:
    """Check the user's own training steps, and the options that they exclude.

    Raises:
        OptionError: they are not functions, or an excluded option is given.
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
            "With several optimizers this option cannot be used: it needs one optimizer.",
            received=name,
            fix="Leave it out; a callback may change learning rates of trainer.optimizer[name].",
        )
    if compile:
        problems.add(
            "A train_step may call several models, so Lockstep cannot tell which to compile.",
            received="compile=True",
            fix="Call torch.compile within train_step.",
        )
    problems.raise_if_any(OptionError)


def _check_steps_fit(plan: Plan) -> None:
    """Refuse the user's own training steps in a pipeline.

    Raises:
        OptionError: the Plan is one.
    """
    if plan.pipeline is not None:
        raise OptionError(
            "A train_step needs the whole model, and in a pipeline each rank has a part of it.",
            received="train_step with a pipeline",
            fix="Use a data parallel strategy.",
        )


def _compiled(plan: Plan) -> Plan:
    """The Plan with a compiled model.

    Raises:
        OptionError: the Plan recomputes modules.
    """
    if plan.sharding is not None and plan.sharding.recompute:
        raise OptionError(
            "Modules of a compiled model cannot be recomputed one by one.",
            received="compile=True with recompute",
            fix="Leave one of them out.",
        )
    return msgspec.structs.replace(plan, compiled=True)
