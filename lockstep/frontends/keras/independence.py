"""Samples that see one another: outputs that depend on what else is in the batch.

Each device runs the model on its own part of a batch. So before several do, it is seen whether the
model makes the same of some samples alone as of the same samples among others. Not found: what is
random, and what shows in larger batches only.
"""

from collections.abc import Sequence

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.capture.layers import BatchLayer
from lockstep.capture.state import ModelState
from lockstep.data.order import seed_streams
from lockstep.data.sources import ArraySource, Batch
from lockstep.data.trees import Tree, tensors_of
from lockstep.errors import ModelError
from lockstep.frontends.keras.attributes import plain_attributes_kept
from lockstep.frontends.keras.looking import FEW, Seen, fixed_batch_size, left_as_found, look
from lockstep.frontends.keras.model import KerasModel, giving_losses

# Of the largest output: what rounding comes to, and far less than seeing others makes.
_TOLERANCE, _TOLERANCE_OF_HALF = 1e-3, 0.1
# Of outputs that are whole numbers, as classes are: so many may differ, where two are as good.
_MOST_UNLIKE = 0.1

_NORMALIZING = (_BatchNorm, BatchLayer)

_FIX = (
    "Use BatchNormalization for statistics of the batch; for anything else across samples, "
    "SingleDeviceStrategy."
)


def check_predictions(module: KerasModel, source: ArraySource) -> None:
    """Look at a model that only predicts, see ``check_outputs``.

    Raises:
        ModelError: see there.
    """
    if fixed_batch_size(module.model) is None:
        with giving_losses(module, True), left_as_found(module) as state:
            seen = look(module, source, state, FEW, trains=False)
            check_outputs(module, state, seen, trains=False)


def check_outputs(module: KerasModel, state: ModelState, seen: Seen, *, trains: bool) -> None:
    """Refuse a model that makes something else of samples when others are with them.

    Args:
        module: the model.
        state: its state, which is restored.
        seen: what it made of some, of others, and of both.
        trains: the model is going to be trained.

    Raises:
        ModelError: it makes something else of them.
    """
    dtypes = {str(layer.compute_dtype) for layer in module.model._flatten_layers()}
    tolerance = _TOLERANCE_OF_HALF if dtypes & {"bfloat16", "float16"} else _TOLERANCE
    looked_at = [(False, seen.evaluated)]
    # Statistics are of the whole batch on several devices, too.
    if trains and not any(isinstance(one, _NORMALIZING) for one in module.modules()):
        looked_at.append((True, seen.trained))
    for training, outputs in looked_at:
        is_unlike = _distance(seen, outputs) > tolerance
        if is_unlike and _depends(module, state, seen, tolerance, training=training):
            raise ModelError(
                "Devices work on parts of a batch, so what a model makes of a sample must not "
                "depend on the others.",
                received=f"{module.model.name!r}, whose outputs for the first samples in "
                f"{'training' if training else 'evaluation'} are others when more come along",
                fix=_FIX,
            )


def _distance(seen: Seen, outputs: Sequence[Tree]) -> float:
    """How far outputs for both lots are from those for each, as a part of the largest."""
    sizes = [len(next(tensors_of(batch.inputs))) for batch in seen.batches]
    tensors = [list(tensors_of(one["outputs"])) for one in outputs]
    return max((_distance_of(triple, sizes) for triple in zip(*tensors, strict=False)), default=0.0)


def _distance_of(triple: Sequence[torch.Tensor], sizes: Sequence[int]) -> float:
    """Of an output for some samples, for others, and for both."""
    some, others, both = triple
    shapes = [one.shape[1:] for one in triple]
    if any(list(lengths) == list(sizes) for lengths in zip(*shapes, strict=False)):
        return torch.inf  # a value for each other sample
    if len(set(shapes)) > 1 or both.dim() == 0 or len(some) + len(others) != len(both):
        return 0.0  # not by samples
    apart = torch.cat([some, others])
    if not both.is_floating_point():
        return torch.inf if (apart != both).double().mean() > _MOST_UNLIKE else 0.0
    if not both.any() or not (both.isfinite().all() and apart.isfinite().all()):
        return 0.0  # nothing to compare by
    return float((apart - both).double().abs().max() / both.double().abs().max())


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
