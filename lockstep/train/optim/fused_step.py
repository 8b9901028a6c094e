"""The fastest form of torch's own optimizers on a CPU: a fused kernel.

It makes one pass over weights, gradients and slots, where the plain form, torch's default there,
makes up to ten. Results differ from the plain form's by rounding. A user who names a form, with
``fused=False`` or ``foreach=True``, keeps it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import optim

# Not SGD: its kernel gains little, and refuses parameters that are first used in a later step.
_KINDS = frozenset({optim.Adam, optim.AdamW, optim.Adagrad})
_DTYPES = (torch.float32, torch.float64)


def has_guard(optimizer: optim.Optimizer) -> bool:
    """True if its step leaves out the update, slots included, where ``found_inf`` is 1."""
    if type(optimizer) not in (optim.Adam, optim.AdamW, optim.SGD):
        return False
    if not all(group["fused"] for group in optimizer.param_groups):
        return False
    # A first step makes momentum that is not initialized, also where it updates nothing.
    return type(optimizer) is not optim.SGD or all(
        optimizer.state.get(parameter, {}).get("momentum_buffer") is not None
        for group in optimizer.param_groups
        if group["momentum"]
        for parameter in group["params"]
        if parameter.requires_grad
    )


def step_in_fastest_form(optimizer: optim.Optimizer, step: Callable[[], object]) -> None:
    """Step one of torch's own optimizers without hooks: by ``step``, or by the kernel alone."""
    if not step_adam(optimizer):
        with fastest_form(optimizer):
            step()


@contextmanager
def fastest_form(optimizer: optim.Optimizer) -> Iterator[None]:
    """Within the block, a step is made by fused kernels, in groups where the user chose no form."""
    groups = [
        group
        for group in (optimizer.param_groups if type(optimizer) in _KINDS else ())
        if group["fused"] is None and _is_fused(group, optimizer.state)
    ]
    for group in groups:
        group["fused"] = True
    try:
        yield
    finally:
        for group in groups:
            group["fused"] = None


def step_adam(optimizer: optim.Optimizer) -> bool:
    """Step an Adam or AdamW; its own ``step`` makes 50 calls of Python around the kernel.

    Returns:
        False if it must make the step itself: another optimizer, or slots do not exist yet.
    """
    if type(optimizer) not in (optim.Adam, optim.AdamW):
        return False
    state, calls = optimizer.state, []
    for group in optimizer.param_groups:
        if not _is_fused(group, state):
            return False
        tensors: tuple[list[torch.Tensor], ...] = ([], [], [], [], [], [])
        used, gradients, means, squares, largest, steps = tensors
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            slots = state.get(parameter)
            if not slots:
                return False
            used.append(parameter)
            gradients.append(parameter.grad)
            means.append(slots["exp_avg"])
            squares.append(slots["exp_avg_sq"])
            if group["amsgrad"]:
                largest.append(slots["max_exp_avg_sq"])
            steps.append(slots["step"])
        if used:
            calls.append((group, tensors))
    with torch.no_grad():
        for group, tensors in calls:
            kernel = torch._fused_adam_
            if group["decoupled_weight_decay"]:
                kernel = torch._fused_adamw_
            torch._foreach_add_(tensors[-1], 1)
            beta1, beta2 = group["betas"]
            kernel(
                *tensors,
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=group["amsgrad"],
                maximize=group["maximize"],
            )
    return True


def _is_fused(group: Mapping[str, Any], state: Mapping[torch.Tensor, Any]) -> bool:
    """True if the user chose the fused form or none, and its kernel supports the group."""
    is_chosen = group["fused"] or (group["fused"] is None and group["foreach"] is None)
    if not is_chosen or group["differentiable"] or group.get("capturable"):
        return False
    for number in (group["lr"], *group.get("betas", ())):
        if isinstance(number, torch.Tensor):
            return False
    dtype = None
    for parameter in group["params"]:
        gradient = parameter.grad
        if gradient is None:
            continue
        dtype = dtype or parameter.dtype
        if not parameter.is_cpu or dtype not in _DTYPES or parameter.dtype != dtype:
            return False
        # The kernel reads memory in order, and ignores strides.
        is_contiguous = parameter.is_contiguous()
        if not is_contiguous and parameter.stride() != torch.empty_like(parameter).stride():
            return False  # there are holes
        slots = [one for name, one in state.get(parameter, {}).items() if name != "step"]
        for one in (gradient, *slots):
            if one.layout != torch.strided or one.dtype != dtype:
                return False
            is_alike = is_contiguous and one.is_contiguous()
            if not (is_alike or one.stride() == parameter.stride()):
                return False
    return True
