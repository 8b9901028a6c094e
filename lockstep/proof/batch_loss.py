"""The loss of a whole batch, for the reference.

It shares no code with ``parallel.loss.share_losses``, so that a mistake there is not repeated here.
Without shares the definition is short:

- a scalar is the mean, exactly as the function computed it;
- values of shape (n,) are averaged, weighted by ``sample_weight`` if the data has one;
- a pair (total, weight) is total / weight.

Several losses are added up, each with its factor and its own mean. A loss that the model computes
is a mean as it is.

With ``sample_weight``, torch's own losses are called with ``reduction="none"`` and their values are
weighted; a loss with an argument ``sample_weight`` applies it itself.
"""

import copy
import functools
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lockstep.data.map_style.sources import Batch
from lockstep.data.own_loss import OwnLoss
from lockstep.errors import LossError

_CLASS_LOSSES = (F.cross_entropy, F.nll_loss)


def batch_loss(
    loss: Any, output: Any, target: Any, sample_weight: torch.Tensor | None
) -> torch.Tensor | None:
    """The weighted mean over the batch, a scalar; None if the batch's weight is 0.

    Raises:
        LossError: the loss returned none of the three forms above.
    """
    if sample_weight is None:
        returned = loss(output, target)
        if isinstance(returned, torch.Tensor) and returned.dim() == 0:
            return None if _is_mean_of_nothing(loss, output, target, returned) else returned
        return _mean(returned, None)
    if _takes_weight(loss):
        return _mean(loss(output, target, sample_weight=sample_weight), None)
    return _weighted(loss, output, target, sample_weight)


def weighted_losses(losses: Any, factors: Any, output: Any, batch: Batch) -> torch.Tensor | None:
    """The sum of several losses; None if the weight of each is 0."""
    keys: list[Any] = list(losses if hasattr(losses, "keys") else range(len(losses)))
    whole: torch.Tensor | None = None
    for key in keys:
        own_output = output[key] if hasattr(output, "__getitem__") else getattr(output, key)
        value = batch_loss(losses[key], own_output, batch.targets[key], batch.sample_weight)
        if value is not None:
            has_factor = factors is not None and (isinstance(key, int) or key in factors)
            term = factors[key] * value if has_factor else value
            whole = term if whole is None else whole + term
    return whole


def own_loss(loss: OwnLoss, output: Any, inputs: Any) -> torch.Tensor | None:
    """The mean that the model computed; None if its weight is 0."""
    value = _own_value(output) if loss.output is None else _at(output, loss.output)
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        is_nothing = loss.weight is not None and value.isnan() and not loss.weight(inputs)
        return None if is_nothing else value
    return _mean(value, None)


def returned_loss(returned: Any) -> torch.Tensor | None:
    """The mean that the user's ``train_step`` returned."""
    value = _own_value(returned)
    is_mean = isinstance(value, torch.Tensor) and value.dim() == 0
    return value if is_mean else _mean(value, None)


def _at(output: Any, place: int | str) -> Any:
    if isinstance(place, str) and not isinstance(output, dict):
        return getattr(output, place)
    return output[place]


def _own_value(output: Any) -> Any:
    """The loss in a model's output: a mean, values, or a pair."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, dict):
        return output["loss"]
    if hasattr(output, "loss"):
        return output.loss
    first, *others = output
    is_pair = len(others) == 1 and (isinstance(others[0], int | float) or not others[0].dim())
    return output if is_pair else first


def _mean(returned: Any, sample_weight: torch.Tensor | None) -> torch.Tensor | None:
    if isinstance(returned, tuple | list) and len(returned) == 2 and sample_weight is None:
        total, weight = returned
        mean: torch.Tensor | None = total / weight if weight else None
        return mean
    if isinstance(returned, torch.Tensor) and returned.dim() == 1:
        if sample_weight is None:
            return returned.mean()
        weights = sample_weight.to(returned)
        return (returned * weights).sum() / weights.sum() if weights.any() else None
    raise LossError(
        "The loss must return a scalar, values of shape (n,), or a pair (total, weight).",
        received=type(returned).__name__,
        fix="With sample_weight only the last two can be weighted.",
    )


def _weighted(
    loss: Any, output: Any, target: Any, sample_weight: torch.Tensor
) -> torch.Tensor | None:
    function, options = _torch_loss(loss)
    if function is None or options["reduction"] != "mean":
        return _mean(loss(output, target), sample_weight)
    values = _one_by_one(loss)(output, target)
    if function not in _CLASS_LOSSES:
        return _mean(values.flatten(1).mean(1) if values.dim() > 1 else values, sample_weight)
    each = sample_weight.to(values).reshape(-1, *[1] * (values.dim() - 1))
    weight = (each * _class_weights(values, target, options)).sum()
    return (values * each).sum() / weight if weight else None


def _class_weights(
    values: torch.Tensor, target: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    """Each position's summand in the denominator of torch's weighted mean."""
    if target.is_floating_point():  # class probabilities: torch divides by the positions
        return torch.ones_like(values)
    counts: torch.Tensor = (target != options["ignore_index"]).to(values)
    if options["weight"] is None:
        return counts
    by_class: torch.Tensor = options["weight"].to(values)
    return counts * by_class[torch.where(counts > 0, target, 0)]


def _is_mean_of_nothing(loss: Any, output: Any, target: Any, mean: torch.Tensor) -> bool:
    """True if torch divided 0 by 0 because all targets are ignored."""
    function, _ = _torch_loss(loss)
    if function not in _CLASS_LOSSES or not mean.isnan():
        return False
    with torch.no_grad():
        return not bool(_one_by_one(loss)(output, target).any())


def _torch_loss(loss: Any) -> tuple[Any, dict[str, Any]]:
    """The torch function behind a loss (None if there is none), and its options."""
    options: dict[str, Any] = {"weight": None, "ignore_index": -100, "reduction": "mean"}
    if isinstance(loss, functools.partial):
        function, inner = _torch_loss(loss.func)
        return function, {**inner, **loss.keywords}
    if isinstance(loss, nn.Module):
        own = type(loss).forward
        if own.__module__ != nn.MSELoss.__module__:
            return None, options
        by_class = {nn.CrossEntropyLoss.forward: F.cross_entropy, nn.NLLLoss.forward: F.nll_loss}
        found = {name: getattr(loss, name, default) for name, default in options.items()}
        return by_class.get(own, own), found
    if getattr(loss, "__module__", None) == F.__name__:
        takes = "reduction" in inspect.signature(loss).parameters
        return (loss if takes else None), options
    return None, options


def _one_by_one(loss: Any) -> Any:
    """The same torch loss with ``reduction="none"``."""
    if isinstance(loss, nn.Module):
        single: Any = copy.copy(loss)
        single.reduction = "none"
        return single
    return functools.partial(loss, reduction="none")


def _takes_weight(loss: Any) -> bool:
    try:
        signature = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
    except (TypeError, ValueError):  # some builtins have no signature
        return False
    return "sample_weight" in signature.parameters
