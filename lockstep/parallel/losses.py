"""What a share's loss contributes to the loss of the global batch.

The loss of a batch is the weighted mean over its samples (or tokens): the sum of all shares' totals
over the sum of all their weights. A loss function says it in one of three ways:

- a scalar: the mean over its samples;
- per-sample values of shape (n,);
- a pair ``(total, weight)``: a sum and the weight of that sum.

torch's own cross-entropy and NLL losses return a scalar whose true denominator depends on
``ignore_index`` and class weights: they are recognised and asked for the pair.
"""

import copy
import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lockstep.data.trees import Tree, tensors_of
from lockstep.errors import LossError, OptionError, problem

Loss = Callable[..., Any]

_AGREED = "The loss must return a scalar, values of shape (n,), or a pair (total, weight)."


@dataclass(frozen=True, kw_only=True)
class ShareLoss:
    """A share's loss and how to go backward from it.

    Attributes:
        values: the tensors that backward starts from.
        seed: d total / d value, a number or a tensor of the shape of the values.
        total: weighted sum of the losses of the share's samples.
        weight: the sum of their weights.
    """

    values: tuple[torch.Tensor, ...]
    seed: torch.Tensor | float
    total: float
    weight: float

    def backward(self, denominator: float) -> None:
        """Add d (total / denominator) to the gradients.

        A share whose samples have used no trainable parameter adds nothing.
        """
        values = [value for value in self.values if value.requires_grad]
        if not values:
            return
        seed = self.seed / denominator
        torch.autograd.backward(
            values,
            [
                seed if isinstance(seed, torch.Tensor) else torch.full_like(value, seed)
                for value in values
            ],
        )


class LossAdapter:
    """Calls a loss function and reads what it returns.

    Raises:
        OptionError: a torch loss with ``reduction="sum"``, which is no mean over samples.
    """

    def __init__(self, loss: Loss) -> None:
        self.loss = loss
        _check_reduction(loss)
        self._takes_weight = _takes(loss, "sample_weight")

    def __call__(
        self, output: Tree, target: Tree, sample_weight: torch.Tensor | None, num_samples: int
    ) -> ShareLoss:
        """The loss of a share of ``num_samples``.

        Raises:
            LossError: the loss function returned something else than agreed.
            OptionError: the loss has become a sum since.
        """
        # Looked at anew for every share: a loss may change between two fits, or in a callback.
        reduction = _check_reduction(self.loss)
        by_class = _ClassLoss.recognise(self.loss)
        if by_class is not None and isinstance(output, torch.Tensor):
            return _pair(*by_class(output, target, sample_weight))
        if sample_weight is not None and self._takes_weight:
            returned: Any = self.loss(output, target, sample_weight=sample_weight)
            return self._weighted_pair(returned, output)
        if sample_weight is not None and reduction == "mean":
            values = _unreduced(self.loss)(output, target)
            returned = values.flatten(1).mean(1) if values.dim() > 1 else values
        else:
            returned = self.loss(output, target)
        return self._read(returned, output, sample_weight, num_samples)

    def _read(
        self, returned: Any, output: Tree, sample_weight: torch.Tensor | None, num_samples: int
    ) -> ShareLoss:
        if isinstance(returned, tuple | list) and len(returned) == 2:
            if sample_weight is not None:
                raise _needs_weight_argument()
            return _pair_or_nothing(returned, output)
        if not isinstance(returned, torch.Tensor):
            raise LossError(_misfit(f"{type(returned).__name__}"))
        if returned.dim() == 0:
            if sample_weight is not None:
                raise _needs_per_sample_values()
            return ShareLoss(
                values=(returned,),
                seed=float(num_samples),
                total=returned.item() * num_samples,
                weight=float(num_samples),
            )
        if returned.shape == (num_samples,):
            return _per_sample(returned, sample_weight)
        raise LossError(
            _misfit(f"a tensor of shape {tuple(returned.shape)} for {num_samples} samples")
        )

    def _weighted_pair(self, returned: Any, output: Tree) -> ShareLoss:
        if isinstance(returned, tuple | list) and len(returned) == 2:
            return _pair_or_nothing(returned, output)
        raise LossError(
            problem(
                "A loss that takes sample_weight must return a pair (total, weight).",
                received=type(returned).__name__,
                fix="Return (sum of weight times loss, sum of weight).",
            )
        )


def _per_sample(values: torch.Tensor, sample_weight: torch.Tensor | None) -> ShareLoss:
    if sample_weight is None:
        return ShareLoss(
            values=(values,),
            seed=torch.ones_like(values),
            total=values.detach().sum(dtype=torch.float64).item(),
            weight=float(len(values)),
        )
    weights = sample_weight.to(values)
    # A loss that is not finite makes the total so, also with weight 0: its gradient would be NaN.
    return ShareLoss(
        values=(values,),
        seed=weights,
        total=(values.detach() * weights).sum(dtype=torch.float64).item(),
        weight=weights.sum(dtype=torch.float64).item(),
    )


def _pair_or_nothing(returned: Any, output: Tree) -> ShareLoss:
    """A pair of the user's, whose own mean in it may be 0 / 0 where nothing counts."""
    total, weight = returned
    share = _pair(total, weight)
    if share.weight == 0 and not math.isfinite(share.total):
        return _nothing(output)
    return share


def _pair(total: Any, weight: Any) -> ShareLoss:
    if not (isinstance(total, torch.Tensor) and total.dim() == 0):
        raise LossError(_misfit(f"a pair whose total is {_shape(total)}"))
    if isinstance(weight, torch.Tensor) and weight.requires_grad:
        # Perhaps two losses, and no weight at all.
        raise LossError(_misfit("a pair whose weight depends on trainable parameters"))
    number = weight.detach() if isinstance(weight, torch.Tensor) else weight
    try:
        number = float(number)
    except (TypeError, ValueError, RuntimeError) as error:
        raise LossError(_misfit(f"a pair whose weight is {_shape(weight)}")) from error
    if not (math.isfinite(number) and number >= 0):
        raise LossError(_misfit(f"a pair whose weight is {number}"))
    return ShareLoss(values=(total,), seed=1.0, total=total.item(), weight=number)


def _nothing(output: Tree) -> ShareLoss:
    """A share in which nothing counts.

    It goes backward with zeros, so that BatchNorm layers meet the other shares there, and what it
    has used counts as used.
    """
    return ShareLoss(values=tuple(tensors_of(output)), seed=0.0, total=0.0, weight=0.0)


def _shape(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return type(value).__name__


def _misfit(received: str) -> str:
    return problem(_AGREED, received=received, fix="See docs/exactness.md for examples of each.")


def _needs_per_sample_values() -> LossError:
    return LossError(
        problem(
            "With sample_weight the loss must say what each sample contributes.",
            received="a scalar",
            fix='Return values of shape (n,), for torch losses with reduction="none".',
        )
    )


def _needs_weight_argument() -> LossError:
    return LossError(
        problem(
            "With sample_weight a loss that returns (total, weight) must weigh the samples itself.",
            received="a loss without an argument named sample_weight",
            fix="Take (output, target, sample_weight), or return values of shape (n,).",
        )
    )


# --- torch's own losses -------------------------------------------------------------------------


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
    """What the class computes: a subclass that leaves it alone is as good as torch's own."""
    return getattr(type(loss), "forward", None)


def _check_reduction(loss: Loss) -> str | None:
    """``_reduction_of``, or an OptionError for a sum."""
    reduction = _reduction_of(loss)
    if reduction == "sum":
        raise OptionError(
            problem(
                "The loss must be a mean over the samples, or give them one by one.",
                received='reduction="sum"',
                fix='Use reduction="mean" (and a larger learning rate) or "none".',
            )
        )
    return reduction


def _reduction_of(loss: Loss) -> str | None:
    """``reduction`` of one of torch's own losses; None for any other."""
    inner, options = _options_of(loss)
    if not _is_torch_loss(inner):
        return None
    if isinstance(inner, nn.Module):
        return getattr(inner, "reduction", None)
    return str(options.get("reduction", "mean"))


def _unreduced(loss: Loss) -> Loss:
    """The same torch loss, element by element."""
    if isinstance(loss, nn.Module):
        unreduced = copy.copy(loss)
        vars(unreduced)["reduction"] = "none"
        return unreduced
    return functools.partial(loss, reduction="none")


def _takes(loss: Loss, argument: str) -> bool:
    function = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        return argument in inspect.signature(function).parameters
    except (TypeError, ValueError):  # builtins have no signature
        return False


def _attributes(module: nn.Module, *names: str) -> dict[str, Any]:
    return {name: getattr(module, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class _ClassLoss:
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
    def recognise(cls, loss: Loss) -> "_ClassLoss | None":
        inner, options = _options_of(loss)
        forward = _forward_of(inner) if isinstance(inner, nn.Module) else inner
        function: Callable[..., torch.Tensor]
        if forward is nn.CrossEntropyLoss.forward:
            function = F.cross_entropy
            options = _attributes(inner, "weight", "ignore_index", "label_smoothing")
        elif forward is nn.NLLLoss.forward:
            function = F.nll_loss
            options = _attributes(inner, "weight", "ignore_index")
        elif forward in (F.cross_entropy, F.nll_loss):
            function = inner
        else:
            return None
        if _reduction_of(loss) != "mean" or (isinstance(loss, functools.partial) and loss.args):
            return None
        options = {key: value for key, value in options.items() if key != "reduction"}
        return cls(
            function=function,
            class_weight=options.get("weight"),
            ignore_index=options.get("ignore_index", -100),
            options=options,
        )

    def __call__(
        self, output: torch.Tensor, target: Any, sample_weight: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | int]:
        options = self._options_for(output)
        if sample_weight is None:
            total = self.function(output, target, reduction="sum", **options)
            return total, self._weights(output, target).sum(dtype=torch.float64)
        losses = self.function(output, target, reduction="none", **options)
        weights = self._weights(output, target)
        per_sample = sample_weight.to(losses).reshape(-1, *[1] * (losses.dim() - 1))
        return (losses * per_sample).sum(), (weights * per_sample).sum(dtype=torch.float64)

    def _options_for(self, output: torch.Tensor) -> dict[str, Any]:
        if self.class_weight is None:
            return self.options
        return {**self.options, "weight": self.class_weight.to(output)}

    def _weights(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The denominator's terms, one per position of the target."""
        if target.is_floating_point():
            return torch.ones_like(output.detach().select(1, 0))
        counted = target != self.ignore_index
        if self.class_weight is None:
            return counted
        classes = torch.where(counted, target, torch.zeros_like(target))
        return torch.where(
            counted, self.class_weight.to(output)[classes], torch.zeros((), dtype=output.dtype)
        )
