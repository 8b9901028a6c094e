"""The reduction of a Keras loss over a share: a total, and its denominator.

Keras's own losses give a value for each sample. For the user's losses the reduction is inferred
from the operations that they run: values of samples, or a mean or sum of these. Otherwise it is a
guess, and the loss is called again with all samples of the batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

import keras
import torch
from keras import ops, tree
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.losses.loss import Loss, squeeze_or_expand_to_same_rank
from keras.src.losses.losses import LossFunctionWrapper

from lockstep.data.trees import Tree
from lockstep.errors import LossError
from lockstep.parallel.independence.loss_trial import adds_up
from lockstep.parallel.loss.reduction_inference import Known, KnownMeans
from lockstep.parallel.loss.share_losses import ShareLoss

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")
# Functions of Keras's that look across samples.
_ACROSS_SAMPLES = ("circle", "dice", "tversky")


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """A loss of a share before its division.

    Attributes:
        total: the sum of the values.
        weight: the denominator; None for a sum.
        is_by_sample: True if the weight is the number of samples times a constant.
        is_guess: True if the denominator is unknown; see ``ShareLoss``.
    """

    total: torch.Tensor
    weight: float | None
    is_by_sample: bool = True
    is_guess: bool = False

    @property
    def number(self) -> torch.Tensor:
        """The loss as Keras computes it."""
        return self.total / self.weight if self.weight else self.total


@dataclass
class LossProbe:
    """Finds the totals and denominators of losses.

    Attributes:
        has_rows: see ``Additions``.
        sees_all: True if the samples are all of the batch.
        batch_size: samples of the batch.
        found: results of the calls so far.
    """

    has_rows: bool
    sees_all: bool = False
    batch_size: int = 0
    found: list[Reduced] = field(default_factory=list)
    _tried: set[tuple[int, int, int]] = field(default_factory=set)

    def reduce(self, loss: Any, target: Any, output: Any, sample_weight: Any) -> Reduced:
        """The total and denominator of ``loss(target, output, sample_weight)``."""
        if self.has_rows and is_by_sample(loss):
            return self._of_values(loss, target, output, sample_weight, is_inferred=False)
        size = _num_samples(output)
        if self.sees_all:
            return _one_number(loss(target, output, sample_weight), Known(size), size, loss)
        if type(loss).__call__ is not Loss.__call__:
            value, known = self._try_inferring(loss, loss, (target, output, sample_weight), size)
            return _one_number(value, known, size, loss)
        return self._of_values(loss, target, output, sample_weight, is_inferred=True)

    def _of_values(
        self, loss: Any, target: Any, output: Any, sample_weight: Any, *, is_inferred: bool
    ) -> Reduced:
        """As ``Loss.__call__``, without the division."""
        size, mask = _num_samples(output), get_keras_mask(output)
        given = tuple(
            tree.map_structure(lambda one: ops.convert_to_tensor(one, dtype=loss.dtype), tensors)
            for tensors in (target, output)
        )
        known: Known | None = Known(size)
        if is_inferred:
            values, known = self._try_inferring(loss, *_function(loss, given), size)
        else:
            values = loss.call(*given)
        masks = [one for one in (mask, get_keras_mask(values)) if one is not None]
        values = ops.convert_to_tensor(values, dtype=loss.dtype)
        if loss.reduction in (None, "none") or values.dim() == 0:
            weighs = sample_weight is not None or masks
            return _one_number(values, None if weighs else known, size, loss)
        if known is None or (sample_weight is not None and len(values) != size):
            return Reduced(total=values.sum(), weight=size, is_guess=True)
        return _reduced(loss.reduction, values, sample_weight, masks)

    def _try_inferring(
        self, loss: Any, function: Callable[..., Any], given: tuple[Any, ...], size: float
    ) -> tuple[torch.Tensor, Known | None]:
        """The value of a user's function for a share, and its reduction if that is known."""
        try:
            value, known, has_size = _inferred(function, given, int(size))
        except Exception:  # too few samples, perhaps: it is called again with all
            return torch.zeros(()), None
        if known is None or known.weight not in (None, size):
            return value, None
        return value, known if not has_size or self._adds_up(loss, function, given, size) else None

    def _adds_up(
        self, loss: Any, function: Callable[..., Any], given: tuple[Any, ...], size: float
    ) -> bool:
        """Whether shares add up to the batch's value, tried once for each size of both."""
        trial = id(loss), int(size), self.batch_size
        if trial in self._tried:
            return True
        self._tried.add(trial)
        held = [loss, *variables_of(loss)]
        return adds_up(partial(_sums, function), given, *trial[1:], held=held)


def probed(compiled: Any, probe: LossProbe) -> Any:
    """A copy whose losses record totals and denominators, and update no metrics."""
    copied = object.__new__(type(compiled))
    entries = [one._replace(loss=_ProbedLoss(one.loss, probe)) for one in compiled._flat_losses]
    # The model's own list refers to the model, which would be pickled with it.
    names = compiled.output_names and list(compiled.output_names)
    vars(copied).update(vars(compiled), _flat_losses=entries, output_names=names)
    vars(copied)["_metrics"] = [None] * len(entries)
    return copied


@dataclass(frozen=True)
class _ProbedLoss:
    """A loss that records its total and denominator when it is called."""

    loss: Any
    probe: LossProbe

    def __call__(self, target: Any, output: Any, sample_weight: Any = None) -> torch.Tensor:
        reduced = self.probe.reduce(self.loss, target, output, sample_weight)
        self.probe.found.append(reduced)
        return reduced.number


def _inferred(
    function: Callable[..., Any], given: tuple[Any, ...], size: int
) -> tuple[torch.Tensor, Known | None, bool]:
    """A function's value for samples, its reduction if known, and whether it reads sizes."""
    with KnownMeans(given, size) as inference:
        value = function(*given)
    return value, inference.known(value), inference.has_size


def _sums(function: Callable[..., Any], given: tuple[Any, ...]) -> ShareLoss:
    """The total and weight of a function's value for samples."""
    size = int(_num_samples(given[1]))
    value, known, _ = _inferred(function, given, size)
    is_mean = known is not None and known.weight is not None and not value.dim()
    total = value.sum() * (size if is_mean else 1)
    return ShareLoss(
        values=(value,), seeds=(1.0,), total=total, weight=size, is_guess=known is None
    )


def _function(loss: Any, given: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function that ``loss.call`` calls: the user's, without Keras's checks of shapes."""
    if type(loss) is LossFunctionWrapper and not any(map(tree.is_nested, given)):
        return partial(loss.fn, **loss._fn_kwargs), squeeze_or_expand_to_same_rank(*given)
    return loss.call, given


def _one_number(number: torch.Tensor, known: Known | None, size: float, loss: Any) -> Reduced:
    """A loss whose own function reduces it to one number."""
    if number.dim():
        raise LossError(
            "A loss must reduce the values of its samples to one number.",
            received=f"{loss.name} with reduction={loss.reduction!r}",
            fix='Use reduction="sum_over_batch_size", Keras\'s default.',
        )
    if known is not None and known.weight is None:
        return Reduced(total=number, weight=None)
    return Reduced(total=number * size, weight=size, is_guess=known is None)


def _reduced(
    reduction: str, values: torch.Tensor, sample_weight: Any, masks: Sequence[torch.Tensor]
) -> Reduced:
    """As ``keras.src.losses.loss.reduce_weighted_values``, without the division."""
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
        # Each entry of the mask is for as many values.
        count = float(mask.sum()) * values.numel() / mask.numel()
        return Reduced(total=total, weight=count, is_by_sample=False)
    numel = (values if weights is None else torch.broadcast_tensors(values, weights)[0]).numel()
    return Reduced(total=total, weight=float(numel))


def masked(output: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """An output with its mask attached, as in Keras."""
    if mask is not None and get_keras_mask(output) is None:
        set_keras_mask(output, mask)
    return output


def masked_outputs(output: Tree) -> Tree:
    """The model's outputs for a share, with masks."""
    return tree.map_structure(masked, output["outputs"], output["masks"])


def _num_samples(output: Any) -> float:
    return float(len(tree.flatten(output)[0]))


def is_of_each_sample(function: Any, options: dict[str, Any]) -> bool:
    """Whether a function is one of Keras's own that gives each sample's value from it alone."""
    return (
        isinstance(function, FunctionType)
        and function.__module__.startswith("keras.src.")
        and function.__name__ not in _ACROSS_SAMPLES
        and options.get("axis", -1) == -1
    )


def is_by_sample(loss: Any) -> bool:
    """Whether a loss is one of Keras's own that gives a value for each sample."""
    return type(loss).__module__ == LossFunctionWrapper.__module__ and is_of_each_sample(
        loss.fn, loss._fn_kwargs
    )


def variables_of(loss: Any) -> list[Any]:
    """The variables that a loss has as attributes."""
    attributes = getattr(loss, "__dict__", {}).values()
    return [one for one in attributes if isinstance(one, keras.Variable)]


def may_divide_by_weights(loss: Any) -> bool:
    """Whether a loss may divide by anything but the number of samples."""
    ignores = getattr(loss, "_fn_kwargs", {}).get("ignore_class") is not None
    return ignores or getattr(loss, "reduction", None) == "mean_with_sample_weight"
