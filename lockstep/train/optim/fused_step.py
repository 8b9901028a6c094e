"""The fastest form of torch's own optimizers: a fused kernel.

It makes one pass over weights, gradients and slots, where the plain form, torch's default on a CPU,
makes up to ten. On accelerators Adam's kernel can also leave an update out by itself, for which a
host need not wait (``parallel.data_parallel.late_check``). Results differ from those of other forms
by rounding. A user who names a form, with ``fused=False`` or ``foreach=True``, keeps it.
"""

import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import optim
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lockstep import accelerators
from lockstep.train.optim.optimizer_kinds import LAZY

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


def step_in_fastest_form(
    optimizer: optim.Optimizer, step: Callable[[], object], last: "LastStep | None" = None
) -> None:
    """Step one of torch's own optimizers without hooks: by ``step``, or by the kernel alone.

    Args:
        optimizer: the optimizer.
        step: steps it.
        last: its last step, to look at less than at the first.
    """
    if not step_adam(optimizer, last):
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
    groups = []
    for group in optimizer.param_groups if type(optimizer) in _KINDS else ():
        used = _supported(optimizer, group) if group["fused"] is None else None
        if used is not None:
            group["fused"] = True
            groups.append(group)
            for parameter, slots in used:
                if slots and not parameter.is_cpu:
                    _bring_count(parameter, slots)
    try:
        yield
    finally:
        for group in groups:
            group["fused"] = None


def step_adam(optimizer: optim.Optimizer, last: "LastStep | None" = None) -> bool:
    """Step an Adam or AdamW; its own ``step`` makes 50 calls of Python around the kernel.

    Args:
        optimizer: the optimizer.
        last: see ``step_in_fastest_form``.

    Returns:
        False if it must make the step itself: another optimizer, or slots do not exist yet.
    """
    if type(optimizer) not in _ADAMS:
        return False
    last = last or LastStep()
    calls = _calls_again(optimizer, last.found) or _calls(optimizer, last)
    if calls is None:
        return False
    guard = vars(optimizer).get(_GUARD)
    with torch.set_grad_enabled(False):  # half the calls of no_grad
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
                torch._foreach_sub_(tensors[-1], [guard] * len(tensors[-1]))
    return True


# What the kernel gets of a group: parameters, gradients, and slots by name.
_Tensors = tuple[list[torch.Tensor], ...]
_Calls = list[tuple[dict[str, Any], _Tensors]]


class _Found(NamedTuple):
    """What was found at a step of an optimizer; while it is so, only gradients are looked at.

    Attributes:
        held: see ``_held_by``.
        unused: parameters without gradients.
        calls: each group, what the kernel got but for gradients, the slots of its parameters, and
            the strides of these.
    """

    held: list[object]
    unused: list[torch.Tensor]
    calls: list[tuple[dict[str, Any], _Tensors, list[dict[str, Any]], list[tuple[int, ...]]]]


class LastStep:
    """The last step of an optimizer; it keeps the optimizer's slots in memory.

    Attributes:
        found: at that step; None before.
    """

    found: _Found | None = None


def _calls(optimizer: optim.Optimizer, last: LastStep) -> _Calls | None:
    """The groups with what the kernel gets of each; None if it cannot make the step."""
    calls: _Calls = []
    members = [one for group in optimizer.param_groups for one in group["params"]]
    unused = [one for one in members if one.grad is None]
    last.found = None
    found = _Found(_held_by(optimizer), unused, [])
    for group in optimizer.param_groups:
        used = _supported(optimizer, group)
        if used is None or not all(slots for _, slots in used):
            return None
        for parameter, slots in used:
            if not parameter.is_cpu:
                _bring_count(parameter, slots)
        parameters, own = [one for one, _ in used], [slots for _, slots in used]
        means, squares, counts = (
            [slots[name] for slots in own] for name in ("exp_avg", "exp_avg_sq", "step")
        )
        largest = [slots["max_exp_avg_sq"] for slots in own] if group["amsgrad"] else []
        gradients = [one.grad for one in parameters if one.grad is not None]
        if used:
            calls.append((group, (parameters, gradients, means, squares, largest, counts)))
            strides = [one.stride() for one in parameters]
            found.calls.append((group, (parameters, means, squares, largest, counts), own, strides))
    last.found = found
    return calls


def _calls_again(optimizer: optim.Optimizer, known: _Found | None) -> _Calls | None:
    """The result of ``_calls`` if all but the values is as it was at the last step, else None."""
    if known is None:
        return None
    held = _held_by(optimizer)
    if len(held) != len(known.held) or not all(map(operator.is_, held, known.held)):
        return None
    for one in known.unused:
        if one.grad is not None:
            return None
    calls: _Calls = []
    for group, tensors, own, strides in known.calls:
        parameters, means, squares, largest, counts = tensors
        gradients, dtype = [], parameters[0].dtype
        if bool(largest) is not group["amsgrad"] or not _has_plain_options(group):
            return None
        for number, (parameter, slots) in enumerate(zip(parameters, own, strict=True)):
            gradient, stride = parameter.grad, strides[number]
            if (
                gradient is None
                or gradient.layout is not torch.strided
                or gradient.dtype is not dtype
                or gradient.stride() != stride
                or parameter.dtype is not dtype
                or parameter.stride() != stride
                or slots.get("exp_avg") is not means[number]
                or slots.get("exp_avg_sq") is not squares[number]
                or slots.get("step") is not counts[number]
                or (largest and slots.get("max_exp_avg_sq") is not largest[number])
            ):
                return None
            gradients.append(gradient)
        calls.append((group, (parameters, gradients, means, squares, largest, counts)))
    return calls


def _held_by(optimizer: optim.Optimizer) -> list[object]:
    """An optimizer's groups, each with its parameters, and the slots of each parameter."""
    held: list[object] = []
    for group in optimizer.param_groups:
        held.append(group)
        held += group["params"]
    held += optimizer.state.values()
    return held


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
    for number in (group["lr"], *group.get("betas", ())):
        if isinstance(number, torch.Tensor):
            return False
    return True


def _has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type == "cpu":
        return dtype in _CPU_DTYPES
    return dtype.is_floating_point and accelerators.fuses_adam(device)


# A parameter that has a gradient, and its slots.
_Used = tuple[torch.Tensor, dict[str, Any]]


def _supported(optimizer: optim.Optimizer, group: Mapping[str, Any]) -> list[_Used] | None:
    """What a fused kernel would step; None if it does not support the group, or the user's form."""
    if not _has_plain_options(group):
        return None
    used: list[_Used] = []
    device, dtype = torch.device("meta"), torch.float32
    for parameter in group["params"]:
        gradient = parameter.grad
        if gradient is None:
            continue
        if not used:
            device, dtype = parameter.device, parameter.dtype
            is_for_cpu_only = type(optimizer) not in _ADAMS
            if not _has_kernel(device, dtype) or (is_for_cpu_only and device.type != "cpu"):
                return None
        if parameter.dtype != dtype or parameter.device != device:
            return None
        # The kernel reads memory in order, and ignores strides.
        is_contiguous = parameter.is_contiguous()
        if not is_contiguous and parameter.stride() != torch.empty_like(parameter).stride():
            return None  # there are holes
        slots = optimizer.state.get(parameter, {})
        for name, one in (("gradient", gradient), *slots.items()):
            if name == "step":
                continue
            if one.layout != torch.strided or one.dtype != dtype:
                return None
            is_alike = is_contiguous and one.is_contiguous()
            if not (is_alike or one.stride() == parameter.stride()):
                return None
        used.append((parameter, slots))
    return used


def _bring_count(parameter: torch.Tensor, slots: dict[str, Any]) -> None:
    """Bring the count of steps to where the kernel reads it: an accelerator's memory."""
    if slots["step"].is_cpu:
        slots["step"] = slots["step"].to(parameter.device, torch.float32)


def step_plainly(optimizer: optim.Optimizer) -> None:
    """Step one of torch's own optimizers without hooks, without torch's wrappers.

    The wrappers run hooks, and import torch.compile at the first step, which takes a second.
    """
    step = _plain_step(type(optimizer))  # type: ignore[arg-type]  # a class is hashable
    checks = torch.sparse.check_sparse_tensor_invariants
    with (
        torch.set_grad_enabled(optimizer.defaults.get("differentiable", False)),
        # The present setting, but explicit: torch warns at sparse tensors if none was chosen.
        checks(checks.is_enabled()) if type(optimizer) in LAZY else nullcontext(),  # type: ignore[no-untyped-call]
    ):
        step(optimizer)


@functools.cache
def _plain_step(kind: Any) -> Any:
    return inspect.unwrap(kind.step)


def has_plain_step(optimizer: optim.Optimizer) -> bool:
    """True if the wrappers of its ``step`` are torch's and run no hooks."""
    outermost: Any = type(optimizer).step
    return (
        outermost.__globals__["__name__"].startswith("torch.")
        and "step" not in vars(optimizer)
        and not _global_optimizer_pre_hooks
        and not _global_optimizer_post_hooks
    )
