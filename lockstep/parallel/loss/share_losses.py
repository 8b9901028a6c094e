"""What a share's loss contributes to the loss of the global batch.

The loss of a batch is the weighted mean over its samples (or tokens): the sum of all shares' totals
over the sum of all their weights. What the Trainer is given as its loss is adapted to say so, share
by share:

- a function of output and target (``parallel.loss.function_losses``), which is given the whole
batch
  where nobody knows what it makes of a share (``parallel.loss.whole_batch``);
- the loss that the model has computed itself (``parallel.loss.model_losses``);
- several of the former with a factor each (``parallel.loss.joint_losses``). Each has a denominator
of
  its own, so a share's part of such a loss is known when all shares' weights are: ``JointLoss``.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.capture.seeding import seeded
from lockstep.data.batch_dims import TurnedLoss
from lockstep.data.map_style.sources import Batch
from lockstep.data.trees import Tree, tensors_of

# (total, weight) of each part of a share's loss; of the one part where it is one loss.
Sums = tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class LossParts:
    """The parts of a loss, as they are named in logs.

    Attributes:
        names: one for each part; none where the loss is one.
        factors: of each part in the whole.
    """

    names: tuple[str, ...] = ()
    factors: tuple[float, ...] = (1.0,)

    def __bool__(self) -> bool:
        return bool(self.names)

    @property
    def log_names(self) -> tuple[str, ...]:
        """Names of the logs of a loss: of the whole and of every part."""
        return ("loss", *(f"{name}_loss" for name in self.names))

    def logs(self, shares: Sequence[Sums]) -> dict[str, float]:
        """Means over shares: of the whole, and of each part. NaN for what weighs nothing.

        Sums are exactly rounded: the order of shares and ranks cannot matter.
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
    """All totals over all weights; None where these are nothing."""
    weight = math.fsum(weight for _, weight in sums)
    return math.fsum(total for total, _ in sums) / weight if weight else None


@dataclass(frozen=True, kw_only=True)
class ShareLoss:
    """A share's loss and how to go backward from it.

    Attributes:
        values: the tensors that backward starts from.
        seeds: for each of them d total / d value: a number, or a tensor of its shape.
        total: weighted sum of the losses of the share's samples.
        weight: the sum of their weights. What a device computes of these stays a tensor, so that
            nobody waits for it.
        parts: what it is put together from, if it is.
        is_guess: nobody knows what the loss is a mean of; the weight is the number of samples.
    """

    values: tuple[torch.Tensor, ...]
    seeds: tuple[torch.Tensor | float, ...]
    total: torch.Tensor | float
    weight: torch.Tensor | float
    parts: Sums = ()
    is_guess: bool = False

    @property
    def sums(self) -> Sums:
        """Total and weight, of each part where there are several."""
        return self.parts or ((float(self.total), float(self.weight)),)

    def backward(self, denominator: torch.Tensor | float) -> None:
        """Add d (total / denominator) to the gradients.

        A share in which nothing counts, so that the denominator is 0, adds nothing; nor does one
        whose samples have used no trainable parameter.
        """
        if not (isinstance(denominator, torch.Tensor) or denominator > 0):
            return
        roots = [
            (value, seed)
            for value, seed in zip(self.values, self.seeds, strict=True)
            if value.requires_grad
        ]
        if roots:
            seeded(
                [value for value, _ in roots],
                [_as_gradient(seed / denominator, value) for value, seed in roots],
            ).backward()


def _as_gradient(seed: torch.Tensor | float, value: torch.Tensor) -> torch.Tensor:
    if isinstance(seed, torch.Tensor):
        return seed.to(value.dtype).expand_as(value)  # a number that a device has divided, too
    return torch.full_like(value, seed)


@dataclass(frozen=True, kw_only=True)
class JointLoss:
    """A share's losses, as long as nobody knows what those of the whole batch weigh.

    The loss of a batch is the sum over the parts of factor times total over weight, totals and
    weights being sums over the shares.

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
        """Of the parts."""
        return [float(loss.weight) for loss in self.losses]

    @property
    def is_guess(self) -> bool:
        """Nobody knows what one of them is a mean of."""
        return any(loss.is_guess for loss in self.losses)

    @property
    def sums(self) -> Sums:
        """Total and weight of each part."""
        return tuple((float(loss.total), float(loss.weight)) for loss in self.losses)

    def settled(self, weights: Sequence[float], num_samples: int) -> ShareLoss:
        """The share's part of the loss of a batch, as a total over the batch's samples.

        Args:
            weights: of the parts in the whole batch; one that weighs nothing adds nothing.
            num_samples: of the whole batch.
        """
        scales = [
            factor * num_samples / weight if weight else None
            for factor, weight in zip(self.parts.factors, weights, strict=True)
        ]
        return self._scaled(scales, float(self.num_samples) if any(weights) else 0.0)

    @property
    def is_even(self) -> bool:
        """All parts weigh the same, so their sum has one denominator."""
        return len(set(self.weights)) == 1

    def joined(self) -> ShareLoss:
        """The share's part, if it is even, before the others' weights are known."""
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
    """What the Trainer was given as its loss, made to speak of shares.

    Attributes:
        loss: what was given.
        parts: its parts, where it has some.
        needs_targets: it compares outputs with targets.
        is_certain: what a share's loss weighs is known, whatever the loss returns.
        is_inside: the model computes it.
        uses_whole_batch: it is called once, with the outputs of all shares, because the weight of
            a share's loss is unknown (``parallel.loss.whole_batch``).
        adds: the model adds something to it.
        gathered_bytes: the most that all shares of a batch have published for that.
        batch_size: samples of the batch under way.
        sees_all: what it is called with is all of the batch.
        is_alone: what it is called with is that, or all that a worker has taken of the batch.
        is_linear: gradients of the model are multiplied by what the loss is, as far as was tried.
        failure: what it has raised on a share, if it has; it is called with all of them then.
    """

    loss: Any
    parts = ONE_LOSS
    needs_targets = True
    is_certain = True
    is_inside = False
    uses_whole_batch = False
    adds = False
    gathered_bytes = 0
    batch_size = 0
    sees_all = False
    is_alone = False
    is_linear = True
    failure = ""

    def begin(self, batch_size: int, num_filled: int, *, is_part: bool = False) -> None:
        """A batch is on its way, or a part of one, in so many shares."""
        self.batch_size = batch_size
        self.is_alone = num_filled == 1
        self.sees_all = self.uses_whole_batch or (self.is_alone and not is_part)

    def watching(self) -> AbstractContextManager[Any]:
        """Around the model's forward pass, where the loss is computed in it."""
        return nullcontext()

    def newly_adds(self, output: Tree) -> bool:
        """Whether the model adds something for the first time; asked once of each batch."""
        return False

    def added(self, output: Tree, num_samples: int) -> ShareLoss:
        """What the model has added to the loss of a share.

        Raises:
            NotImplementedError: it adds nothing.
        """
        raise NotImplementedError

    def may_take_whole(self, *, in_stages: bool) -> bool:
        """Whether it may turn out that the loss must be taken on whole batches.

        In a pipeline a microbatch goes backward before it is known what several losses of the
        others weigh.
        """
        return not self.is_certain or (in_stages and bool(self.parts))

    def user_losses(self) -> list[Any]:
        """The objects that were given, each of which may keep something."""
        given = list(self.loss.values()) if isinstance(self.loss, Mapping) else self.loss
        losses = given if isinstance(given, list | tuple) else [given]
        return [one.loss if isinstance(one, TurnedLoss) else one for one in losses]

    @abstractmethod
    def __call__(self, output: Tree, batch: Batch) -> ShareLoss | JointLoss:
        """The loss of a share, of what the model has made of it.

        Raises:
            LossError: the loss is something else than agreed.
            DataError: there are no targets.
        """


def nothing(tensors: Tree) -> ShareLoss:
    """A share in which nothing counts.

    It goes backward with zeros, so that BatchNorm layers meet the other shares there, and what it
    has used counts as used.
    """
    values = tuple(tensors_of(tensors))
    return ShareLoss(values=values, seeds=(0.0,) * len(values), total=0.0, weight=0.0)
