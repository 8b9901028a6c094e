"""Averaging in place of summing: what a Plan says of replicas that step on their own."""

import math
from typing import Literal

from lockstep.errors import OptionError, Problems
from lockstep.options import is_count, is_number
from lockstep.plan.plan_part import PlanPart

# Steps between two averages, or from one end of an epoch to the next.
Every = int | Literal["epoch"]


class Nesterov(PlanPart, frozen=True, kw_only=True):
    """An outer optimizer: what is done with the average of the replicas (DiLoCo, arXiv 2311.08105).

    Its gradient is the parameters that the replicas began with minus the average that they have
    come to: ``velocity = momentum * velocity + gradient``, and the parameters that they began with
    less ``lr * (gradient + momentum * velocity)`` are those that they go on with. With ``lr=1``
    and ``momentum=0`` that is the average itself.

    Attributes:
        lr: above 0.
        momentum: from 0 to below 1.

    Raises:
        OptionError: another number.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        problems = Problems()
        if not (is_number(self.lr) and 0 < self.lr < math.inf):
            problems.add(
                "`lr` of Nesterov must be a number above 0.",
                received=f"lr={self.lr!r}",
                fix="Use 0.7, as DiLoCo does.",
            )
        if not (is_number(self.momentum) and 0 <= self.momentum < 1):
            problems.add(
                "`momentum` of Nesterov must be a number from 0 to below 1.",
                received=f"momentum={self.momentum!r}",
                fix="Use 0.9, as DiLoCo does.",
            )
        problems.raise_if_any(OptionError)


class AveragedUpdate(PlanPart, frozen=True, kw_only=True, tag="averaged"):
    """Each replica steps on its own parameters; now and then they average them.

    Attributes:
        every: steps from one average to the next. They average at the end of each epoch, too.
        outer: what is done with the average; None takes it as it is.
        averages_optimizer: the optimizer's slots are averaged with the parameters.
    """

    every: Every
    outer: Nesterov | None = None
    averages_optimizer: bool = False

    def __str__(self) -> str:
        often = "at the end of each epoch"
        if self.every != "epoch":
            steps = "step" if self.every == 1 else f"{self.every} steps"
            often = f"every {steps} and {often}"
        slots = " with the optimizer's slots" if self.averages_optimizer else ""
        outer = ""
        if self.outer is not None:
            outer = f", then Nesterov with lr {self.outer.lr:g}, momentum {self.outer.momentum:g}"
        return f"averaged{slots} {often}{outer}"


def is_every(value: object) -> bool:
    """Whether it says how often to average."""
    return is_count(value) or value == "epoch"
