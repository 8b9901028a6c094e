"""Cross-entropy over classes that are divided: no rank has the logits whole.

Each shard gives, for every position, its largest logit, then the sum of its exponentials and the
logit of the target, where it is among its classes. What ranks exchange are these.
"""

from typing import Any

import torch
import torch.nn.functional as F

from lockstep.parallel.tensor.divided_tensor import RULES, DividedTensor, Owner, has_divided
from lockstep.parallel.tensor.shard_exchange import Tensors
from lockstep.parallel.tensor.transfers import cut_own, gather, total
from lockstep.plan.splits import Split

_NAMES = (
    *("input", "target", "weight", "size_average"),
    *("ignore_index", "reduce", "reduction", "label_smoothing"),
)


def _cross_entropy(owner: Owner, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    input, target = given.pop("input"), given.pop("target")
    weight, smoothing = given.pop("weight", None), given.pop("label_smoothing", 0.0)
    ignored, reduction = given.pop("ignore_index", -100), given.pop("reduction", "mean")
    is_plain = not any(one is not None for one in given.values()) and not has_divided(
        [target, weight]
    )
    if not (is_plain and isinstance(input, DividedTensor)) or (weight is not None and smoothing):
        return NotImplemented
    if _is_by_position(input, target):
        options = {"weight": weight, "ignore_index": ignored, "label_smoothing": smoothing}
        return _by_position(owner, func, input, target, reduction, options)
    if not _fits(input, target, ignored):
        return NotImplemented
    counted = target != ignored
    losses = _negative_logs(owner, input, target.where(counted, 0), smoothing)
    counts = _counts(target, weight, ignored, losses.dtype)
    losses = (losses * counts).where(counted, 0.0)
    if reduction != "none":
        losses = losses.sum()
    if reduction == "mean":
        losses = losses / counts.sum()
    is_cast = torch.is_autocast_enabled(input.device.type)  # then torch's is in float32, too
    return losses if is_cast else losses.to(input.dtype)


def _counts(
    target: torch.Tensor, weight: torch.Tensor | None, ignored: int, dtype: torch.dtype
) -> torch.Tensor:
    """The weight of each target in the mean."""
    counted = target != ignored
    counts = counted.to(dtype)
    return counts if weight is None else weight.to(dtype)[target.where(counted, 0)] * counts


def _is_by_position(input: DividedTensor, target: torch.Tensor) -> bool:
    """Whether positions are divided, and each target is a class."""
    is_class = input.division.dim != min(input.dim() - 1, 1) and not target.is_floating_point()
    return is_class and input.dim() > 1 and target.dim() == input.dim() - 1


def _by_position(
    owner: Owner,
    func: Any,
    input: DividedTensor,
    target: torch.Tensor,
    reduction: str,
    options: dict[str, Any],
) -> Any:
    """The losses of each shard's positions, or their sum over the shards."""
    dim = input.division.dim
    split = input.division.at(dim - (dim > 1))
    targets = cut_own(owner.exchange, target, split)
    of_part = "none" if reduction == "none" else "sum"
    pairs = zip(input.parts, targets, strict=True)
    losses = [func(part, own, reduction=of_part, **options) for part, own in pairs]
    if reduction == "none":
        return input.like(losses, split)
    summed = total(owner.exchange, losses)
    if reduction == "sum":
        return summed
    counts = _counts(target, options["weight"], options["ignore_index"], summed.dtype)
    return summed / counts.sum()


def _fits(input: DividedTensor, target: torch.Tensor, ignored: int) -> bool:
    """Whether classes are divided, and targets are some of them."""
    dim = min(input.dim() - 1, 1)
    shape = [size for place, size in enumerate(input.shape) if place != dim]
    if input.division.dim != dim or target.is_floating_point() or list(target.shape) != shape:
        return False
    if target.device.type != "cpu":
        return True
    is_class = (target >= 0) & (target < input.division.size)
    return bool((is_class | (target == ignored)).all())


def _negative_logs(
    owner: Owner, input: DividedTensor, target: torch.Tensor, smoothing: float
) -> torch.Tensor:
    """The negative logarithm of each target's probability."""
    split, dim = input.division, input.division.dim
    parts = [one.float() if one.dtype.itemsize < 4 else one for one in input.parts]
    highest = _maximum(owner, parts, dim)
    terms = []
    for shard, part in zip(owner.exchange.own, parts, strict=True):
        exponentials = (part - highest.unsqueeze(dim)).exp().sum(dim)
        own = [exponentials, _of_targets(part, target, split, shard)]
        terms.append(torch.stack([*own, part.sum(dim)] if smoothing else own))
    exponentials, chosen, *rest = total(owner.exchange, terms).unbind()
    logs = exponentials.log() + highest
    losses = logs - chosen
    for summed in rest:
        losses = (1 - smoothing) * losses + smoothing * (logs - summed / split.size)
    # Targets on a device were not checked: a class that does not exist has no probability.
    return losses.where((target >= 0) & (target < split.size), float("nan"))


def _maximum(owner: Owner, parts: Tensors, dim: int) -> torch.Tensor:
    """The largest logit of each position, over all shards."""
    largest = [part.detach().amax(dim, keepdim=True) for part in parts]
    count = owner.exchange.num_shards
    shape = list(largest[0].shape)
    shape[dim] = count
    split = Split(dim=dim, sizes=(count,), num_shards=count)
    return gather(owner.exchange, largest, split, shape).amax(dim)


def _of_targets(part: torch.Tensor, target: torch.Tensor, split: Split, shard: int) -> torch.Tensor:
    """The logits of the targets that are among a shard's classes; 0 for others."""
    place, is_here = torch.zeros_like(target), torch.zeros_like(target, dtype=torch.bool)
    offset = 0
    for start, stop in split.cuts[shard]:
        within = (target >= start) & (target < stop)
        place, is_here = (target - start + offset).where(within, place), is_here | within
        offset += stop - start
    return part.gather(split.dim, place.unsqueeze(split.dim)).squeeze(split.dim).where(is_here, 0.0)


RULES[F.cross_entropy] = _cross_entropy
