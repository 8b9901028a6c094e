"""Learning-rate schedules: torch's schedulers, stepped where a plain loop would step them.

A scheduler runs on rank 0 only: it holds the user's own optimizer and changes its options. These
reach the other ranks with the changes of callbacks (``train.callbacks.rank_sync``) if it steps per
epoch, and through shared memory (``train.runtime.shared_options``) if it steps per update.

``every="step"`` counts updates: a batch of total weight 0 makes none, and advances no schedule.
"""

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR

from lockstep.errors import OptionError, Problems
from lockstep.formatting import listed

EVERY = ("step", "epoch")
_BY_STEP = (OneCycleLR, CyclicLR)


@dataclass(frozen=True)
class Schedule:
    """When a torch scheduler steps, and which metric it monitors.

    Args:
        make: a scheduler's class or a function, called with the optimizer, or a scheduler over the
            Trainer's own optimizer.
        every: ``"step"`` for after every update, ``"epoch"`` for after every epoch. None is the
            usual choice for the scheduler: steps for ``OneCycleLR`` and ``CyclicLR``, else epochs.
        monitor: for ``ReduceLROnPlateau``, the name of its metric in the logs; None is
            ``"val_loss"`` with validation data, else ``"loss"``.

    Raises:
        OptionError: an argument is invalid.
    """

    make: Any
    every: str | None = None
    monitor: str | None = None

    def __post_init__(self) -> None:
        problems = Problems()
        if not callable(self.make) and not isinstance(self.make, LRScheduler):
            problems.add(
                "`schedule` must be a torch scheduler, or make one from an optimizer.",
                received=repr(self.make),
                fix="Pass functools.partial(torch.optim.lr_scheduler.StepLR, step_size=10), "
                "for example.",
            )
        if self.every is not None and self.every not in EVERY:
            problems.add(
                "`every` of a Schedule must be 'step' or 'epoch'.",
                received=repr(self.every),
                fix="Use 'epoch'.",
            )
        monitor: object = self.monitor
        if monitor is not None and not isinstance(monitor, str):
            problems.add(
                "`monitor` of a Schedule must be a name in the logs.",
                received=repr(monitor),
                fix="Use 'val_loss'.",
            )
        problems.raise_if_any(OptionError)


class RunningSchedule:
    """A schedule over an optimizer.

    Attributes:
        scheduler: torch's; ``state_dict()`` and ``load_state_dict()`` are its own.
        every: when it steps, ``"step"`` or ``"epoch"``.
        given_monitor: the metric's name that the user gave; None for the default.
        has_metric: True if its step takes a metric.

    Args:
        schedule: the user's.
        optimizer: whose rates it changes.

    Raises:
        OptionError: it makes no scheduler over this optimizer.
    """

    def __init__(self, schedule: Schedule, optimizer: Optimizer) -> None:
        self.scheduler = _make_scheduler(schedule.make, optimizer)
        self.every = schedule.every or ("step" if isinstance(self.scheduler, _BY_STEP) else "epoch")
        self._optimizer = optimizer
        self.given_monitor = schedule.monitor
        self._monitor: str | None = None
        self.has_metric = "metrics" in inspect.signature(self.scheduler.step).parameters
        self._rates = self._present_rates()
        self._differ = len(set(self._rates)) > 1 or _has_several_lambdas(self.scheduler)
        self._check_monitor()

    def state_dict(self) -> dict[str, Any]:
        """What it needs to resume."""
        own = {"rates": list(self._rates), "differ": self._differ}
        return {"scheduler": self.scheduler.state_dict(), **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a ``state_dict()``; the optimizer has its options already."""
        self.scheduler.load_state_dict(state["scheduler"])
        self._rates, self._differ = list(state["rates"]), state["differ"]

    def replay(self, start: dict[str, Any], num_steps: int) -> None:
        """Restore a state, and step from there.

        Args:
            start: a ``state_dict()``; the optimizer has the options of that time.
            num_steps: of the scheduler since.
        """
        self.load_state_dict(start)
        vars(self._optimizer)["_opt_called"] = True  # torch's schedulers check it
        for _ in range(num_steps):
            self._advance()
        self._rates = self._present_rates()

    def begin(self, names: Collection[str], num_steps: int | None) -> None:
        """Check the schedule before a ``fit``.

        Args:
            names: of the logs of an epoch.
            num_steps: that the ``fit`` will make; None if unknown.

        Raises:
            OptionError: the monitored log is missing, or the scheduler has too few steps left.
        """
        self._rates = self._present_rates()
        if self.has_metric:
            default = "val_loss" if "val_loss" in names else "loss"
            self._monitor = self.given_monitor or default
            if self._monitor not in names:
                raise OptionError(
                    "`monitor` of a Schedule must be a name in the logs.",
                    received=repr(self._monitor),
                    fix=f"Use one of {listed(sorted(names))}.",
                )
        total = getattr(self.scheduler, "total_steps", None)
        if self.every == "step" and isinstance(total, int) and num_steps is not None:
            left = total - self.scheduler.last_epoch
            if num_steps > left:
                raise OptionError(
                    f"The {type(self.scheduler).__name__} must be made for as many steps as "
                    "there are.",
                    received=f"{num_steps} steps where {left} of {total} are left",
                    fix="Make it with total_steps=epochs * batches of an epoch, over all fits.",
                )

    def end_step(self, *, is_update: bool) -> None:
        """After a batch; ``is_update`` is False if it made no step of the optimizer."""
        if not is_update:
            return
        vars(self._optimizer)["_opt_called"] = True  # torch's schedulers check it
        if self.every == "step":
            self._rates = self._present_rates()
            self._advance()

    def end_epoch(self, logs: dict[str, Any]) -> dict[str, float]:
        """Step after an epoch; returns the rates of its last update, by their names in the logs."""
        if self.every == "epoch":
            self._rates = self._present_rates()
            self._advance(*([logs[self._monitor]] if self._monitor else []))
        self._differ = self._differ or len(set(self._rates)) > 1
        if not self._differ:
            return {"lr": self._rates[0]}
        return {f"lr_{number}": rate for number, rate in enumerate(self._rates)}

    def _present_rates(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def _advance(self, *metrics: Any) -> None:
        try:
            self.scheduler.step(*metrics)
        except (TypeError, ValueError) as error:
            raise OptionError(
                f"The {type(self.scheduler).__name__} cannot step.",
                received=f"{type(error).__name__}: {error}",
                fix="The weights are those after the last step. Check its arguments.",
            ) from error

    def _check_monitor(self) -> None:
        kind = type(self.scheduler).__name__
        if self.has_metric and self.every == "step":
            raise OptionError(
                f"{kind} monitors an epoch's logs.",
                received="every='step'",
                fix="Use every='epoch'.",
            )
        if self.given_monitor is not None and not self.has_metric:
            raise OptionError(
                "`monitor` is for a scheduler that monitors a metric, as ReduceLROnPlateau.",
                received=f"monitor={self.given_monitor!r} for a {kind}",
                fix="Leave it out.",
            )


def make_schedule(schedule: Any, optimizer: Optimizer | None) -> RunningSchedule:
    """The Trainer's ``schedule`` argument as a schedule over its optimizer.

    Raises:
        OptionError: there is no optimizer, or the schedule does not fit it.
    """
    if optimizer is None:
        raise OptionError(
            "`schedule` needs an optimizer.",
            received="optimizer=None",
            fix="Give the Trainer one: functools.partial(torch.optim.Adam, lr=1e-3).",
        )
    declared = schedule if isinstance(schedule, Schedule) else Schedule(schedule)
    return RunningSchedule(declared, optimizer)


def _make_scheduler(
    make: Callable[[Optimizer], Any] | LRScheduler, optimizer: Optimizer
) -> LRScheduler:
    if isinstance(make, LRScheduler):
        return _checked(make, optimizer)
    try:
        made = make(optimizer)
    except (TypeError, ValueError) as error:
        raise OptionError(
            "`schedule` must make a scheduler when it is called with the optimizer.",
            received=f"{type(error).__name__}: {error}",
            fix="Bind its other arguments: functools.partial(StepLR, step_size=10), for example.",
        ) from error
    return _checked(made, optimizer)


def _checked(scheduler: object, optimizer: Optimizer) -> LRScheduler:
    if not isinstance(scheduler, LRScheduler):
        raise OptionError(
            "`schedule` must make a torch scheduler.",
            received=type(scheduler).__name__,
            fix="Return one of torch.optim.lr_scheduler over the optimizer given.",
        )
    if scheduler.optimizer is not optimizer:
        raise OptionError(
            "A scheduler must be over the Trainer's own optimizer.",
            received=f"a {type(scheduler).__name__} over another "
            f"{type(scheduler.optimizer).__name__}",
            fix="Pass the optimizer it was made with as optimizer=, or its class.",
        )
    return scheduler


def _has_several_lambdas(scheduler: LRScheduler) -> bool:
    """True if each group has a function of its own, so that their rates will differ."""
    return len({id(function) for function in getattr(scheduler, "lr_lambdas", ())}) > 1
