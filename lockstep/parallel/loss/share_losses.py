"""The contribution of a share's loss to the loss of the global batch.

The loss of a batch is the weighted mean over its samples (or tokens): the sum of all shares' totals
divided by the sum of their weights. An adapter computes total and weight of a share for each kind
of the Trainer's loss:

- a function of output and target (``parallel.loss.function_losses``), computed on the whole batch
  if its reduction is unknown (``parallel.loss.whole_batch``);
- the loss that the model computes itself (``parallel.loss.model_losses``);
- several functions with a factor each (``parallel.loss.joint_losses``). Each has its own
  denominator, so a share's part requires the weights of all shares: ``JointLoss``.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.capture.seeding import go_backward
from lockstep.data.batch_dims import TurnedLoss
from lockstep.data.map_style.sources import Batch
from lockstep.data.trees import Tree, tensors_of

# (total, weight) of each part of a share's loss; a single loss is one part.
Sums = tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class LossParts:
    """The parts of a loss.

    Attributes:
        names: the parts' names in logs; empty for a single loss.
        factors: the factor of each part in the whole.
    """

    names: tuple[str, ...] = ()
    factors: tuple[float, ...] = (1.0,)

    def __bool__(self) -> bool:
        return bool(self.names)

    @property
    def log_names(self) -> tuple[str, ...]:
        """The names in logs of the whole loss and of every part."""
        return ("loss", *(f"{name}_loss" for name in self.names))

    def logs(self, shares: Sequence[Sums]) -> dict[str, float]:
        """Means over shares: of the whole, and of each part. NaN for weight 0.

        Sums are exactly rounded, so they do not depend on the order of shares and ranks.
        """
        means = [mean([share[part] for share in shares]) for part in range(len(self.factors))]
        counted = [
            factor * value
            for factor, value in zip(self.factors, means, strict=True)
            if value is not None
        ]
        values = [math.fsum(counted) if counted else None, *(means if self.names else [])]
        return {
            name: math.nan if value is None else value
            for name, value in zip(self.log_names, values, strict=True)
        }


ONE_LOSS = LossParts()


def mean(sums: Sequence[tuple[float, float]]) -> float | None:
    """All totals divided by all weights; None if the weights are 0."""
    weight = math.fsum(weight for _, weight in sums)
    return math.fsum(total for total, _ in sums) / weight if weight else None


@dataclass(frozen=True, kw_only=True)
class ShareLoss:
    """A share's loss and its backward pass.

    Attributes:
        values: the tensors that backward starts from.
        seeds: d total / d value for each of them: a number, or a tensor of its shape.
        total: weighted sum of the losses of the share's samples.
        weight: the sum of their weights. A total or weight computed on a device stays a tensor, so
            that the host does not wait for it.
        parts: sums of its parts, if it has several.
        is_guess: the reduction is unknown; the weight is the number of samples.
    """

    values: tuple[torch.Tensor, ...]
    seeds: tuple[torch.Tensor | float, ...]
    total: torch.Tensor | float
    weight: torch.Tensor | float
    parts: Sums = ()
    is_guess: bool = False

    @property
    def sums(self) -> Sums:
        """Total and weight; of each part, if there are several."""
        return self.parts or ((float(self.total), float(self.weight)),)

    def backward(self, denominator: torch.Tensor | float) -> None:
        """Add d (total / denominator) to the gradients.

        A share with a denominator of 0 adds nothing; nor does one whose samples use no trainable
        parameter.
        """
        if not (isinstance(denominator, torch.Tensor) or denominator > 0):
            return
        roots, gradients = [], []
        for value, seed in zip(self.values, self.seeds, strict=True):
            if value.requires_grad:
                roots.append(value)
                gradients.append(_as_gradient(seed / denominator, value))
        if roots:
            go_backward(roots, gradients)


def _as_gradient(seed: torch.Tensor | float, value: torch.Tensor) -> torch.Tensor:
    if isinstance(seed, torch.Tensor):
        return seed.to(value.dtype).expand_as(value)  # also a scalar on a device
    return torch.full_like(value, seed)


@dataclass(frozen=True, kw_only=True)
class JointLoss:
    """A share's losses before their weights in the whole batch are known.

    The loss of a batch is the sum over the parts of factor times total divided by weight; totals
    and weights are sums over the shares.

    Attributes:
        losses: one for each part.
        parts: their names and factors.
        num_samples: of the share.
    """

    losses: tuple[ShareLoss, ...]
    parts: LossParts
    num_samples: int

    @property
    def values(self) -> tuple[torch.Tensor, ...]:
        """The tensors that backward starts from."""
        return tuple(value for loss in self.losses for value in loss.values)

    @property
    def weights(self) -> list[float]:
        """The weights of the parts."""
        return [float(loss.weight) for loss in self.losses]

    @property
    def is_guess(self) -> bool:
        """True if the reduction of a part is unknown."""
        return any(loss.is_guess for loss in self.losses)

    @property
    def sums(self) -> Sums:
        """Total and weight of each part."""
        return tuple((float(loss.total), float(loss.weight)) for loss in self.losses)

    def settled(self, weights: Sequence[float], num_samples: int) -> ShareLoss:
        """The share's part of the loss of a batch, as a total over the batch's samples.

        Args:
            weights: of the parts in the whole batch; a part of weight 0 adds nothing.
            num_samples: of the whole batch.
        """
        scales = [
            factor * num_samples / weight if weight else None
            for factor, weight in zip(self.parts.factors, weights, strict=True)
        ]
        return self._scaled(scales, float(self.num_samples) if any(weights) else 0.0)

    @property
    def is_even(self) -> bool:
        """True if all parts have the same weight, so their sum has one denominator."""
        return len(set(self.weights)) == 1

    def joined(self) -> ShareLoss:
        """The share's part, if ``is_even``; it does not need the weights of other shares."""
        return self._scaled(self.parts.factors, self.weights[0])

    def _scaled(self, scales: Sequence[float | None], weight: float) -> ShareLoss:
        scaled = [
            (loss, scale)
            for loss, scale in zip(self.losses, scales, strict=True)
            if scale is not None
        ]
        return ShareLoss(
            values=tuple(value for loss, _ in scaled for value in loss.values),
            seeds=tuple(seed * scale for loss, scale in scaled for seed in loss.seeds),
            total=math.fsum(loss.total * scale for loss, scale in scaled),
            weight=weight,
            parts=self.sums,
        )


class LossAdapter(ABC):
    """Computes the Trainer's loss for shares.

    Attributes:
        loss: the user's.
        parts: its parts, if it has several.
        needs_targets: it compares outputs with targets.
        is_certain: the weight of a share's loss is known for any result.
        is_inside: the model computes it.
        takes_parts: a rank needs only its part of outputs whose classes are divided.
        uses_whole_batch: it is called once, with the outputs of all shares, because the weight of
            a share's loss is unknown (``parallel.loss.whole_batch``).
        adds: the model adds something to it.
        gathered_bytes: the most bytes that all shares of a batch have published for that.
        batch_size: samples of the current batch.
        sees_all: it is called with the whole batch.
        is_alone: it is called with the whole batch, or with all samples that a worker takes of it.
        is_linear: the model's gradients are linear in the loss, as far as was tested.
        failure: its error on a share, if any; it is then called with all shares.
    """

    loss: Any
    parts = ONE_LOSS
    needs_targets = True
    is_certain = True
    is_inside = False
    takes_parts = False
    uses_whole_batch = False
    adds = False
    gathered_bytes = 0
    batch_size = 0
    sees_all = False
    is_alone = False
    is_linear = True
    failure = ""

    def begin(self, batch_size: int, num_filled: int, *, is_part: bool = False) -> None:
        """Begin a batch, or a part of one, of ``num_filled`` shares."""
        self.batch_size = batch_size
        self.is_alone = num_filled == 1
        self.sees_all = self.uses_whole_batch or (self.is_alone and not is_part)

    def watching(self) -> AbstractContextManager[Any]:
        """Entered around the model's forward pass if the loss ``is_inside``."""
        return nullcontext()

    def newly_adds(self, output: Tree) -> bool:
        """True if the model adds a loss for the first time; called once per batch."""
        return False

    def added(self, output: Tree, num_samples: int) -> ShareLoss:
        """The loss that the model adds to the loss of a share.

        Raises:
            NotImplementedError: it adds nothing.
        """
        raise NotImplementedError

    def may_take_whole(self, *, in_stages: bool) -> bool:
        """True if the loss may have to be computed on whole batches.

        In a pipeline a microbatch goes backward before the weights of other microbatches' losses
        are known.
        """
        return not self.is_certain or (in_stages and bool(self.parts))

    def user_losses(self) -> list[Any]:
        """The user's loss objects, which may have state."""
        given = list(self.loss.values()) if isinstance(self.loss, Mapping) else self.loss
        losses = given if isinstance(given, list | tuple) else [given]
        return [one.loss if isinstance(one, TurnedLoss) else one for one in losses]

    @abstractmethod
    def __call__(self, output: Tree, batch: Batch) -> ShareLoss | JointLoss:
        """The loss of a share, from the model's output.

        Raises:
            LossError: the loss has none of the documented forms.
            DataError: there are no targets.
        """


def nothing(tensors: Tree) -> ShareLoss:
    """The loss of a share of weight 0.

    Its backward pass has gradients of 0, so that BatchNorm layers still exchange rows with other
    shares, and the parameters it uses count as used.
    """
    values = tuple(tensors_of(tensors))
    return ShareLoss(values=values, seeds=(0.0,) * len(values), total=0.0, weight=0.0)
