"""What a loss of Keras's makes of the values of a share: a total, and what it is divided by.

Keras's own losses make values of one sample each. The user's are watched while they run: where it
is seen that theirs are such, or are a mean or a sum of such, that is known; else it is a guess, and
they are to be asked again with all samples of the batch.
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
    """What a loss has made of the values of a share.

    Attributes:
        total: their sum.
        weight: what it is divided by; None where it is not.
        is_by_sample: the weight is the number of samples but for a constant factor.
        is_guess: nobody knows what it is a mean of; see ``ShareLoss``.
    """

    total: torch.Tensor
    weight: float | None
    is_by_sample: bool = True
    is_guess: bool = False

    @property
    def number(self) -> torch.Tensor:
        """What Keras would have made of them."""
        return self.total / self.weight if self.weight else self.total


@dataclass
class Asking:
    """How losses are asked what they make of samples.

    Attributes:
        has_rows: see ``Additions``.
        sees_all: these are all samples of the batch.
        batch_size: as many has the batch.
        found: what they have said.
    """

    has_rows: bool
    sees_all: bool = False
    batch_size: int = 0
    found: list[Reduced] = field(default_factory=list)
    _tried: set[tuple[int, int, int]] = field(default_factory=set)

    def reduce(self, loss: Any, target: Any, output: Any, sample_weight: Any) -> Reduced:
        """What ``loss(target, output, sample_weight)`` divides, and by what."""
        if self.has_rows and is_by_sample(loss):
            return self._of_values(loss, target, output, sample_weight, is_watched=False)
        size = _num_samples(output)
        if self.sees_all:
            return _one_number(loss(target, output, sample_weight), Known(size), size, loss)
        if type(loss).__call__ is not Loss.__call__:
            value, known = self._watched(loss, loss, (target, output, sample_weight), size)
            return _one_number(value, known, size, loss)
        return self._of_values(loss, target, output, sample_weight, is_watched=True)

    def _of_values(
        self, loss: Any, target: Any, output: Any, sample_weight: Any, *, is_watched: bool
    ) -> Reduced:
        """As ``Loss.__call__``, but for the division."""
        size, mask = _num_samples(output), get_keras_mask(output)
        given = tuple(
            tree.map_structure(lambda one: ops.convert_to_tensor(one, dtype=loss.dtype), tensors)
            for tensors in (target, output)
        )
        known: Known | None = Known(size)
        if is_watched:
            values, known = self._watched(loss, *_function(loss, given), size)
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

    def _watched(
        self, loss: Any, function: Callable[..., Any], given: tuple[Any, ...], size: float
    ) -> tuple[torch.Tensor, Known | None]:
        """What a function of the user's makes of a share, and what is known of that."""
        try:
            value, known, has_size = _seen(function, given, int(size))
        except Exception:  # perhaps these are too few samples for it: it is asked again, with all
            return torch.zeros(()), None
        if known is None or known.weight not in (None, size):
            return value, None
        return value, known if not has_size or self._adds_up(loss, function, given, size) else None

    def _adds_up(
        self, loss: Any, function: Callable[..., Any], given: tuple[Any, ...], size: float
    ) -> bool:
        """Whether shares tell what it is of a batch, tried once for each size of both."""
        trial = id(loss), int(size), self.batch_size
        if trial in self._tried:
            return True
        self._tried.add(trial)
        kept = getattr(loss, "__dict__", {}).values()
        held = [one for one in kept if isinstance(one, keras.Variable)]
        return adds_up(partial(_sums, function), given, *trial[1:], held=[loss, *held])


def asked(compiled: Any, asking: Asking) -> Any:
    """A copy whose losses say what they have made of the values, and count nothing."""
    copied = object.__new__(type(compiled))
    entries = [one._replace(loss=_Asked(one.loss, asking)) for one in compiled._flat_losses]
    # A list of the model's knows the model, and would have it sent along.
    names = compiled.output_names and list(compiled.output_names)
    vars(copied).update(vars(compiled), _flat_losses=entries, output_names=names)
    vars(copied)["_metrics"] = [None] * len(entries)
    return copied


@dataclass(frozen=True)
class _Asked:
    """Stands in for a loss where it is called."""

    loss: Any
    asking: Asking

    def __call__(self, target: Any, output: Any, sample_weight: Any = None) -> torch.Tensor:
        reduced = self.asking.reduce(self.loss, target, output, sample_weight)
        self.asking.found.append(reduced)
        return reduced.number


def _seen(
    function: Callable[..., Any], given: tuple[Any, ...], size: int
) -> tuple[torch.Tensor, Known | None, bool]:
    """What a function makes of samples, what is known of that, and whether it asks for sizes."""
    with KnownMeans(given, size) as watching:
        value = function(*given)
    return value, watching.known(value), watching.has_size


def _sums(function: Callable[..., Any], given: tuple[Any, ...]) -> ShareLoss:
    """The total and weight of what a function makes of samples."""
    size = int(_num_samples(given[1]))
    value, known, _ = _seen(function, given, size)
    is_mean = known is not None and known.weight is not None and not value.dim()
    total = value.sum() * (size if is_mean else 1)
    return ShareLoss(
        values=(value,), seeds=(1.0,), total=total, weight=size, is_guess=known is None
    )


def _function(loss: Any, given: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What ``loss.call`` comes to: the user's function alone, without Keras's look at shapes."""
    if type(loss) is LossFunctionWrapper and not any(map(tree.is_nested, given)):
        return partial(loss.fn, **loss._fn_kwargs), squeeze_or_expand_to_same_rank(*given)
    return loss.call, given


def _one_number(number: torch.Tensor, known: Known | None, size: float, loss: Any) -> Reduced:
    """A loss that was reduced by its own function."""
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


def masked_outputs(output: Tree) -> Tree:
    """What the model has made of a share, with masks."""
    return tree.map_structure(masked, output["outputs"], output["masks"])


def _num_samples(output: Any) -> float:
    return float(len(tree.flatten(output)[0]))


def is_of_each_sample(function: Any, options: dict[str, Any]) -> bool:
    """Whether a function is one of Keras's own that looks at one sample at a time."""
    return (
        isinstance(function, FunctionType)
        and function.__module__.startswith("keras.src.")
        and function.__name__ not in _ACROSS_SAMPLES
        and options.get("axis", -1) == -1
    )


def is_by_sample(loss: Any) -> bool:
    """Whether a loss is one of Keras's own that makes values of single samples."""
    return type(loss).__module__ == LossFunctionWrapper.__module__ and is_of_each_sample(
        loss.fn, loss._fn_kwargs
    )


def may_weigh(loss: Any) -> bool:
    """Whether a loss may divide by something else than the number of samples."""
    ignores = getattr(loss, "_fn_kwargs", {}).get("ignore_class") is not None
    return ignores or getattr(loss, "reduction", None) == "mean_with_sample_weight"
