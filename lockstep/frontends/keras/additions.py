"""What layers add to the loss: means or sums over the samples.

``add_loss`` takes a number, and nobody says what it was made of: ``ops.mean`` of something over the
batch, or ``ops.sum``, as activity regularizers are. The loss of the whole batch is the mean of what
the shares add, or their sum. So the model is run on a few samples before it is trained: on some, on
others, and on both together.

Not covered: what is neither (a deviation over the batch, a product of two means). It is refused
where these samples show it.
"""

import warnings

from lockstep.data.sources import ArraySource
from lockstep.data.trees import Tree, tensors_of
from lockstep.errors import ModelError, level_of_user
from lockstep.frontends.keras.independence import check_outputs
from lockstep.frontends.keras.layer_state import check_layer_state
from lockstep.frontends.keras.looking import (
    FEW,
    Seen,
    added_losses,
    fixed_batch_size,
    left_as_found,
    look,
    lots,
)
from lockstep.frontends.keras.losses import Additions
from lockstep.frontends.keras.model import KerasModel, giving_losses

_TOLERANCE = 1e-3


def find_additions(
    module: KerasModel, source: ArraySource, *, is_divided: bool, trains: bool = True
) -> Additions:
    """What a model's layers add, having seen that batches can be divided.

    Args:
        module: the model; it and the random streams are left as they were found.
        source: samples to look at.
        is_divided: batches are.
        trains: the model is going to be trained.

    Raises:
        ModelError: what a layer adds is neither a mean nor a sum, or batches cannot be divided.
    """
    with giving_losses(module, True), left_as_found(module) as state:
        if is_divided:
            _check_batch_size(module)
            check_layer_state(module, state, lots(module, source, FEW))
        seen = look(module, source, state, FEW if is_divided else None)
        if is_divided:
            check_outputs(module, state, seen, trains=trains)
        return _found(module, seen, is_divided=is_divided)


def _check_batch_size(module: KerasModel) -> None:
    fixed = fixed_batch_size(module.model)
    if fixed is not None:
        raise ModelError(
            "Devices work on parts of a batch, so a model must take batches of any size.",
            received=f"{module.model.name!r}, with stateful layers for {fixed} samples",
            fix="Make them without stateful=True, or use SingleDeviceStrategy.",
        )


def _found(module: KerasModel, seen: Seen, *, is_divided: bool) -> Additions:
    made = seen.trained[-1]
    kinds = {False: _kinds(module, seen.evaluated, is_divided=is_divided)}
    # What layers add is the same in training, but for what is random or normalised by batches.
    same = len(made["losses"]) == len(kinds[False])
    kinds[True] = kinds[False] if same else _kinds(module, seen.trained, is_divided=is_divided)
    return Additions(
        are_sums=kinds,
        has_penalties=bool(made["penalties"]),
        has_masks=any(True for _ in tensors_of(made["masks"])),
        has_rows=all(output.dim() > 1 for output in tensors_of(made["outputs"])),
    )


def _kinds(module: KerasModel, outputs: list[Tree], *, is_divided: bool) -> tuple[bool, ...]:
    found = added_losses(outputs)
    if not is_divided:
        return (False,) * len(found)
    return tuple(_is_sum(module, number, *values) for number, values in enumerate(found))


def _is_sum(module: KerasModel, number: int, some: float, others: float, both: float) -> bool:
    """Whether what is added for some samples, for others, and for both, is a sum."""
    size = max(map(abs, (some, others, both)))
    where = f"in the model {module.model.name!r}, loss {number} that layers add is"
    if not size:
        warnings.warn(
            f"{where[0].upper()}{where[1:]} 0 for the first samples, and taken for a mean over "
            "samples. If it is a sum, make it a mean, or use SingleDeviceStrategy.",
            stacklevel=level_of_user(),
        )
    for parts in (2, 1):
        if abs(both - (some + others) / parts) <= _TOLERANCE * size:
            return parts == 1
    raise ModelError(
        "What a layer adds to the loss must be a mean or a sum over its samples.",
        received=f"{where} {some:g} for some samples, {others:g} for others, and {both:g} for "
        "all of them",
        fix="Add ops.mean(...) or ops.sum(...) of values that each come from one sample; or "
        "give the model a compute_loss of its own, which is taken on the whole batch; or use "
        "SingleDeviceStrategy.",
    )
