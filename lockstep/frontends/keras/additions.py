"""What layers add to the loss, and losses that return one number: means or sums over the samples.

``add_loss`` takes a number, and nobody says what it was made of: ``ops.mean`` of something over the
batch, or ``ops.sum``, as activity regularizers are. The loss of the whole batch is the mean of what
the shares add, or their sum. So the model is run on a few samples before it is trained: on some, on
others, and on both together; on more of them where what is added is 0 for the first.

A compiled loss may return one number for a batch, too. It is given what the model makes of some
samples in parts, apart and together.

Not covered: what is neither (a deviation over the batch, a product of two means). It is refused
where these samples show it.
"""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lockstep.capture.state import ModelState
from lockstep.data.sources import ArraySource
from lockstep.data.trees import Tree, map_tensors, tensors_of
from lockstep.errors import ModelError, level_of_user, problem
from lockstep.frontends.keras.independence import check_losses, check_outputs
from lockstep.frontends.keras.layer_state import check_layer_state
from lockstep.frontends.keras.looking import (
    FEW,
    MANY,
    added_losses,
    fixed_batch_size,
    left_as_found,
    look,
    losses_as_found,
    lots,
)
from lockstep.frontends.keras.losses import Additions, KerasLoss
from lockstep.frontends.keras.model import KerasModel, giving_losses

_TOLERANCE = 1e-3
# Losses are given the same outputs alone and together; where terms cancel, a few differ by more.
_TOLERANCE_OF_LOSSES, _MOST_ALIKE = 1e-4, 0.75


def find_additions(
    module: KerasModel,
    compiled: Any,
    source: ArraySource,
    *,
    is_divided: bool,
    trains: bool = True,
) -> Additions:
    """What a model's layers add, and whether all its losses divide by the number of samples.

    Args:
        module: the model; it and the random streams are left as they were found.
        compiled: its ``CompileLoss``, built, or None.
        source: samples to look at.
        is_divided: batches are, so that it matters what is a mean and what a sum.
        trains: the model is going to be trained.

    Raises:
        ModelError: what a layer adds, or a loss returns, is neither a mean nor a sum, or depends
            on what else is in the batch.
    """
    fixed = fixed_batch_size(module.model)
    if is_divided and fixed is not None:
        raise ModelError(
            problem(
                "Devices work on parts of a batch, so a model must take batches of any size.",
                received=f"{module.model.name!r}, with stateful layers for {fixed} samples",
                fix="Make them without stateful=True, or use SingleDeviceStrategy.",
            )
        )
    with giving_losses(module, True), losses_as_found(compiled), left_as_found(module) as state:
        return _find(module, compiled, source, state, is_divided=is_divided, trains=trains)


def _find(
    module: KerasModel,
    compiled: Any,
    source: ArraySource,
    state: ModelState,
    *,
    is_divided: bool,
    trains: bool,
) -> Additions:
    if is_divided:
        check_layer_state(module, state, lots(module, source, FEW))
    seen = look(module, source, state, FEW if is_divided else None)
    if seen.has_zeros and is_divided:
        seen = look(module, source, state, MANY)
    if is_divided:
        check_outputs(module, state, seen if trains else replace(seen, trained=[]))
    kinds = {False: _kinds(module, seen.evaluated, is_divided=is_divided)}
    # What layers add is the same in training, but for what is random or normalised by batches.
    same = len(seen.trained[-1]["losses"]) == len(kinds[False])
    kinds[True] = kinds[False] if same else _kinds(module, seen.trained, is_divided=is_divided)
    loss = KerasLoss(compiled, Additions(are_sums=kinds))
    reduced = loss.reduced(seen.trained[-1], seen.targets)
    own = [number for number, one in enumerate(reduced) if one.is_own] if is_divided else []
    if is_divided:
        check_losses(module, loss, seen)
    return Additions(
        are_sums=kinds,
        has_penalties=bool(seen.trained[-1]["penalties"]),
        weighs_alike=all(one.is_by_sample for one in reduced),
        has_rows=all(output.dim() > 1 for output in tensors_of(seen.trained[-1]["outputs"])),
        own_sums=_own_sums(module, loss, own, source, state) if own else frozenset(),
    )


def _own_sums(
    module: KerasModel,
    loss: KerasLoss,
    numbers: Sequence[int],
    source: ArraySource,
    state: ModelState,
) -> frozenset[int]:
    """Which of some losses are sums: what each makes of two lots of samples, and of both."""
    seen = look(module, source, state, MANY)
    everything = (seen.evaluated[-1]["outputs"], seen.evaluated[-1]["masks"], seen.targets)

    def values(start: int, stop: int) -> list[float]:
        outputs, masks, targets = map_tensors(lambda tensor: tensor[start:stop], everything)
        reduced = loss.reduced({"outputs": outputs, "masks": masks}, targets)
        return [float(one.total) / (one.weight or 1.0) for one in reduced]

    found = [
        [
            values(start, start + FEW),
            values(start + FEW, start + 2 * FEW),
            values(start, start + 2 * FEW),
        ]
        for start in range(0, 2 * MANY, 2 * FEW)
    ]
    return frozenset(
        number
        for number in numbers
        if _is_sum(
            module,
            f"loss {number} of compile returns",
            [(some[number], others[number], both[number]) for some, others, both in found],
            tolerance=_TOLERANCE_OF_LOSSES,
        )
    )


def _kinds(module: KerasModel, outputs: list[Tree], *, is_divided: bool) -> tuple[bool, ...]:
    found = added_losses(outputs)
    if not is_divided:
        return (False,) * len(found)
    return tuple(
        _is_sum(module, f"loss {number} that layers add is", [values])
        for number, values in enumerate(found)
    )


def _is_sum(
    module: KerasModel,
    subject: str,
    lots: Sequence[tuple[float, ...]],
    tolerance: float = _TOLERANCE,
) -> bool:
    """Whether what comes of some samples, of others, and of both, lot by lot, is a sum."""
    sizes = [max(map(abs, lot)) for lot in lots]
    where = f"in the model {module.model.name!r}, {subject}"
    if not any(sizes):
        warnings.warn(
            f"{where[0].upper()}{where[1:]} 0 for the first samples, and taken for a mean over "
            "samples. If it is a sum, make it a mean, or use SingleDeviceStrategy.",
            stacklevel=level_of_user(),
        )
    for parts, is_sum in ((2, False), (1, True)):
        alike = [
            abs(both - (some + others) / parts) <= tolerance * size
            for (some, others, both), size in zip(lots, sizes, strict=True)
        ]
        if sum(alike) >= _MOST_ALIKE * len(lots):
            return is_sum
    some, others, both = lots[0]
    raise ModelError(
        problem(
            "One number for a batch must be a mean or a sum over its samples.",
            received=f"{where} {some:g} for some samples, {others:g} for others, and {both:g} for "
            "all of them",
            fix="Return a value for each sample, or ops.mean(...) or ops.sum(...) of values that "
            "each come from one sample; or use SingleDeviceStrategy.",
        )
    )
