"""What layers add to the loss: found to be means or sums over the samples.

``add_loss`` takes a number, and nobody says what it was made of: ``ops.mean`` of something over the
batch, or ``ops.sum``, as activity regularizers are. The loss of the whole batch is the mean of what
the shares add, or their sum. So the model is run on a few samples before it is trained: on some, on
others, and on both together.

Not covered: what is neither (a deviation over the batch, a product of two means). It is refused
where these samples show it.
"""

from typing import Any

import torch

from lockstep.capture.state import ModelState
from lockstep.data.sources import ArraySource
from lockstep.data.trees import Tree
from lockstep.errors import ModelError, problem
from lockstep.frontends.keras.losses import Additions, KerasLoss
from lockstep.frontends.keras.model import KerasModel

_TOLERANCE = 1e-3
_FEW = 2  # samples of each kind


def find_additions(module: KerasModel, compiled: Any, source: ArraySource) -> Additions:
    """What a model's layers add, and whether all its losses divide by the number of samples.

    Args:
        module: the model; it and the random streams are left as they were found.
        compiled: its ``CompileLoss``, built, or None.
        source: samples to look at.

    Raises:
        ModelError: what a layer adds is neither a mean nor a sum.
    """
    mode, module.with_losses = module.training, True
    state = ModelState(module)
    try:
        return _find(module, compiled, source, state)
    finally:
        module.with_losses = False
        module.train(mode)
        module.model.train(mode)
        state.restore()


def _find(module: KerasModel, compiled: Any, source: ArraySource, state: ModelState) -> Additions:
    dtype = next(module.parameters()).dtype
    indices = torch.arange(2 * _FEW) % len(source)
    batches = [
        source.read(indices[part], dtype) for part in (slice(_FEW), slice(_FEW, None), slice(None))
    ]

    def outputs(training: bool) -> list[Tree]:
        module.train(training)
        with torch.no_grad():
            found = [module(*batch.inputs) for batch in batches]
        state.restore()
        return found

    evaluated, trained = outputs(False), outputs(True)
    kinds = {False: _kinds(module, evaluated)}
    # What layers add is the same in training, but for what is random or normalised by batches.
    same = len(trained[2]["losses"]) == len(kinds[False])
    kinds[True] = kinds[False] if same else _kinds(module, trained)
    loss = KerasLoss(compiled, Additions(are_sums=kinds))
    reduced = loss.reduced(trained[2], batches[2].targets)
    return Additions(
        are_sums=kinds,
        has_penalties=bool(trained[2]["penalties"]),
        weighs_alike=all(one.is_by_sample for one in reduced),
    )


def _kinds(module: KerasModel, outputs: list[Tree]) -> tuple[bool, ...]:
    some, others, both = ([float(loss) for loss in one["losses"]] for one in outputs)
    return tuple(
        _is_sum(module, number, *values)
        for number, values in enumerate(zip(some, others, both, strict=True))
    )


def _is_sum(module: KerasModel, number: int, some: float, others: float, both: float) -> bool:
    size = max(abs(some), abs(others), abs(both))
    if abs(both - (some + others) / 2) <= _TOLERANCE * size:
        return False
    if abs(both - (some + others)) <= _TOLERANCE * size:
        return True
    raise ModelError(
        problem(
            "What a layer adds to the loss must be a mean or a sum over the samples.",
            received=f"loss {number} that layers of {module.model.name!r} add: {some:g} for some "
            f"samples, {others:g} for others, and {both:g} for all of them",
            fix="Add ops.mean(...) or ops.sum(...) of values that each come from one sample, or "
            "use SingleDeviceStrategy.",
        )
    )
