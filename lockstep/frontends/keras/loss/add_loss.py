"""Losses that layers add: means or sums over the samples.

``add_loss`` takes a number whose reduction is unknown: ``ops.mean`` over the batch, or ``ops.sum``
as in activity regularizers. The loss of the whole batch is the mean, or the sum, of those of its
shares. A dry run before training decides which (``layers.dry_run``); during training it is tried
again on shares and their halves, as for any loss that a model computes
(``parallel.independence.reduction_trial``). A loss that is 0 at first may be either: it is tried as
soon as it is not 0. Other losses (a deviation over the batch, a product of means) are refused.
"""

from lockstep.data.map_style.sources import ArraySource
from lockstep.data.trees import tensors_of
from lockstep.errors import ModelError
from lockstep.frontends.keras.layers.dry_run import DryRunResult, dry_run, fixed_batch_size
from lockstep.frontends.keras.layers.layer_state import check_layer_state, check_state
from lockstep.frontends.keras.loss.share_losses import Additions
from lockstep.frontends.keras.model import KerasModel

_TOLERANCE = 1e-3


def find_additions(module: KerasModel, source: ArraySource, *, is_divided: bool) -> Additions:
    """Find the losses that layers add, and check that layers have the same state on all devices.

    Args:
        module: the model; it and the random streams are restored.
        source: samples for the dry run.
        is_divided: True if devices work on parts of a batch.

    Raises:
        ModelError: an added loss is neither a mean nor a sum, or batches cannot be divided.
    """
    if is_divided:
        _check_batch_size(module)
    trained, evaluated = (
        dry_run(module, source, is_divided=is_divided, training=training)
        for training in (True, False)
    )
    if is_divided:
        check_layer_state(module, trained)
    kinds = {False: _which_are_sums(module, evaluated)}
    # Losses are the same kind in training, where values may be random or normalised by batch.
    same = len(trained[0].added) == len(kinds[False])
    kinds[True] = kinds[False] if same else _which_are_sums(module, trained)
    outputs = trained[0].outputs
    return Additions(
        are_sums=kinds,
        zeros=_zeros(trained) | _zeros(evaluated) if is_divided else frozenset(),
        has_penalties=bool(outputs["penalties"]),
        has_masks=any(True for _ in tensors_of(outputs["masks"])),
        has_rows=all(output.dim() > 1 for output in tensors_of(outputs["outputs"])),
    )


def check_prediction(module: KerasModel, source: ArraySource) -> None:
    """Check that a model can predict on parts of a batch.

    Raises:
        ModelError: it takes one batch size only, or the state of its layers depends on samples.
    """
    _check_batch_size(module)
    check_state(module, dry_run(module, source, is_divided=True, training=False))


def _check_batch_size(module: KerasModel) -> None:
    fixed = fixed_batch_size(module.model)
    if fixed is not None:
        raise ModelError(
            "Devices work on parts of a batch, so a model must take batches of any size.",
            received=f"{module.model.name!r}, with stateful layers for {fixed} samples",
            fix="Make them without stateful=True, or use SingleDeviceStrategy.",
        )


def _zeros(seen: list[DryRunResult]) -> frozenset[int]:
    """The numbers of losses that are 0 for all of the samples."""
    columns = zip(*(one.added for one in seen), strict=True)
    return frozenset(number for number, values in enumerate(columns) if not any(values))


def _which_are_sums(module: KerasModel, seen: list[DryRunResult]) -> tuple[bool, ...]:
    """Whether each loss that layers add is a sum; False if batches are not divided."""
    if len(seen) == 1:
        return (False,) * len(seen[0].added)
    columns = zip(*(one.added for one in seen), strict=True)
    return tuple(_is_sum(module, number, *values) for number, values in enumerate(columns))


def _is_sum(module: KerasModel, number: int, whole: float, first: float, second: float) -> bool:
    """Whether a loss, given for all samples and for either half, is a sum."""
    size = max(map(abs, (first, second, whole)))
    for parts in (2, 1):
        if abs(whole - (first + second) / parts) <= _TOLERANCE * size:
            return parts == 1
    raise ModelError(
        "A loss that a layer adds must be a mean or a sum over its samples.",
        received=f"in the model {module.model.name!r}, loss {number} that layers add is "
        f"{first:g} for first samples, {second:g} for second, and {whole:g} for "
        "all of them",
        fix="Add ops.mean(...) or ops.sum(...) of values that each come from one sample; or "
        "give the model a compute_loss of its own, which gets the whole batch; or use "
        "SingleDeviceStrategy.",
    )
