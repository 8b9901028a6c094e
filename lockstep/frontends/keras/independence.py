"""Samples that see one another: outputs and losses that depend on what else is in the batch.

Each device runs the model on its own part of a batch. So before several do, it is seen whether the
model makes the same of samples that come alone as of these among others, and a loss, too. What is
random is not seen, nor what only a whole batch of training shows.
"""

from collections.abc import Sequence

import torch
from keras.src.layers.normalization.batch_normalization import BatchNormalization

from lockstep.capture.state import ModelState
from lockstep.data.order import seed_streams
from lockstep.data.sources import ArraySource, Batch
from lockstep.data.trees import Tree, map_tensors, tensors_of
from lockstep.errors import ModelError, problem
from lockstep.frontends.keras.attributes import plain_attributes_kept
from lockstep.frontends.keras.looking import FEW, Seen, fixed_batch_size, left_as_found, look
from lockstep.frontends.keras.losses import KerasLoss
from lockstep.frontends.keras.model import KerasModel, giving_losses

# Of the largest output: what rounding comes to, and far less than seeing others makes.
_TOLERANCE, _TOLERANCE_OF_HALF = 1e-3, 0.1
# Losses are given the very same outputs.
_TOLERANCE_OF_LOSSES = 1e-3

_FIX = (
    "Use BatchNormalization for statistics of the batch; for anything else across samples, "
    "SingleDeviceStrategy."
)


def check_predictions(module: KerasModel, source: ArraySource) -> None:
    """``check_outputs`` of a model that predicts and was not looked at before.

    Raises:
        ModelError: see there.
    """
    if fixed_batch_size(module.model) is None:
        with giving_losses(module, True), left_as_found(module) as state:
            check_outputs(module, state, look(module, source, state, FEW, trains=False))


def check_outputs(module: KerasModel, state: ModelState, seen: Seen) -> None:
    """Refuse a model that makes something else of samples when others are with them.

    Args:
        module: the model.
        state: its state, which is restored.
        seen: what it made of some, of others, and of both.

    Raises:
        ModelError: it does.
    """
    layers = module.model._flatten_layers()
    is_half = any(str(layer.compute_dtype) in ("bfloat16", "float16") for layer in layers)
    tolerance = _TOLERANCE_OF_HALF if is_half else _TOLERANCE
    looked_at = [(False, seen.evaluated)]
    if seen.trained and not any(isinstance(layer, BatchNormalization) for layer in layers):
        looked_at.append((True, seen.trained))
    for training, outputs in looked_at:
        is_unlike = _distance(seen, outputs) > tolerance
        if is_unlike and _depends(module, state, seen, tolerance, training=training):
            raise ModelError(
                problem(
                    "Devices work on parts of a batch, so what a model makes of a sample must not "
                    "depend on the others.",
                    received=f"{module.model.name!r}, whose outputs for the first samples in "
                    f"{'training' if training else 'evaluation'} are others when more come along",
                    fix=_FIX,
                )
            )


def check_losses(module: KerasModel, loss: KerasLoss, seen: Seen) -> None:
    """Refuse losses that make something else of samples when others are with them.

    Those that return one number for a batch are looked at elsewhere.

    Raises:
        ModelError: one does.
    """
    made = seen.evaluated[-1]
    everything = (made["outputs"], made["masks"], seen.targets)
    sizes = {len(tensor) if tensor.dim() else 0 for tensor in tensors_of(everything)}
    if len(sizes) != 1:
        return
    half = sizes.pop() // 2

    def totals(rows: slice) -> list[float]:
        outputs, masks, targets = map_tensors(lambda tensor: tensor[rows], everything)
        with torch.no_grad():
            found = loss.reduced({"outputs": outputs, "masks": masks}, targets)
        return [0.0 if one.is_own else float(one.total) for one in found]

    both = totals(slice(None))
    parts = zip(totals(slice(half)), totals(slice(half, None)), strict=True)
    for number, ((some, others), whole) in enumerate(zip(parts, both, strict=True)):
        size = max(abs(some), abs(others), abs(whole))
        is_alike = not abs(whole - some - others) > _TOLERANCE_OF_LOSSES * size
        if not is_alike and totals(slice(None)) == both:  # it is not random
            raise ModelError(
                problem(
                    "Devices work on parts of a batch, so what a loss makes of a sample must not "
                    "depend on the others.",
                    received=f"loss {number} of compile of the model {module.model.name!r}: "
                    f"{some:g} for some samples, {others:g} for others, and {whole:g} in all",
                    fix="Use SingleDeviceStrategy.",
                )
            )


def _distance(seen: Seen, outputs: Sequence[Tree]) -> float:
    """How far outputs for both lots are from those for each, as a part of the largest."""
    sizes = [len(next(tensors_of(batch.inputs))) for batch in seen.batches]
    tensors = (tensors_of(one["outputs"]) for one in outputs)
    return max((_distance_of(lot, sizes) for lot in zip(*tensors, strict=True)), default=0.0)


def _distance_of(lot: Sequence[torch.Tensor], sizes: Sequence[int]) -> float:
    some, others, both = lot
    shapes = [one.shape[1:] for one in lot]
    if any(list(lengths) == list(sizes) for lengths in zip(*shapes, strict=False)):
        return torch.inf  # a value for each other sample
    if len(set(shapes)) > 1 or both.dim() == 0 or len(some) + len(others) != len(both):
        return 0.0  # it is not by samples, which others look at
    apart, whole = torch.cat([some, others]).double(), both.double()
    if not whole.numel() or not whole.any() or not whole.isfinite().all():
        return 0.0  # nothing to compare by
    return float((apart - whole).abs().max() / whole.abs().max())


def _depends(
    module: KerasModel, state: ModelState, seen: Seen, tolerance: float, *, training: bool
) -> bool:
    """Whether outputs are others among others, and not for chance or for a count of calls."""

    def outputs(batch: Batch, seed: int) -> Tree:
        seed_streams(seed)
        with plain_attributes_kept(module.model), torch.no_grad():
            found: Tree = module(*batch.inputs)
        state.restore()
        return found

    module.train(training)
    first = [outputs(batch, 0) for batch in seen.batches]
    again = outputs(seen.batches[-1], 1)
    pairs = zip(tensors_of(first[-1]["outputs"]), tensors_of(again["outputs"]), strict=True)
    return _distance(seen, first) > tolerance and all(torch.equal(*pair) for pair in pairs)
