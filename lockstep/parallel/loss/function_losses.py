"""Losses that compare outputs with targets: functions of (output, target), and their contract.

A loss function returns the loss of a share in one of three forms:

- a scalar whose reduction is known (``parallel.loss.reduction_inference``); otherwise the loss is
  computed on the whole batch (``parallel.loss.whole_batch``);
- per-sample values of shape (n,);
- a pair ``(total, weight)``: a sum and the weight of that sum.

torch's own cross-entropy and NLL losses return a scalar whose true denominator depends on
``ignore_index`` and class weights: for these the pair is computed.
"""

import inspect
import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lockstep.capture.state import left_alone
from lockstep.data.map_style.sources import Batch
from lockstep.data.order import restore_streams, stream_states
from lockstep.data.trees import Tree, map_tensors
from lockstep.errors import DataError, LossError, problem
from lockstep.parallel.independence.loss_trial import adds_up
from lockstep.parallel.loss.reduction_inference import KnownMeans
from lockstep.parallel.loss.share_losses import LossAdapter, ShareLoss, nothing
from lockstep.parallel.loss.torch_losses import ClassLoss, Loss, reduction_of, unreduced

_AGREED = "The loss must return a scalar, values of shape (n,), or a pair (total, weight)."


class FunctionAdapter(LossAdapter):
    """Calls a loss function and reads its result."""

    _is_proven = False  # the loss read last is additive for any samples

    def __init__(self, loss: Loss) -> None:
        self.loss = loss
        self._takes_weight = _takes(loss, "sample_weight")
        self._tried: set[tuple[int, int]] = set()  # sizes of a share and of the batch
        self._called: set[int] = set()  # sizes for which it was called twice

    @property
    def is_certain(self) -> bool:  # type: ignore[override]
        """True for torch's own losses."""
        return reduction_of(self.loss) is not None

    @property
    def takes_parts(self) -> bool:  # type: ignore[override]
        """True for torch's own cross-entropy."""
        known = ClassLoss.recognise(self.loss)
        return known is not None and known.function is F.cross_entropy

    def __call__(self, output: Tree, batch: Batch) -> ShareLoss:
        if batch.targets is None:
            raise missing_targets()
        by_class = ClassLoss.recognise(self.loss)
        if by_class is not None and isinstance(output, torch.Tensor):
            return self._by_class(by_class, output, batch)
        if self.uses_whole_batch or not (self.sees_all or self.is_alone or self.is_certain):
            self._check_repeatable(output, batch)
        if self.sees_all or self.is_alone or self.is_certain:
            return self._read(output, batch)
        try:
            share = self._read(output, batch)
        except Exception as error:  # it may need more samples
            self.failure = f"{type(error).__name__}: {error}"
            return replace(nothing(output), is_guess=True)
        is_known = share.is_guess or self._adds_up(output, batch)
        return share if is_known else replace(share, is_guess=True)

    def _check_repeatable(self, output: Tree, batch: Batch) -> None:
        """Check once for each size that the same share has the same loss after a call as before.

        Of a loss with attributes, which are put back.

        Raises:
            LossError: it has another: the loss depends on the calls before.
        """
        if batch.num_samples in self._called or not getattr(self.loss, "__dict__", None):
            return
        self._called.add(batch.num_samples)
        streams, losses = stream_states(), []
        with left_alone(nn.Module(), self.loss), torch.no_grad():
            for _ in range(2):
                restore_streams(streams)
                try:
                    one = self._read(_copied(output), batch)
                except Exception:  # reported by the call that counts
                    return
                losses.append((float(one.total), float(one.weight)))
        if losses[0] != losses[1] and all(map(math.isfinite, losses[0])):
            raise LossError(
                "The loss of a batch must not depend on calls before: devices call it for shares "
                "of a batch, and the first step is made twice.",
                received=f"a loss that is {losses[0][0]:.6g} for some samples, and "
                f"{losses[1][0]:.6g} for the same samples in the next call",
                fix="Keep what it remembers (a center, a memory bank, a count) outside of it, and "
                "change it in a callback; or use TensorParallelStrategy or SingleDeviceStrategy.",
            )

    def _adds_up(self, output: Tree, batch: Batch) -> bool:
        """True if shares give the loss of the batch; tested once for each pair of sizes."""
        sizes = batch.num_samples, self.batch_size
        if self._is_proven or sizes in self._tried:
            return True
        self._tried.add(sizes)

        def loss_of(given: Tree) -> ShareLoss:
            output, targets, weights, places = given
            size = len(places)
            part = Batch(inputs=None, targets=targets, sample_weight=weights, num_samples=size)
            return self._read(output, part)

        given = output, batch.targets, batch.sample_weight, torch.arange(batch.num_samples)
        return adds_up(loss_of, given, *sizes, held=[self.loss])

    def _read(self, output: Tree, batch: Batch) -> ShareLoss:
        target, sample_weight, num_samples = batch.targets, batch.sample_weight, batch.num_samples
        self._is_proven = False
        # Read again for every share: a loss may change between two fits, or in a callback.
        reduction = reduction_of(self.loss)
        if sample_weight is not None and self._takes_weight:
            returned: Any = self.loss(output, target, sample_weight=sample_weight)
            return self._weighted_pair(returned, output)
        if sample_weight is not None and reduction == "mean":
            values = unreduced(self.loss)(output, target)
            returned = values.flatten(1).mean(1) if values.dim() > 1 else values
        elif reduction is None and not self.sees_all:
            return self._watched(output, target, sample_weight, num_samples)
        else:
            returned = self.loss(output, target)
        share = read_returned(returned, output, sample_weight, num_samples)
        is_sum = reduction == "sum" and returned.dim() == 0
        return self._sum(returned, num_samples) if is_sum else share

    def _by_class(self, loss: ClassLoss, output: torch.Tensor, batch: Batch) -> ShareLoss:
        self._is_proven = False
        total, weight = loss(output, batch.targets, batch.sample_weight, batch.least_target)
        if batch.sample_weight is not None or loss.class_weight is not None:
            return _pair(total, weight)
        # The weight is a number of targets: valid, and maybe 0.
        return ShareLoss(
            values=(total,), seeds=(1.0,), total=total.detach().double(), weight=weight
        )

    def _watched(
        self, output: Tree, target: Tree, sample_weight: torch.Tensor | None, num_samples: int
    ) -> ShareLoss:
        """The loss of a share by a user's function; a guess if its reduction is unknown."""
        with KnownMeans((output, target), num_samples) as watching:
            returned = self.loss(output, target)
        share = read_returned(returned, output, sample_weight, num_samples)
        known = watching.known(returned) if isinstance(returned, torch.Tensor) else None
        self._is_proven = known is not None and not watching.has_size
        if not (isinstance(returned, torch.Tensor) and returned.dim() == 0):
            return share
        if known is None:
            return replace(share, is_guess=not self.is_alone)
        if known.weight is None:
            return self._sum(returned, num_samples)
        return mean_over(returned, known.weight) if known.weight else nothing(output)

    def _sum(self, value: torch.Tensor, num_samples: int) -> ShareLoss:
        return sum_over(value, num_samples, self.batch_size or num_samples)

    def _weighted_pair(self, returned: Any, output: Tree) -> ShareLoss:
        if isinstance(returned, tuple | list) and len(returned) == 2:
            return _pair_or_nothing(returned, output)
        raise LossError(
            "A loss that takes sample_weight must return a pair (total, weight).",
            received=type(returned).__name__,
            fix="Return (sum of weight times loss, sum of weight).",
        )


def read_returned(
    returned: Any, output: Tree, sample_weight: torch.Tensor | None, num_samples: int
) -> ShareLoss:
    """Read the result of a loss function, in one of the three forms."""
    if isinstance(returned, tuple | list) and len(returned) == 2:
        if sample_weight is not None:
            raise LossError(
                "With sample_weight a loss that returns (total, weight) must weigh the samples "
                "itself.",
                received="a loss without an argument named sample_weight",
                fix="Take (output, target, sample_weight), or return values of shape (n,).",
            )
        return _pair_or_nothing(returned, output)
    if not isinstance(returned, torch.Tensor):
        raise LossError(_misfit(f"{type(returned).__name__}"))
    if returned.dim() == 0:
        if sample_weight is not None:
            raise LossError(
                "With sample_weight the loss must return a value for each sample.",
                received="a scalar",
                fix='Return values of shape (n,), for torch losses with reduction="none".',
            )
        return mean_over(returned, float(num_samples))
    if returned.shape == (num_samples,):
        return _per_sample(returned, sample_weight)
    raise LossError(_misfit(f"a tensor of shape {tuple(returned.shape)} for {num_samples} samples"))


def mean_over(value: torch.Tensor, weight: float) -> ShareLoss:
    """The loss of a scalar that is a mean over ``weight`` terms."""
    return ShareLoss(
        values=(value,), seeds=(weight,), total=value.detach().double() * weight, weight=weight
    )


def sum_over(value: torch.Tensor, num_samples: int, batch_size: int) -> ShareLoss:
    """The loss of a scalar that is a sum: the batch's loss is the sum of the shares' losses."""
    total = batch_size * value.detach().double()
    return ShareLoss(
        values=(value,), seeds=(float(batch_size),), total=total, weight=float(num_samples)
    )


def _per_sample(values: torch.Tensor, sample_weight: torch.Tensor | None) -> ShareLoss:
    if sample_weight is None:
        return ShareLoss(
            values=(values,),
            seeds=(torch.ones_like(values),),
            total=values.detach().sum(dtype=torch.float64),
            weight=float(len(values)),
        )
    weights = sample_weight.to(values)
    # A loss that is not finite spreads to the total, even with weight 0: its gradient is NaN.
    return ShareLoss(
        values=(values,),
        seeds=(weights,),
        total=(values.detach() * weights).sum(dtype=torch.float64),
        weight=weights.sum(dtype=torch.float64),
    )


def _pair_or_nothing(returned: Any, output: Tree) -> ShareLoss:
    """A user's pair; with weight 0 its total may be 0 / 0 or a constant."""
    total, weight = returned
    share = _pair(total, weight)
    if share.weight == 0 and not math.isfinite(share.total):
        return nothing(output)
    if share.weight == 0 and not total.requires_grad:
        return replace(nothing(output), total=share.total)
    return share


def _pair(total: Any, weight: Any) -> ShareLoss:
    if not (isinstance(total, torch.Tensor) and total.dim() == 0):
        raise LossError(_misfit(f"a pair whose total is {_shape(total)}"))
    number = read_weight(weight)
    return ShareLoss(values=(total,), seeds=(1.0,), total=total.detach().double(), weight=number)


def read_weight(weight: Any, whose: str = "a pair whose weight") -> float:
    """A weight as a number.

    Raises:
        LossError: it is no weight, or depends on trained parameters: it may be a second loss.
    """
    if isinstance(weight, torch.Tensor) and weight.requires_grad:
        raise LossError(_misfit(f"{whose} depends on trainable parameters"))
    number = weight.detach() if isinstance(weight, torch.Tensor) else weight
    try:
        number = float(number)
    except (TypeError, ValueError, RuntimeError) as error:
        raise LossError(_misfit(f"{whose} is {_shape(weight)}")) from error
    if not (math.isfinite(number) and number >= 0):
        raise LossError(_misfit(f"{whose} is {number}"))
    return number


def _shape(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return type(value).__name__


def _misfit(received: str) -> str:
    return problem(_AGREED, received=received, fix="See docs/exactness.md for examples of each.")


def _copied(tensors: Tree) -> Tree:
    """Copies, which may be changed in place."""
    return map_tensors(torch.clone, tensors)


def missing_targets() -> DataError:
    """The error for data without targets."""
    return DataError(
        "A loss that compares outputs with targets needs targets.",
        received="data without targets",
        fix="Pass (inputs, targets), which lockstep.data.columns makes of dicts with named "
        "columns; or loss=lockstep.OwnLoss() where the model computes its own loss.",
    )


def _takes(loss: Loss, argument: str) -> bool:
    function = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        return argument in inspect.signature(function).parameters
    except (TypeError, ValueError):  # builtins have no signature
        return False
