"""Infers the reduction (mean or sum) of a loss computed inside a model or a training step.

Most such losses end in one of torch's own losses, in ``mean()`` or ``sum()``, or in a sum divided
by a sum of weights. Their denominators are recorded while they run, padding and class weights
included, and give the weight of a share. Any other loss counts as a mean over the samples.

Dependence between samples is not detected here, but by ``parallel.independence.reduction_trial``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.capture.calls import name_of
from lockstep.parallel.loss.reduction_inference import OF_CLASSES, OF_ELEMENTS, Known, options_of
from lockstep.parallel.loss.torch_losses import class_weights

_REDUCED = ("mean", "sum")
_SAME = frozenset(
    ["to", "float", "double", "half", "bfloat16", "detach", "clone", "squeeze", "contiguous"]
)
_ADDED = frozenset(["add", "add_", "__iadd__", "sub", "sub_", "__isub__", "rsub", "__rsub__"])
_SCALED = frozenset(["mul", "mul_", "__imul__", "neg"])
_DIVIDED = frozenset(["div", "div_", "__idiv__", "__itruediv__", "true_divide"])

# Reductions by tensor, for the tensor's lifetime.
_seen: Any = WeakIdKeyDictionary()


def seen_mean(scalar: torch.Tensor) -> Known | None:
    """The reduction of a scalar computed under ``InnerMeans``; None if unknown."""
    found: Known | None = _seen.get(scalar)
    return found


class InnerMeans(TorchFunctionMode):
    """Records which scalars of a model, or of a training step, are means or sums."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        known = None if torch.compiler.is_compiling() else _before(func, args, kwargs)
        result = func(*args, **kwargs)
        if not (isinstance(result, torch.Tensor) and result.dim() == 0):
            return result
        if not torch.compiler.is_compiling():
            found = known if known is not None else _reduced(func, args, kwargs)
            if found is not None:
                _seen[result] = found
            else:
                _seen.pop(result, None)  # it was changed in place
        return result


def _before(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Known | None:
    """The reduction of a result, from its scalar arguments before the call may change them."""
    scalars = [each for each in args if isinstance(each, torch.Tensor) and not each.dim()]
    found = [_seen.get(scalar) for scalar in scalars]
    if not any(found) or kwargs:
        return None
    name = name_of(func)
    if name in _SAME or name in _REDUCED:
        known: Known | None = found[0]
        return known
    numbers = [each for each in args if isinstance(each, int | float)]
    if len(scalars) + len(numbers) < len(args) or None in found:
        return None
    return _combined(name, args, scalars, found, numbers)


def _combined(
    name: str,
    args: Sequence[Any],
    scalars: Sequence[torch.Tensor],
    found: Sequence[Known],
    numbers: Sequence[float],
) -> Known | None:
    """A known scalar combined with a number, or with another known scalar."""
    if len(found) == 2:
        if name in _DIVIDED:
            return _over_sum(found, scalars[1])
        return found[0] if name in _ADDED and found[0] == found[1] else None
    if name in _DIVIDED:
        return found[0] if args[0] is scalars[0] else None
    is_shifted_sum = name in _ADDED and found[0].weight is None and any(numbers)
    return None if is_shifted_sum or name not in _ADDED | _SCALED else found[0]


def _over_sum(found: Sequence[Known], divisor: torch.Tensor) -> Known | None:
    """A sum divided by a sum of weights."""
    is_mean = found[0].weight is None and found[1].weight is None and not divisor.requires_grad
    weight = divisor.item() if is_mean else -1.0
    return Known(weight) if weight >= 0 else None


def _reduced(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Known | None:
    """The reduction by one of torch's losses, or by ``mean`` or ``sum``."""
    if func in OF_CLASSES or func in OF_ELEMENTS:
        return _loss(func, options_of(func, args, kwargs))
    name = name_of(func)
    if name not in _REDUCED or len(args) != 1 or kwargs or not isinstance(args[0], torch.Tensor):
        return None
    return Known(float(args[0].numel()) if name == "mean" else None)


def _loss(func: Any, options: Mapping[str, Any]) -> Known | None:
    output, target, reduction = options["input"], options["target"], options["reduction"]
    is_old = options.get("size_average") is not None or options.get("reduce") is not None
    if is_old or reduction not in ("mean", "sum", "batchmean"):
        return None
    if reduction == "sum":
        return Known(None)
    if func in OF_CLASSES:
        if output.dim() < 2:
            return None
        weights = class_weights(output, target, options["weight"], options["ignore_index"])
        return Known(weights.sum(dtype=torch.float64).item())
    divides = func not in (F.binary_cross_entropy, F.binary_cross_entropy_with_logits)
    if output.shape != target.shape or (divides and options.get("weight") is not None):
        return None
    return Known(float(len(output) if reduction == "batchmean" else output.numel()))
