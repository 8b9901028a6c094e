"""Scales learning rates to another batch size than they were chosen for.

With batches k times as large, steps are k times as few and gradients less noisy, so steps can be
longer. Linear in k is the rule for SGD (Goyal et al. 2017, "Accurate, Large Minibatch SGD"), the
square root for Adam and its like (Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive
Gradient Algorithms"). Neither holds without limit, so rates are scaled only on request.

The optimizer's parameter group keeps the factor. So a rate is not scaled twice for one size, is
scaled from its original value when the size changes, and ``optimizer.state_dict()`` has the factor.
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
        OptionError: one of them is invalid.
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
        """The factor for rates that were chosen for the reference batch size."""
        return float((batch_size / self.reference_batch_size) ** _EXPONENTS[self.name])

    def apply(self, optimizer: optim.Optimizer, batch_size: int) -> str:
        """Scale every group's rate, unless it is scaled for this size; returns a line to show."""
        factor = self.factor(batch_size)
        changed = [group for group in optimizer.param_groups if group.get(_FACTOR, 1.0) != factor]
        for group in changed:
            for rate in ("lr", "initial_lr"):  # schedulers start from the second
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
    """The rule of ``fit``'s arguments; the reference is checked also without a rule.

    Raises:
        OptionError: see ``RateRule``.
    """
    rule = RateRule(
        name="linear" if name is None else name, reference_batch_size=reference_batch_size
    )
    if name is None and reference_batch_size != DEFAULT_BATCH_SIZE:
        raise OptionError(
            "`reference_batch_size` is for a learning rate rule: the batch size that the rate was "
            "chosen for.",
            received=f"reference_batch_size={reference_batch_size} without a rule",
            fix='Pass learning_rate_rule="linear" or "sqrt", or leave it out.',
        )
    return None if name is None else rule
