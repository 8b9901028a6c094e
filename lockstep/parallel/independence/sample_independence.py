"""Tests with a share and its halves whether a sample's outputs depend on the other samples.

Shares of a batch run through the model separately. A model that takes a mean over the batch, that
decides by all samples at once, or that keeps earlier samples in an attribute sees only a part.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from lockstep.capture.calls import uncompiled
from lockstep.capture.layers import FrontEndModel
from lockstep.capture.state import ModelState, left_alone
from lockstep.data.map_style.sources import Batch
from lockstep.data.order import seed_streams
from lockstep.data.trees import Tree, tensors_of
from lockstep.errors import ModelError
from lockstep.parallel.data_parallel.side_effects import buffer_marks, depends_on_samples
from lockstep.parallel.independence.gradient_trial import check_gradients
from lockstep.parallel.independence.split_trial import (
    begin_again,
    halves,
    on_halves,
    repeated,
    rows_of,
)

# Relative to the largest value: above rounding errors, also of models that compute in float32
# inside, and far below the effect of other samples; then for half precision.
_TOLERANCE, _LOW_TOLERANCE = 1e-3, 0.1


def check_sample_independence(
    model: nn.Module, call: Callable[[Tree], Tree], batch: Batch, *, is_low: bool = False
) -> bool:
    """Compare the outputs of some samples with those of their halves; leaves the model as it is.

    Args:
        model: in its mode.
        call: runs it on inputs.
        batch: the samples.
        is_low: it computes in less than float32, also if its outputs are float32.

    Returns:
        True if its gradients are linear in the loss; see ``check_gradients``.

    Raises:
        ModelError: the outputs differ; or, if the model is in evaluation mode, its buffers.
    """
    has_rows: list[bool] = []
    # With gradients: a model may compute some in its forward pass. A compiled one is not compiled
    # for the sizes of these trials, after which it would be compiled for sizes of any kind.
    with left_alone(model) as state, torch.enable_grad(), uncompiled():
        try:
            error = _seen(model, call, batch, state, has_rows, is_low=is_low)
        except Exception:  # the model requires other batch sizes
            error = _seen_among_others(model, call, batch, state, is_low=is_low)
    if error is not None:
        raise error
    is_low |= isinstance(model, FrontEndModel) and model.has_low_precision
    root_of = partial(_root, model, call, has_rows)
    return not model.training or check_gradients(model, root_of, batch, is_low=is_low)


def _root(
    model: nn.Module,
    call: Callable[[Tree], Tree],
    has_rows: Sequence[bool],
    batch: Batch,
    start: int,
) -> torch.Tensor | None:
    """A sum over outputs, each times a factor of its sample and one of its place in the sample."""
    terms = []
    for output, is_row in zip(_tensors(model, call, batch), has_rows, strict=False):
        if is_row and output.is_floating_point() and output.requires_grad:
            first = start * len(output) // batch.num_samples
            by_row = _numbers(output, len(output), first).view(-1, *[1] * (output.dim() - 1))
            by_place = _numbers(output, output.shape[-1]) if output.dim() > 1 else 1.0
            terms.append((output * by_row * by_place).sum())
    return sum(terms[1:], terms[0]) if terms else None


def _numbers(like: torch.Tensor, count: int, first: int = 0) -> torch.Tensor:
    """Factors of both signs, also among the first two: a hook may clip on one side only."""
    return (2.5 * torch.arange(first, first + count, device=like.device)).cos().to(like)


def _seen(
    model: nn.Module,
    call: Callable[[Tree], Tree],
    batch: Batch,
    state: ModelState,
    has_rows: list[bool],
    *,
    is_low: bool,
) -> ModelError | None:
    """The error of a model that mixes samples; fills ``has_rows``, one bool for each output."""

    def look(part: Batch) -> tuple[list[torch.Tensor], list[torch.Tensor], dict[str, float]]:
        # In training ranks compare the buffers of all shares.
        return _outputs(model, call, part), _kept(model), {} if is_fit else buffer_marks(model)

    is_fit = model.training
    found, training = on_halves(model, look, batch, state, training=None), model.training
    if found is None:
        found, training = on_halves(model, look, batch, state, training=False), False
    if found is None:
        return None
    (whole, _, marks), (one, kept, own_marks), (other, also_kept, other_marks) = found
    if any(map(_are_pairs, whole, one, other)):
        return _sees_others(batch.num_samples, math.inf, training=training)
    is_low |= isinstance(model, FrontEndModel) and model.has_low_precision
    outputs = list(zip(whole, one, other, strict=False))
    has_rows += [_are_samples(*each) for each in outputs]
    apart = [
        torch.cat([first, second]) if is_row else both
        for (both, first, second), is_row in zip(outputs, has_rows, strict=True)
    ]
    if (distance := _distance(whole, apart, is_low=is_low)) is not None:
        return _sees_others(batch.num_samples, distance, training=training)
    for name, mark in marks.items():
        if not mark == own_marks[name] == other_marks[name]:
            return depends_on_samples(name, "a pass that does not train sets by its samples")
    if _are_equal(kept, also_kept) or batch.num_samples < 2:
        return None
    early, late = _equal_parts(batch)
    after = (_after(before, early, model, call, state) for before in (early, late))
    distance = _distance(*after, is_low=is_low)
    return None if distance is None else _remembers(distance)


def _seen_among_others(
    model: nn.Module,
    call: Callable[[Tree], Tree],
    batch: Batch,
    state: ModelState,
    *,
    is_low: bool,
) -> ModelError | None:
    """The same with equal numbers of samples: each half with the other half, and with itself."""
    half = batch.num_samples // 2
    early, late = range(half), range(half, 2 * half)
    found = []
    try:
        for numbers in ((*early, *late), (*early, *early), (*late, *late)):
            if not begin_again(model, state, None):
                return None
            seed_streams(0)
            found.append(_outputs(model, call, repeated(batch, numbers)))
    except Exception:  # no result
        return None
    for both, one, other in zip(*found, strict=False):
        if both.dim() and len(both) == len(one) == len(other) and half:
            rows = len(both) // 2
            apart = torch.cat([one[:rows], other[rows:]])
            distance = _distance([both], [apart], is_low=is_low)
            if distance is not None:
                return _sees_others(batch.num_samples, distance, training=model.training)
    return None


def _equal_parts(batch: Batch) -> tuple[Batch, Batch]:
    """Two parts of equal size: some models use kept tensors only if the size matches."""
    (first, _), size = halves(batch), batch.num_samples
    return rows_of(batch, first), rows_of(batch, slice(size - first.stop, size))


def _after(
    before: Batch,
    samples: Batch,
    model: nn.Module,
    call: Callable[[Tree], Tree],
    state: ModelState,
) -> list[torch.Tensor]:
    """The outputs of some samples after the model has run on others."""
    begin_again(model, state, None)
    call(before.inputs)
    seed_streams(0)
    return _outputs(model, call, samples)


def _outputs(model: nn.Module, call: Callable[[Tree], Tree], batch: Batch) -> list[torch.Tensor]:
    return [tensor.detach() for tensor in _tensors(model, call, batch)]


def _tensors(model: nn.Module, call: Callable[[Tree], Tree], batch: Batch) -> list[torch.Tensor]:
    made = call(batch.inputs)
    return [*tensors_of(model.outputs_in(made) if isinstance(model, FrontEndModel) else made)]


def _kept(model: nn.Module) -> list[torch.Tensor]:
    """Tensors in attributes of modules that are neither parameters nor buffers."""
    held = [
        value
        for module in model.modules()
        for name, value in vars(module).items()
        if name not in ("_parameters", "_buffers", "_modules")
    ]
    own = {id(one) for one in model.parameters()}
    return [tensor.detach() for tensor in tensors_of(held) if id(tensor) not in own]


def _are_equal(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


def _are_samples(both: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if the rows of an output are the samples."""
    if not (both.dim() and one.dim() and other.dim()):
        return False
    shapes = {each.shape[1:] for each in (both, one, other)}
    return len(one) + len(other) == len(both) and len(shapes) == 1


def _are_pairs(both: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if an output has a value for each pair of samples."""
    if not (both.dim() and one.dim() and other.dim()) or len(both) != len(one) + len(other):
        return False
    shapes = zip(*(each.shape[1:] for each in (both, one, other)), strict=False)
    return (len(both), len(one), len(other)) in shapes


def _distance(
    some: Sequence[torch.Tensor], others: Sequence[torch.Tensor], *, is_low: bool
) -> float | None:
    """The relative distance of outputs; None if it may be rounding."""
    for one, other in zip(some, others, strict=False):
        if one.shape != other.shape or not one.numel() or not one.is_floating_point():
            continue
        size, distance = (float(each.double().abs().max()) for each in (one, one - other))
        low = is_low or one.dtype in (torch.bfloat16, torch.float16)
        if distance > (_LOW_TOLERANCE if low else _TOLERANCE) * size:  # False for NaN
            return distance / size if size else math.inf
    return None


def _sees_others(num_samples: int, distance: float, *, training: bool) -> ModelError:
    return ModelError(
        "A model's output for a sample must not depend on the other samples of its batch: "
        "shares of the batch are computed separately.",
        received=f"outputs for {num_samples} samples in {'training' if training else 'evaluation'} "
        + (
            "with a value for each pair"
            if math.isinf(distance)
            else f"that differ by {distance:.1%}"
        )
        + " from those for parts of them",
        fix="Use nn.BatchNorm for statistics of the batch, compare samples in the loss, or train "
        "on one device.",
    )


def _remembers(distance: float) -> ModelError:
    return ModelError(
        "A model's output for a batch must not depend on the samples of earlier batches: each "
        "share sees different ones.",
        received=f"outputs that differ by {distance:.1%} after other samples, stored in "
        "attributes of modules",
        fix="Pass the stored values as an input, or train on one device.",
    )
