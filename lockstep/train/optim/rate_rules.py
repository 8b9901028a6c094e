"""Learning rates for another batch size than they were chosen for.

A batch k times as large is a step k times as rare: its gradient is less noisy, so the step can be
longer. Linear in k is the rule for SGD (Goyal et al. 2017, "Accurate, Large Minibatch SGD"), the
square root for Adam and its like (Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive
Gradient Algorithms"). Neither holds for ever, so nothing is scaled that was not asked for.

By how much a rate has been scaled is kept beside it, in the optimizer's parameter group. So it is
not scaled twice for one size, is scaled from what it was meant for when the size changes, and keeps
that through ``optimizer.state_dict()``.
"""

from dataclasses import dataclass

from torch import optim

from lockstep.errors import OptionError, Problems
from lockstep.options import check_count
from lockstep.train.input.data_adapter import DEFAULT_BATCH_SIZE

_EXPONENTS = {"linear": 1.0, "sqrt": 0.5}
_FACTOR = "batch_size_factor"


@dataclass(frozen=True, kw_only=True)
class RateRule:
    """How rates follow the batch size.

    Attributes:
        name: ``"linear"`` or ``"sqrt"``.
        reference_batch_size: the batch that the rates were chosen for.

    Raises:
        OptionError: one of them cannot be.
    """

    name: str
    reference_batch_size: int

    def __post_init__(self) -> None:
        problems = Problems()
        if self.name not in _EXPONENTS:
            problems.add(
                "`learning_rate_rule` must be 'linear', 'sqrt' or None.",
                received=repr(self.name),
                fix="Leave it out to keep the learning rate as it is.",
            )
        fix = "Give the batch size that the learning rate was chosen for."
        check_count("reference_batch_size", self.reference_batch_size, problems, fix=fix)
        problems.raise_if_any(OptionError)

    def factor(self, batch_size: int) -> float:
        """By how much rates for the reference are to be multiplied."""
        return float((batch_size / self.reference_batch_size) ** _EXPONENTS[self.name])

    def apply(self, optimizer: optim.Optimizer, batch_size: int) -> str:
        """Scale every group's rate, unless it has been for this size; returns what was done."""
        factor = self.factor(batch_size)
        changed = [group for group in optimizer.param_groups if group.get(_FACTOR, 1.0) != factor]
        for group in changed:
            for rate in ("lr", "initial_lr"):  # schedulers begin with the second
                if rate in group:
                    group[rate] = group[rate] * (factor / group.get(_FACTOR, 1.0))
            group[_FACTOR] = factor
        rates = ", ".join(
            f"{float(group['lr']):.4g}" for group in optimizer.param_groups if "lr" in group
        )
        done = f"is {rates}" if changed else f"stays {rates}"
        return (
            f"learning rate {done}: x {factor:.4g} for batch_size {batch_size}, by the "
            f"{self.name} rule from {self.reference_batch_size}"
        )


def rule_of(name: str | None, reference_batch_size: int) -> RateRule | None:
    """The rule that ``fit`` was asked for; the reference is checked also where there is none.

    Raises:
        OptionError: see ``RateRule``.
    """
    rule = RateRule(
        name="linear" if name is None else name, reference_batch_size=reference_batch_size
    )
    if name is None and reference_batch_size != DEFAULT_BATCH_SIZE:
        raise OptionError(
            "`reference_batch_size` says for which batch size a rate was chosen, for a rule to "
            "scale it.",
            received=f"reference_batch_size={reference_batch_size} without a rule",
            fix='Pass learning_rate_rule="linear" or "sqrt", or leave it out.',
        )
    return None if name is None else rule
