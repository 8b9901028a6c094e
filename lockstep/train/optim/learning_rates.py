"""Learning-rate schedules: torch's schedulers, stepped where a plain loop would step them.

A scheduler is rank 0's affair: it holds the user's own optimizer and changes its options. How these
reach the other ranks is not its business: per epoch they go with what callbacks have changed
(``train.callbacks.rank_sync``), per step through memory (``train.runtime.shared_options``).

``every="step"`` counts updates: a batch of total weight 0 makes none, and moves no schedule.
"""

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR

from lockstep.errors import OptionError, Problems
from lockstep.units import listed

EVERY = ("step", "epoch")
_BY_STEP = (OneCycleLR, CyclicLR)


@dataclass(frozen=True)
class Schedule:
    """When a torch scheduler steps, and what it looks at.

    Args:
        make: a scheduler's class or a function, called with the optimizer, or a scheduler over the
            Trainer's own optimizer.
        every: ``"step"`` for after every update, ``"epoch"`` for after every epoch. None is what
            the scheduler is made for: steps for ``OneCycleLR`` and ``CyclicLR``, else epochs.
        monitor: of ``ReduceLROnPlateau``, the name in the logs of what it looks at; None is
            ``"val_loss"`` where there is validation data, else ``"loss"``.

    Raises:
        OptionError: a part cannot be what it is.
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
        asked_monitor: the name that it was given of what it looks at; None for the default.
        looks: it looks at a metric.

    Args:
        schedule: what to run.
        optimizer: what it changes.

    Raises:
        OptionError: no scheduler over this optimizer can be made of it.
    """

    def __init__(self, schedule: Schedule, optimizer: Optimizer) -> None:
        self.scheduler = _make_scheduler(schedule.make, optimizer)
        self.every = schedule.every or ("step" if isinstance(self.scheduler, _BY_STEP) else "epoch")
        self._optimizer = optimizer
        self.asked_monitor = schedule.monitor
        self._monitor: str | None = None
        self.looks = "metrics" in inspect.signature(self.scheduler.step).parameters
        self._rates = self._present_rates()
        self._differ = len(set(self._rates)) > 1 or _has_several_lambdas(self.scheduler)
        self._check_monitor()

    def state_dict(self) -> dict[str, Any]:
        """What it must know to go on."""
        own = {"rates": list(self._rates), "differ": self._differ}
        return {"scheduler": self.scheduler.state_dict(), **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` has given; the optimizer has its options already."""
        self.scheduler.load_state_dict(state["scheduler"])
        self._rates, self._differ = list(state["rates"]), state["differ"]

    def replay(self, start: dict[str, Any], num_moves: int) -> None:
        """Be where a schedule is that began with ``start``, and has moved so many times since.

        Args:
            start: from ``state_dict``; the optimizer has the options of then.
            num_moves: how often.
        """
        self.load_state_dict(start)
        vars(self._optimizer)["_opt_called"] = True  # torch's schedulers ask
        for _ in range(num_moves):
            self._advance()
        self._rates = self._present_rates()

    def begin(self, names: Collection[str], num_steps: int | None) -> None:
        """Before a ``fit``: what is known to fail fails here.

        Args:
            names: of the logs of an epoch.
            num_steps: that it is going to make; None if nobody knows.

        Raises:
            OptionError: there is no such log, or no so many steps are left.
        """
        self._rates = self._present_rates()
        if self.looks:
            default = "val_loss" if "val_loss" in names else "loss"
            self._monitor = self.asked_monitor or default
            if self._monitor not in names:
                raise _unknown_monitor(self._monitor, names)
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
        """After a step of the optimizer, or a batch of which there was none to make."""
        if not is_update:
            return
        vars(self._optimizer)["_opt_called"] = True  # by whichever rank: torch's schedulers ask
        if self.every == "step":
            self._rates = self._present_rates()
            self._advance()

    def end_epoch(self, logs: dict[str, Any]) -> dict[str, float]:
        """After an epoch; returns the rates of its last update, by their names in the logs."""
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
                fix="The weights are those after the last step. Look at what it is made with.",
            ) from error

    def _check_monitor(self) -> None:
        kind = type(self.scheduler).__name__
        if self.looks and self.every == "step":
            raise OptionError(
                f"{kind} looks at an epoch's logs.",
                received="every='step'",
                fix="Use every='epoch'.",
            )
        if self.asked_monitor is not None and not self.looks:
            raise OptionError(
                "`monitor` is for a scheduler that looks at a metric, as ReduceLROnPlateau.",
                received=f"monitor={self.asked_monitor!r} for a {kind}",
                fix="Leave it out.",
            )


def make_schedule(schedule: Any, optimizer: Optimizer | None) -> RunningSchedule:
    """What the Trainer was given as a schedule, over its optimizer.

    Raises:
        OptionError: it cannot be.
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
    """A function for each group: their rates will differ where they do not yet."""
    return len({id(function) for function in getattr(scheduler, "lr_lambdas", ())}) > 1


def _unknown_monitor(monitor: str, names: Collection[str]) -> OptionError:
    return OptionError(
        "`monitor` of a Schedule must be a name in the logs.",
        received=repr(monitor),
        fix=f"Use one of {listed(sorted(names))}.",
    )
