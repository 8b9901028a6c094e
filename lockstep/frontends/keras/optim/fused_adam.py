"""Adam in one pass over the memory.

Keras's Adam on its PyTorch backend makes ten passes over weights, gradients and slots. Torch has a
kernel that makes one (``torch.optim.Adam(fused=True)``). The rule is the same but for where epsilon
is added: Keras adds it to the root of the velocity, torch to this root after its correction for the
first steps (Kingma and Ba, https://arxiv.org/abs/1412.6980, end of section 2, and algorithm 1). So
the kernel gets an epsilon that is divided by the correction.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

_KINDS = ("Adam", "AdamW")
_DTYPES = (torch.float32, torch.float64)

# What else an optimizer of Keras may do in a step.
_EXTRAS = (
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
    "gradient_accumulation_steps",
    "use_ema",
    "weight_decay",
)


def use_fused_adam(optimizer: Any) -> None:
    """Make a Keras optimizer, if it is an Adam, use the kernel for tensors that it supports."""
    if _is_adam(optimizer):
        plain = optimizer._parallel_update_step
        vars(optimizer)["_parallel_update_step"] = partial(_update_or, plain, optimizer)


def step_bare_adam(optimizer: Any, grads: list[torch.Tensor], variables: Sequence[Any]) -> bool:
    """Make a whole step, if that is only Adam's update of variables without constraints.

    Keras's other work in a step takes longer than the update of a small model. Returns False if the
    step needs it.
    """
    is_bare = _is_adam(optimizer) and not any(getattr(optimizer, name) for name in _EXTRAS)
    if not is_bare or any(one.constraint or one.overwrite_with_gradient for one in variables):
        return False
    if not _update(optimizer, grads, variables, optimizer._get_current_learning_rate()):
        return False
    optimizer._iterations.value.add_(1)
    return True


def _is_adam(optimizer: Any) -> bool:
    kind = type(optimizer)
    return kind.__name__ in _KINDS and kind.__module__.startswith("keras.src.")


def _update_or(
    plain: Any, adam: Any, grads: list[torch.Tensor], variables: list[Any], learning_rate: Any
) -> None:
    """``_parallel_update_step`` of Keras's Adam."""
    if not _update(adam, grads, variables, learning_rate):
        plain(grads, variables, learning_rate)


def _update(
    adam: Any, grads: list[torch.Tensor], variables: Sequence[Any], learning_rate: Any
) -> bool:
    """Update with the kernel; returns False for tensors that it does not support."""
    numbers = [adam._get_variable_index(variable) for variable in variables]
    slots = [adam._momentums, adam._velocities, *([adam._velocity_hats] if adam.amsgrad else [])]
    weights = [variable._value for variable in variables]
    momentums, velocities, *hats = ([kind[number]._value for number in numbers] for kind in slots)
    if not all(map(_is_taken, weights, grads, momentums, velocities)):
        return False
    # ``iterations`` as in Keras, which makes a variable of it.
    step = float(adam._iterations._value // (adam.gradient_accumulation_steps or 1)) + 1
    torch._fused_adam_(
        weights,
        grads,
        momentums,
        velocities,
        hats[0] if hats else [],
        [torch.tensor(step)] * len(weights),
        lr=float(learning_rate),
        beta1=adam.beta_1,
        beta2=adam.beta_2,
        weight_decay=0.0,  # Keras has taken it off already
        eps=adam.epsilon / math.sqrt(1 - adam.beta_2**step),
        amsgrad=adam.amsgrad,
        maximize=False,
    )
    return True


def _is_taken(weight: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether the kernel supports these: on a CPU it ignores strides and reads memory in order."""
    return (
        weight.is_cpu
        and weight.dtype in _DTYPES
        and all(
            one.is_contiguous() and one.dtype == weight.dtype and one.shape == weight.shape
            for one in (weight, *others)
        )
    )
