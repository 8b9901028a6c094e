"""Keras losses as what a share contributes to the loss of the global batch.

``model.compile(loss=...)`` gives a tree of losses, each of which reduces the values of its samples
to one number. Here each is asked for the two numbers that this one is made of, a total and what it
is divided by, so that sums over the shares give what the whole batch would have given:

- the default divides by the number of values, that is by the number of samples;
- with masks it divides by the number of values that count, and ``"mean_with_sample_weight"`` by
  the weights: what these are in the whole batch, the shares tell each other first;
- ``"sum"`` does not divide: the sum over the shares is the sum.

What layers add (``add_loss``, activity regularizers) counts as a mean or as a sum, whichever it was
found to be (``frontends.keras.additions``); penalties on weights are the same for every share.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from keras import ops, tree
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.losses.loss import Loss, squeeze_or_expand_to_same_rank

from lockstep.data.trees import Tree
from lockstep.errors import LossError, problem
from lockstep.parallel.losses import JointLoss, LossAdapter, LossParts, ShareLoss, Sums, mean

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """What a loss has made of the values of a share.

    Attributes:
        total: their sum.
        weight: what it is divided by; None where it is not.
        is_by_sample: the weight is the number of samples but for a constant factor.
        is_own: the loss has made one number of the share by itself: a mean, unless the Additions
            say that it is a sum.
    """

    total: torch.Tensor
    weight: float | None
    is_by_sample: bool = True
    is_own: bool = False


@dataclass(frozen=True, kw_only=True)
class Additions:
    """What comes on top of the losses that were compiled, and what was found out about these.

    Attributes:
        are_sums: for each loss that layers add, whether it is a sum over the samples and not a
            mean; in training, and in evaluation.
        has_penalties: there are penalties on weights.
        weighs_alike: every loss divides by the number of samples, so that all have one denominator.
        own_sums: numbers of compiled losses that return the sum over the samples they are given.
        has_rows: every output has an axis beside that of the samples. Without one, functions of
            Keras's return one number for a batch.
    """

    are_sums: dict[bool, tuple[bool, ...]]
    own_sums: frozenset[int] = frozenset()
    has_penalties: bool = False
    weighs_alike: bool = True
    has_rows: bool = True

    def __bool__(self) -> bool:
        return self.has_penalties or any(self.are_sums.values())


class KerasLoss(LossAdapter):
    """The losses of a compiled model, and what its layers add.

    Args:
        compiled: the model's ``CompileLoss``, built; None where there are only additions.
        additions: what layers add.

    Attributes:
        batch_size: samples of the global batch under way; whoever runs a task sets it.
    """

    needs_targets = False

    def __init__(self, compiled: Any, additions: Additions) -> None:
        self._found: list[Reduced] = []
        self.loss = None if compiled is None else _asked(compiled, self._found)
        self.batch_size = 0
        self._additions = additions
        entries = [] if compiled is None else compiled._flat_losses
        self._only = entries[0].loss if len(entries) == 1 and not entries[0].path else None
        self._factors = tuple(
            1.0 if one.loss_weights is None else one.loss_weights for one in entries
        )
        self.names = tuple(f"{one.name}_loss" for one in entries) if len(entries) > 1 else ()
        if (len(entries) > 1 or additions) and not additions.weighs_alike:
            self.parts = LossParts(
                names=(*(one.name for one in entries), "additions"), factors=(*self._factors, 1.0)
            )

    def __call__(
        self,
        output: Tree,
        target: Tree,
        sample_weight: torch.Tensor | None,
        num_samples: int,
        inputs: Tree = None,
    ) -> ShareLoss | JointLoss:
        found = self.reduced(output, target)
        added = self._added(output, num_samples)
        if self.parts:
            own = [self._alone(one, num_samples) for one in found]
            return JointLoss(losses=(*own, added), parts=self.parts, num_samples=num_samples)
        if len(found) == 1 and not added.values:
            return self._scaled(self._alone(found[0], num_samples), self._factors[0])
        return self._joined(found, added, num_samples)

    def reduced(self, output: Tree, target: Tree) -> list[Reduced]:
        """What each compiled loss makes of a share."""
        if self.loss is None:
            return []
        values = output["outputs"], *target
        if self._only is not None and not any(map(tree.is_nested, values)):
            one = masked(values[0], output["masks"])
            return self._told([reduce_values(self._only, target[0], one, target[1])])
        outputs = tree.map_structure(masked, output["outputs"], output["masks"])
        self._found.clear()
        self.loss(target[0], outputs, target[1])
        found = self._told(self._found)
        self._found.clear()
        return found

    def _told(self, found: Sequence[Reduced]) -> list[Reduced]:
        """What losses have made of a share, with what is known of those that return one number."""
        sums = self._additions.own_sums
        return [
            Reduced(total=one.total / one.weight, weight=None)
            if number in sums and one.weight
            else one
            for number, one in enumerate(found)
        ]

    def _added(self, output: Tree, num_samples: int) -> ShareLoss:
        """What comes on top, as a total over the samples."""
        losses, penalties = output["losses"], output["penalties"]
        are_sums = self._additions.are_sums[torch.is_grad_enabled()]
        if len(losses) != len(are_sums):
            raise LossError(
                problem(
                    "Layers must add the same number of losses in every batch.",
                    received=f"{len(losses)}, and {len(are_sums)} before",
                    fix="Call add_loss always, with 0 where there is nothing to add.",
                )
            )
        size = float(self.batch_size)
        seeds = [size if is_sum else float(num_samples) for is_sum in are_sums]
        seeds += [float(num_samples)] * len(penalties)
        values = (*losses, *penalties)
        total = math.fsum(seed * value.item() for seed, value in zip(seeds, values, strict=True))
        return ShareLoss(values=values, seeds=tuple(seeds), total=total, weight=float(num_samples))

    def _alone(self, one: Reduced, num_samples: int) -> ShareLoss:
        """A loss by itself; one that is not divided is a total over all samples of the batch."""
        seed = 1.0 if one.weight is not None else float(self.batch_size)
        weight = float(num_samples) if one.weight is None else one.weight
        return ShareLoss(
            values=(one.total,), seeds=(seed,), total=seed * one.total.item(), weight=weight
        )

    def _scaled(self, loss: ShareLoss, factor: float) -> ShareLoss:
        if factor == 1.0:
            return loss
        seeds = tuple(factor * seed for seed in loss.seeds)
        return ShareLoss(
            values=loss.values, seeds=seeds, total=factor * loss.total, weight=loss.weight
        )

    def _joined(self, found: Sequence[Reduced], added: ShareLoss, num_samples: int) -> ShareLoss:
        """All losses as one total over the samples."""
        if not all(one.is_by_sample for one in found):
            raise LossError(
                problem(
                    "A loss must divide by what it divided by before.",
                    received="values that do not count, by a mask or by weights, and none before",
                    fix="Mask in every batch, or in none.",
                )
            )
        own = [self._alone(one, num_samples) for one in found]
        scales = [
            factor * num_samples / one.weight
            for one, factor in zip(own, self._factors, strict=True)
        ]
        total = math.fsum(scale * one.total for one, scale in zip(own, scales, strict=True))
        total += added.total
        overall = (total, float(num_samples))
        return ShareLoss(
            values=(*(value for one in own for value in one.values), *added.values),
            seeds=(
                *(scale * one.seeds[0] for one, scale in zip(own, scales, strict=True)),
                *added.seeds,
            ),
            total=total,
            weight=float(num_samples),
            parts=(overall, *((one.total, one.weight) for one in own)) if self.names else (),
        )

    def of_batch(self, shares: Sequence[Sums]) -> list[float]:
        """The loss of a batch, and each of several, from what its shares have come to.

        As Keras has it: what weighs nothing is 0.
        """
        means = [mean(column) or 0.0 for column in zip(*shares, strict=True)]
        if not self.parts:
            return means
        whole = math.fsum(
            factor * value for factor, value in zip(self.parts.factors, means, strict=True)
        )
        return [whole, *(means[:-1] if self.names else [])]


def _asked(compiled: Any, found: list[Reduced]) -> Any:
    """A copy whose losses say what they have made of the values, and count nothing."""
    copied = object.__new__(type(compiled))
    entries = [one._replace(loss=_Asked(one.loss, found)) for one in compiled._flat_losses]
    # A list of the model's knows the model, and would have it sent along.
    names = compiled.output_names and list(compiled.output_names)
    vars(copied).update(vars(compiled), _flat_losses=entries, output_names=names)
    vars(copied)["_metrics"] = [None] * len(entries)
    return copied


@dataclass(frozen=True)
class _Asked:
    """Stands in for a loss where it is called."""

    loss: Any
    found: list[Reduced]

    def __call__(self, target: Any, output: Any, sample_weight: Any = None) -> torch.Tensor:
        reduced = reduce_values(self.loss, target, output, sample_weight)
        self.found.append(reduced)
        return reduced.total


def reduce_values(loss: Any, target: Any, output: Any, sample_weight: Any = None) -> Reduced:
    """What ``loss(target, output, sample_weight)`` divides, and by what.

    Raises:
        LossError: it does not reduce.
    """
    size = float(len(tree.flatten(output)[0]))
    if type(loss).__call__ is not Loss.__call__:
        number = loss(target, output, sample_weight)
        return Reduced(total=number * size, weight=size, is_own=True)
    mask = get_keras_mask(output)
    target, output = (
        tree.map_structure(lambda one: ops.convert_to_tensor(one, dtype=loss.dtype), tensors)
        for tensors in (target, output)
    )
    values = loss.call(target, output)
    masks = [one for one in (mask, get_keras_mask(values)) if one is not None]
    values = ops.convert_to_tensor(values, dtype=loss.dtype)
    if loss.reduction in (None, "none") and values.dim() > 0:
        raise LossError(
            problem(
                "A loss must reduce the values of its samples to one number.",
                received=f"{loss.name} with reduction={loss.reduction!r}",
                fix='Use reduction="sum_over_batch_size", Keras\'s default.',
            )
        )
    if values.dim() == 0:  # it has reduced them by itself; Keras weighs what came of that
        if sample_weight is not None:
            values = values * ops.convert_to_tensor(sample_weight, dtype=values.dtype).mean()
        return Reduced(total=values * size, weight=size, is_own=True)
    is_across = getattr(loss, "_fn_kwargs", {}).get("axis") == 0
    if sample_weight is None and (is_across or len(values) != size):  # it has none for each sample
        return Reduced(total=values.mean() * size, weight=size, is_own=True)
    return _reduced(loss.reduction, values, sample_weight, masks)


def _reduced(
    reduction: str, values: torch.Tensor, sample_weight: Any, masks: Sequence[torch.Tensor]
) -> Reduced:
    """As ``keras.src.losses.loss.reduce_weighted_values``, but for the division."""
    weights = None
    if sample_weight is not None:
        weights = ops.convert_to_tensor(sample_weight, dtype=values.dtype)
    mask = None
    if masks:
        mask = masks[0] if len(masks) == 1 else masks[0] & masks[1]
        mask = mask.to(values.dtype)
        if weights is None:
            weights = mask
        else:
            aligned, weights = squeeze_or_expand_to_same_rank(mask, weights)
            weights = weights * aligned
    if weights is not None:
        values, weights = squeeze_or_expand_to_same_rank(values, weights)
    total = (values if weights is None else values * weights).sum()
    if reduction not in _MEANS:
        return Reduced(total=total, weight=None)
    if reduction == "mean_with_sample_weight":
        if weights is not None:
            return Reduced(total=total, weight=float(weights.sum()), is_by_sample=False)
    elif mask is not None:
        # As many values as there are for each entry of the mask count with it.
        count = float(mask.sum()) * values.numel() / mask.numel()
        return Reduced(total=total, weight=count, is_by_sample=False)
    numel = (values if weights is None else torch.broadcast_tensors(values, weights)[0]).numel()
    return Reduced(total=total, weight=float(numel))


def masked(output: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """An output with its mask on it, as Keras has it."""
    if mask is not None and get_keras_mask(output) is None:
        set_keras_mask(output, mask)
    return output
