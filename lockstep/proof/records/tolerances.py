"""How large a difference between two right runs may be: rounding, and what optimizers make of it.

A difference is measured in units of rounding: in machine epsilons of the shortest dtype in which
the tensor was computed. Two right runs sum in other orders, on other numbers of ranks, so some
units are rounding. A fault changes gradients by far more: by a factor, or by other samples.

- A tensor may differ by a part of its own norm, and by a smaller part of the norm of all tensors of
  its kind: gradients that cancel are rounding of the others' size.
- Adam and its like divide by a gradient's size. Where it is only rounding, they make full steps of
  it: with such an optimizer a parameter may differ by two steps of its learning rate for each
  update. A wrong decay or learning rate is seen in the optimizer's options.
- BatchNorm's running mean follows a bias before it. It may differ by a multiple of the most that a
  parameter's full steps of rounding have made of it before.
"""

import math
from dataclasses import dataclass

import torch

# Units of rounding that two right runs may differ by, in one tensor.
_UNITS = {"float64": 2.0**20, "float32": 2.0**10, "float16": 2.0**5, "bfloat16": 2.0**3}
PART_OF_ALL = 1 / 16
MEAN_OF_AMPLIFIED = 16.0
_ADAPTIVE = ("exp_avg_sq", "exp_inf", "sum", "square_avg", "acc_delta", "velocity")


@dataclass(frozen=True)
class Tolerance:
    """Of two records.

    Attributes:
        dtype: the shortest that either computes in; empty if unknown.
        given: by the user, relative to the norm; None for the default.
    """

    dtype: str
    given: float | None = None

    def epsilon(self, dtype: str) -> float:
        """A unit of rounding of a tensor of a dtype."""
        return max(epsilon_of(dtype), epsilon_of(self.dtype))

    def relative(self, dtype: str, step: int) -> float:
        """The largest part of its norm by which a tensor may differ after a step."""
        if self.given is not None:
            return self.given
        shortest = max((dtype, self.dtype or dtype), key=epsilon_of)
        return _UNITS.get(shortest, 0.0) * epsilon_of(shortest) * (1 + max(step, 0))

    def bound(self, dtype: str, step: int, size: float, all_sizes: float) -> float:
        """The largest norm of a difference.

        Args:
            dtype: of the tensor.
            step: from 0.
            size: norm of the tensor.
            all_sizes: norm of all tensors of its kind.
        """
        return self.relative(dtype, step) * (size + PART_OF_ALL * all_sizes)


def epsilon_of(dtype: str) -> float:
    """The unit of rounding of a dtype; 0 for integers and unknown ones."""
    found = getattr(torch, dtype, None) if dtype else None
    if not isinstance(found, torch.dtype) or not (found.is_floating_point or found.is_complex):
        return 0.0
    return torch.finfo(found).eps


def is_adaptive(slots: set[str]) -> bool:
    """Whether an optimizer with these slots divides by the gradient's size."""
    return any(slot.endswith(_ADAPTIVE) for slot in slots)


def adaptive_bound(
    learning_rate: float, step: int, shape: tuple[int, ...], relative: float
) -> float:
    """The norm of what an adaptive optimizer may have made of rounding.

    Biases may have gradients that are rounding throughout; of matrices only few elements do.
    """
    share = 1.0 if len(shape) < 2 else min(1.0, 16 * relative)
    return 2 * learning_rate * (step + 1) * math.sqrt(share * math.prod(shape))
