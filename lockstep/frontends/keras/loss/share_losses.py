"""Keras losses as the contributions of shares to the loss of the global batch.

``model.compile(loss=...)`` gives a tree of losses, each of which reduces the values of its samples
to one number. Of Keras's own losses the total and the denominator are found, so that sums over the
shares give the loss of the whole batch:

- the default divides by the number of values, that is by the number of samples;
- with masks it divides by the number of values that count, and ``"mean_with_sample_weight"`` by
  the weights: the shares first exchange these sums, to know those of the whole batch;
- ``"sum"`` does not divide: the sum over the shares is the sum.

The reduction of the user's losses is inferred (``parallel.loss.reduction_inference``). If it is
known, the same holds; otherwise the losses get the whole batch (``parallel.loss.whole_batch``), as
in Keras. So does a model's own ``compute_loss`` (``frontends.keras.loss.computed_loss``).

Losses that layers add (``add_loss``, activity regularizers) count as means or sums, as a trial has
found (``frontends.keras.loss.add_loss``); penalties on weights are the same for every share.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from keras import tree

from lockstep import accelerators
from lockstep.data.map_style.sources import Batch
from lockstep.data.trees import Tree
from lockstep.errors import LossError
from lockstep.frontends.keras.loss.reductions import (
    LossProbe,
    Reduced,
    is_by_sample,
    masked,
    masked_outputs,
    may_divide_by_weights,
    probed,
    variables_of,
)
from lockstep.parallel.loss.share_losses import (
    JointLoss,
    LossAdapter,
    LossParts,
    ShareLoss,
    Sums,
    mean,
)
from lockstep.plan.spec import Plan

# The weight of a share whose samples are all masked or ignored. If all shares are such, Keras makes
# a step with a loss and gradients of 0; beside other weights it is rounded away.
_EMPTY_WEIGHT = 1e-30


@dataclass(frozen=True, kw_only=True)
class Additions:
    """What a trial has found of losses that layers add, and of outputs.

    Attributes:
        are_sums: for each loss that layers add, True for a sum over the samples and False for a
            mean; in training, and in evaluation.
        zeros: the numbers of those that were 0, for which ``are_sums`` is a guess.
        has_penalties: True if there are penalties on weights.
        has_masks: True if outputs have masks.
        has_rows: True if every output has an axis beside that of the samples. Without one,
            functions of Keras's return one number for a batch.
    """

    are_sums: dict[bool, tuple[bool, ...]]
    zeros: frozenset[int] = frozenset()
    has_penalties: bool = False
    has_masks: bool = False
    has_rows: bool = True

    def __bool__(self) -> bool:
        return self.has_penalties or any(self.are_sums.values())


class KerasLoss(LossAdapter):
    """The losses of a compiled model, and those that its layers add.

    Args:
        compiled: the model's ``CompileLoss``, built; None if there are only additions.
        additions: losses that layers add.
        is_divided: True if devices work on parts of a batch.
    """

    needs_targets = False
    _is_staged = False

    def __init__(self, compiled: Any, additions: Additions, *, is_divided: bool = True) -> None:
        self._probe = LossProbe(additions.has_rows)
        self.loss = None if compiled is None else probed(compiled, self._probe)
        self._additions = additions
        self.adds = any(additions.are_sums.values())
        self._zeros = additions.zeros
        entries = [] if compiled is None else compiled._flat_losses
        self._losses = [one.loss for one in entries]
        self._only = entries[0].loss if len(entries) == 1 and not entries[0].path else None
        self._factors = tuple(
            1.0 if one.loss_weights is None else one.loss_weights for one in entries
        )
        self.names = tuple(f"{one.name}_loss" for one in entries) if len(entries) > 1 else ()
        self.is_certain = additions.has_rows and all(map(is_by_sample, self._losses))
        weighs = additions.has_masks or any(map(may_divide_by_weights, self._losses))
        if weighs and (len(entries) > 1 or additions):
            self.parts = LossParts(
                names=(*(one.name for one in entries), "additions"), factors=(*self._factors, 1.0)
            )
            # Shares wait for each other's weights, so all must have some.
            self.uses_whole_batch = is_divided and not self.is_certain

    def __call__(self, output: Tree, batch: Batch) -> ShareLoss | JointLoss:
        num_samples = batch.num_samples
        found = self._found(output, batch.targets)
        added = self.added(output, num_samples)
        if self.parts:
            own = [self._single(one, num_samples) for one in found]
            return JointLoss(losses=(*own, added), parts=self.parts, num_samples=num_samples)
        if len(found) == 1 and not added.values:
            return self._single(found[0], num_samples, self._factors[0])
        return self._combined(found, added, num_samples)

    def run_on(self, plan: Plan, rank: int) -> None:
        """Prepare for calls on a rank."""
        self._is_staged = plan.pipeline is not None and plan.num_shares > 1

    def user_losses(self) -> list[Any]:
        return [*self._losses, *(one for loss in self._losses for one in variables_of(loss))]

    def _found(self, output: Tree, target: Tree) -> list[Reduced]:
        """Each compiled loss of a share; losses are restored if one of them is a guess."""
        if self.is_certain or self.sees_all:
            return self.reduced(output, target)
        leave = _restorer_of(self._losses)
        found = self.reduced(output, target)
        if any(one.is_guess for one in found):
            leave()
        return found

    def reduced(self, output: Tree, target: Tree) -> list[Reduced]:
        """Each compiled loss of a share."""
        if self.loss is None:
            return []
        self._probe.sees_all, self._probe.batch_size = self.sees_all, self.batch_size
        values = output["outputs"], *target
        if self._only is not None and not any(map(tree.is_nested, values)):
            one = masked(values[0], output["masks"])
            return [self._probe.reduce(self._only, target[0], one, target[1])]
        self._probe.found = []
        self.loss(target[0], masked_outputs(output), target[1])
        return self._probe.found

    def newly_adds(self, output: Tree) -> bool:
        losses = output["losses"] if self._zeros else ()
        seen = {number for number, rows in enumerate(losses) if rows.any()} & self._zeros
        self._zeros -= seen
        return bool(seen)

    def added(self, output: Tree, num_samples: int) -> ShareLoss:
        """The losses and penalties that layers add, as a total over the samples."""
        losses, penalties = output["losses"], output["penalties"]
        are_sums = self._additions.are_sums[torch.is_grad_enabled()]
        if len(losses) != len(are_sums):
            raise LossError(
                "Layers must add the same number of losses in every batch.",
                received=f"{len(losses)}, and {len(are_sums)} before",
                fix="Call add_loss always, with 0 where there is nothing to add.",
            )
        if self._is_staged and self.newly_adds(output):  # no stage can try the whole model
            raise LossError(
                "In a pipeline, losses that layers add must not be 0 in the first batch.",
                received="a loss that was 0 until now: it may be a mean or a sum over samples",
                fix="Shuffle the data, or use a data parallel strategy.",
            )
        values = (*losses, *penalties)
        kinds = (*are_sums, *(False for _ in penalties))
        seeds = tuple(
            (self.batch_size / output["sizes"] if is_sum else torch.ones_like(rows)).to(rows.dtype)
            for rows, is_sum in zip(values, kinds, strict=True)
        )
        totals = (float(seed @ rows.detach()) for seed, rows in zip(seeds, values, strict=True))
        return ShareLoss(
            values=values, seeds=seeds, total=math.fsum(totals), weight=float(num_samples)
        )

    def _single(self, one: Reduced, num_samples: int, factor: float = 1.0) -> ShareLoss:
        """A single loss; a sum is divided by the samples of its share and scaled by the batch."""
        seed = factor * (1 if one.weight is not None else self.batch_size)
        weight = float(num_samples) if one.weight is None else one.weight or _EMPTY_WEIGHT
        total = one.total.detach()
        return ShareLoss(
            values=(one.total,),
            seeds=(seed,),
            total=seed * (total.double() if accelerators.computes(total) else total.item()),
            weight=weight,
            is_guess=one.is_guess,
        )

    def _combined(self, found: Sequence[Reduced], added: ShareLoss, num_samples: int) -> ShareLoss:
        """All losses as one total over the samples; a guess if one has another denominator."""
        own = [self._single(one, num_samples) for one in found]
        scales = [
            factor * num_samples / float(one.weight)
            for one, factor in zip(own, self._factors, strict=True)
        ]
        total = math.fsum(scale * one.total for one, scale in zip(own, scales, strict=True))
        total += float(added.total)
        overall = (total, float(num_samples))
        return ShareLoss(
            values=(*(value for one in own for value in one.values), *added.values),
            seeds=(
                *(scale * one.seeds[0] for one, scale in zip(own, scales, strict=True)),
                *added.seeds,
            ),
            total=total,
            weight=float(num_samples),
            parts=(overall, *(one.sums[0] for one in own)) if self.names else (),
            is_guess=not self.sees_all
            and any(one.is_guess or not one.is_by_sample for one in found),
        )

    def of_batch(self, shares: Sequence[Sums]) -> list[float]:
        """The loss of a batch, and each of several, from the sums of its shares.

        As in Keras, a loss without weight is 0.
        """
        means = [mean(column) or 0.0 for column in zip(*shares, strict=True)]
        if not self.parts:
            return means
        whole = math.fsum(
            factor * value for factor, value in zip(self.parts.factors, means, strict=True)
        )
        return [whole, *(means[:-1] if self.names else [])]


def _restorer_of(losses: Sequence[Any]) -> Callable[[], None]:
    """A function that restores the losses' attributes: a loss may count its calls."""
    before = [(loss, dict(vars(loss))) for loss in losses]
    values = [(one, one.value.clone()) for loss in losses for one in variables_of(loss)]

    def leave() -> None:
        for loss, attributes in before:
            vars(loss).update(attributes)
        for variable, value in values:
            if not variable.value.equal(value):  # backward may need an unchanged one
                variable.assign(value)

    return leave
