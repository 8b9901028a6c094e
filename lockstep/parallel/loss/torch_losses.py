"""Recognises torch's own losses, to compute the denominator or the values of their mean.

Those inside a user's function are recognised while it runs
(``parallel.loss.reduction_inference``).
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lockstep import accelerators

Loss = Callable[..., Any]


def _options_of(loss: Loss) -> tuple[Any, dict[str, Any]]:
    """The underlying function or module, and the options that partials have bound."""
    if isinstance(loss, functools.partial):
        inner, options = _options_of(loss.func)
        return inner, {**options, **loss.keywords}
    return loss, {}


def _is_torch_loss(loss: Any) -> bool:
    if isinstance(loss, nn.Module):
        return getattr(_forward_of(loss), "__module__", None) == nn.MSELoss.__module__
    return getattr(loss, "__module__", None) == F.__name__


def _forward_of(loss: nn.Module) -> Any:
    """The class's ``forward``: a subclass that inherits it counts as torch's own loss."""
    return getattr(type(loss), "forward", None)


def reduction_of(loss: Loss) -> str | None:
    """``reduction`` of one of torch's own losses; None for any other."""
    inner, options = _options_of(loss)
    if not _is_torch_loss(inner):
        return None
    if isinstance(inner, nn.Module):
        return getattr(inner, "reduction", None)
    return str(options.get("reduction", "mean"))


def unreduced(loss: Loss) -> Loss:
    """The same torch loss, element by element."""
    if isinstance(loss, nn.Module):
        single = copy.copy(loss)
        vars(single)["reduction"] = "none"
        return single
    return functools.partial(loss, reduction="none")


@dataclass(frozen=True, kw_only=True)
class ClassLoss:
    """Cross-entropy or NLL with mean reduction, as the pair (total, weight).

    The denominator is the sum of the class weights of the targets that are not ``ignore_index``
    (torch documentation of CrossEntropyLoss, reduction 'mean'), or, for targets given as class
    probabilities, the number of positions.
    """

    function: Callable[..., torch.Tensor]
    class_weight: torch.Tensor | None
    ignore_index: int
    options: dict[str, Any]

    @classmethod
    def recognise(cls, loss: Loss) -> "ClassLoss | None":
        if isinstance(loss, nn.Module):
            return cls._of_module(loss)
        if isinstance(loss, functools.partial) and loss.args:
            return None
        inner, options = _options_of(loss)
        if isinstance(inner, nn.Module):
            return None if options else cls._of_module(inner)
        if inner not in (F.cross_entropy, F.nll_loss) or reduction_of(loss) != "mean":
            return None
        options.pop("reduction", None)
        return cls(
            function=inner,
            class_weight=options.get("weight"),
            ignore_index=options.get("ignore_index", -100),
            options=options,
        )

    @classmethod
    def _of_module(cls, loss: nn.Module) -> "ClassLoss | None":
        forward = type(loss).forward
        options: dict[str, Any] = {}
        function: Callable[..., torch.Tensor]
        if forward is nn.CrossEntropyLoss.forward:
            function, options = F.cross_entropy, {"label_smoothing": loss.label_smoothing}
        elif forward is nn.NLLLoss.forward:
            function = F.nll_loss
        else:
            return None
        if loss.reduction != "mean":
            return None
        weight: Any = loss.weight
        ignore_index: Any = loss.ignore_index
        options |= {"weight": weight, "ignore_index": ignore_index}
        return cls(
            function=function, class_weight=weight, ignore_index=ignore_index, options=options
        )

    def __call__(
        self,
        output: torch.Tensor,
        target: Any,
        sample_weight: torch.Tensor | None,
        least_target: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | float]:
        options = self.options
        if self.class_weight is not None:
            options = {**options, "weight": self.class_weight.to(output)}
        elif sample_weight is None and self._counts_all(target, least_target):
            total = self.function(output, target, reduction="sum", **options)
            return total, float(target.numel())
        weights = class_weights(output, target, self.class_weight, self.ignore_index)
        if sample_weight is None:
            total = self.function(output, target, reduction="sum", **options)
            return total, weights.sum(dtype=torch.float64)
        losses = self.function(output, target, reduction="none", **options)
        per_sample = sample_weight.to(losses).reshape(-1, *[1] * (losses.dim() - 1))
        return (losses * per_sample).sum(), (weights * per_sample).sum(dtype=torch.float64)

    def _counts_all(self, target: torch.Tensor, least: int | None) -> bool:
        """True if no target is ``ignore_index``, as far as a glance at the smallest one says."""
        if target.is_floating_point() or not target.numel():
            return False
        if least is None and not accelerators.computes(target):
            least = int(target.min())
        return least is not None and least > self.ignore_index


def class_weights(
    output: torch.Tensor, target: torch.Tensor, class_weight: torch.Tensor | None, ignore_index: int
) -> torch.Tensor:
    """The terms of the denominator of a mean over classes, one per position of the target."""
    if target.is_floating_point():
        return torch.ones_like(output.detach().select(1, 0))
    counted = target != ignore_index
    if class_weight is None:
        return counted
    classes = torch.where(counted, target, torch.zeros_like(target))
    return torch.where(
        counted, class_weight.to(output)[classes], torch.zeros((), dtype=output.dtype)
    )
