"""The fastest form of torch's own optimizers: a fused kernel.

It makes one pass over weights, gradients and slots, where the plain form, torch's default on a CPU,
makes up to ten. On accelerators Adam's kernel can also leave an update out by itself, for which a
host need not wait (``parallel.data_parallel.late_check``). Results differ from those of other forms
by rounding. A user who names a form, with ``fused=False`` or ``foreach=True``, keeps it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import optim

from lockstep import accelerators

_ADAMS = frozenset({optim.Adam, optim.AdamW})
# Not SGD: its kernel gains little, and refuses parameters that are first used in a later step.
_KINDS = _ADAMS | {optim.Adagrad}
_CPU_DTYPES = (torch.float32, torch.float64)
# Where an optimizer has a tensor that is 1 where the update must be left out.
_GUARD = "found_inf"


def has_guard(optimizer: optim.Optimizer) -> bool:
    """True if its step leaves out the update, slots included, where ``found_inf`` is 1."""
    if type(optimizer) in _ADAMS:
        return all(group["fused"] or _may_fuse(group) for group in optimizer.param_groups)
    if type(optimizer) is not optim.SGD or not all(one["fused"] for one in optimizer.param_groups):
        return False
    # A first step makes momentum that is not initialized, also where it updates nothing.
    return all(
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
            step_unless_refused(optimizer, step)


def step_unless_refused(optimizer: optim.Optimizer, step: Callable[[], object]) -> None:
    """Step an optimizer; if its form reads no guard, wait for the device's verdict before."""
    guard = vars(optimizer).get(_GUARD)
    if guard is None or all(group["fused"] for group in optimizer.param_groups):
        step()
    elif not guard.item():
        del vars(optimizer)[_GUARD]
        try:
            step()
        finally:
            vars(optimizer)[_GUARD] = guard


@contextmanager
def fastest_form(optimizer: optim.Optimizer) -> Iterator[None]:
    """Within the block, a step is made by fused kernels, in groups where the user chose no form."""
    groups = [
        group
        for group in (optimizer.param_groups if type(optimizer) in _KINDS else ())
        if group["fused"] is None and _is_fused(optimizer, group)
    ]
    for group in groups:
        group["fused"] = True
        _bring_counts(group, optimizer.state)
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
    if type(optimizer) not in _ADAMS:
        return False
    state, calls = optimizer.state, []
    for group in optimizer.param_groups:
        if not _is_fused(optimizer, group):
            return False
        tensors: tuple[list[torch.Tensor], ...] = ([], [], [], [], [], [])
        used, gradients, means, squares, largest, steps = tensors
        _bring_counts(group, state)
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
    guard = vars(optimizer).get(_GUARD)
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
                found_inf=guard,
            )
            if guard is not None:
                torch._foreach_sub_(tensors[-1], [guard] * len(used))
    return True


def _may_fuse(group: Mapping[str, Any]) -> bool:
    """True if the user chose no form, and all parameters are on a device that fuses Adam's step."""
    return (
        group["fused"] is None
        and _has_plain_options(group)
        and all(
            one.device.type != "cpu" and _has_kernel(one.device, one.dtype)
            for one in group["params"]
            if one.requires_grad
        )
    )


def _has_plain_options(group: Mapping[str, Any]) -> bool:
    """True if the user chose the fused form or none, and no option that its kernel lacks here."""
    is_chosen = group["fused"] or (group["fused"] is None and group["foreach"] is None)
    if not is_chosen or group["differentiable"] or group.get("capturable"):
        return False
    numbers = (group["lr"], *group.get("betas", ()))
    return not any(isinstance(number, torch.Tensor) for number in numbers)


def _has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type == "cpu":
        return dtype in _CPU_DTYPES
    return dtype.is_floating_point and accelerators.fuses_adam(device)


def _is_fused(optimizer: optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """True if the user chose the fused form or none, and its kernel supports the group."""
    if not _has_plain_options(group):
        return False
    device = dtype = None
    for parameter in group["params"]:
        gradient = parameter.grad
        if gradient is None:
            continue
        if device is None:
            device, dtype = parameter.device, parameter.dtype
            on_accelerator = device.type != "cpu"
            if not _has_kernel(device, dtype) or (on_accelerator and type(optimizer) not in _ADAMS):
                return False
        elif parameter.dtype != dtype or parameter.device != device:
            return False
        # The kernel reads memory in order, and ignores strides.
        is_contiguous = parameter.is_contiguous()
        if not is_contiguous and parameter.stride() != torch.empty_like(parameter).stride():
            return False  # there are holes
        slots = optimizer.state.get(parameter, {})
        for one in (gradient, *(value for name, value in slots.items() if name != "step")):
            if one.layout != torch.strided or one.dtype != dtype:
                return False
            is_alike = is_contiguous and one.is_contiguous()
            if not (is_alike or one.stride() == parameter.stride()):
                return False
    return True


def _bring_counts(group: Mapping[str, Any], state: Mapping[torch.Tensor, Any]) -> None:
    """Bring the counts of steps to where the kernel reads them: an accelerator's memory."""
    for parameter in group["params"]:
        if parameter.is_cpu:
            return
        count = state.get(parameter, {}).get("step")
        if count is not None and count.is_cpu:
            state[parameter]["step"] = count.to(parameter.device, torch.float32)
