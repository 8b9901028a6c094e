"""What layers add to the loss: means or sums over the samples.

``add_loss`` takes a number, and nobody says what it was made of: ``ops.mean`` of something over the
batch, or ``ops.sum``, as activity regularizers are. The loss of the whole batch is the mean of what
the shares add, or their sum. Which of the two is seen before training (``looking``), and tried
again on shares and their halves while it goes on, as any loss that a model computes
(``parallel.independence.reduction_test``): what is 0 at first, and so both, as soon as it is
something else. What is neither (a deviation over the batch, a product of two means) is refused.
"""

from lockstep.data.map_style.sources import ArraySource
from lockstep.data.trees import tensors_of
from lockstep.errors import ModelError
from lockstep.frontends.keras.layers.dry_run import DryRunResult, dry_run, fixed_batch_size
from lockstep.frontends.keras.layers.layer_state import check_kept, check_layer_state
from lockstep.frontends.keras.loss.share_losses import Additions
from lockstep.frontends.keras.model import KerasModel

_TOLERANCE = 1e-3


def find_additions(module: KerasModel, source: ArraySource, *, is_divided: bool) -> Additions:
    """What a model's layers add, having seen that what they keep is the same on all devices.

    Args:
        module: the model; it and the random streams are left as they were found.
        source: samples to look at.
        is_divided: batches are.

    Raises:
        ModelError: what a layer adds is neither a mean nor a sum, or batches cannot be divided.
    """
    if is_divided:
        _check_batch_size(module)
    trained, evaluated = (
        dry_run(module, source, is_divided=is_divided, training=training)
        for training in (True, False)
    )
    if is_divided:
        check_layer_state(module, trained)
    kinds = {False: _kinds(module, evaluated)}
    # What layers add is the same in training, but for what is random or normalised by batches.
    same = len(trained[0].added) == len(kinds[False])
    kinds[True] = kinds[False] if same else _kinds(module, trained)
    made = trained[0].made
    return Additions(
        are_sums=kinds,
        unseen=_unseen(trained) | _unseen(evaluated) if is_divided else frozenset(),
        has_penalties=bool(made["penalties"]),
        has_masks=any(True for _ in tensors_of(made["masks"])),
        has_rows=all(output.dim() > 1 for output in tensors_of(made["outputs"])),
    )


def check_prediction(module: KerasModel, source: ArraySource) -> None:
    """See that a model can predict on parts of a batch.

    Raises:
        ModelError: it takes batches of one size only, or its layers keep what depends on samples.
    """
    _check_batch_size(module)
    check_kept(module, dry_run(module, source, is_divided=True, training=False))


def _check_batch_size(module: KerasModel) -> None:
    fixed = fixed_batch_size(module.model)
    if fixed is not None:
        raise ModelError(
            "Devices work on parts of a batch, so a model must take batches of any size.",
            received=f"{module.model.name!r}, with stateful layers for {fixed} samples",
            fix="Make them without stateful=True, or use SingleDeviceStrategy.",
        )


def _unseen(seen: list[DryRunResult]) -> frozenset[int]:
    """The numbers of losses that are 0 for all that was looked at."""
    lots = zip(*(one.added for one in seen), strict=True)
    return frozenset(number for number, values in enumerate(lots) if not any(values))


def _kinds(module: KerasModel, seen: list[DryRunResult]) -> tuple[bool, ...]:
    """Which of the losses that layers add are sums; none where batches are not divided."""
    if len(seen) == 1:
        return (False,) * len(seen[0].added)
    lots = zip(*(one.added for one in seen), strict=True)
    return tuple(_is_sum(module, number, *values) for number, values in enumerate(lots))


def _is_sum(module: KerasModel, number: int, both: float, some: float, others: float) -> bool:
    """Whether what is added for all samples, and for either half, is a sum."""
    size = max(map(abs, (some, others, both)))
    for parts in (2, 1):
        if abs(both - (some + others) / parts) <= _TOLERANCE * size:
            return parts == 1
    raise ModelError(
        "A loss that a layer adds must be a mean or a sum over its samples.",
        received=f"in the model {module.model.name!r}, loss {number} that layers add is "
        f"{some:g} for some samples, {others:g} for others, and {both:g} for "
        "all of them",
        fix="Add ops.mean(...) or ops.sum(...) of values that each come from one sample; or "
        "give the model a compute_loss of its own, which gets the whole batch; or use "
        "SingleDeviceStrategy.",
    )
