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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import torch

from lockstep.capture.state import ModelState
from lockstep.data.sources import ArraySource, Batch
from lockstep.data.trees import Tree, map_tensors, tensors_of
from lockstep.errors import ModelError, problem
from lockstep.frontends.keras.attributes import plain_attributes_kept
from lockstep.frontends.keras.layer_state import check_layer_state
from lockstep.frontends.keras.losses import Additions, KerasLoss
from lockstep.frontends.keras.model import KerasModel, giving_losses

_TOLERANCE = 1e-3
# Losses are given the same outputs alone and together; where terms cancel, a few differ by more.
_TOLERANCE_OF_LOSSES, _MOST_ALIKE = 1e-4, 0.75
_FEW, _MANY = 2, 32  # samples of each kind


def find_additions(
    module: KerasModel, compiled: Any, source: ArraySource, *, is_divided: bool
) -> Additions:
    """What a model's layers add, and whether all its losses divide by the number of samples.

    Args:
        module: the model; it and the random streams are left as they were found.
        compiled: its ``CompileLoss``, built, or None.
        source: samples to look at.
        is_divided: batches are, so that it matters what is a mean and what a sum.

    Raises:
        ModelError: what a layer adds, or a loss returns, is neither a mean nor a sum.
    """
    fixed = _fixed_batch_size(module.model)
    if is_divided and fixed is not None:
        raise ModelError(
            problem(
                "Devices work on parts of a batch, so a model must take batches of any size.",
                received=f"{module.model.name!r}, with stateful layers for {fixed} samples",
                fix="Make them without stateful=True, or use SingleDeviceStrategy.",
            )
        )
    with giving_losses(module, True), _left_as_found(module) as state:
        return _find(module, compiled, source, state, is_divided=is_divided)


@contextmanager
def _left_as_found(module: KerasModel) -> Iterator[ModelState]:
    """After the block a model is in the state, which it gives, and the mode that it was in."""
    mode, state = module.training, ModelState(module)
    remembered = _remembered(module.model)
    try:
        with plain_attributes_kept(module.model):
            yield state
    finally:
        module.train(mode)
        module.model.train(mode)
        state.restore()
        for variable, value in remembered:
            variable.assign(value)


def _remembered(model: Any) -> list[tuple[Any, torch.Tensor]]:
    """What stateful layers remember of the batch before; Keras does not count it to their state."""
    states = keras.tree.flatten(
        [getattr(layer, "states", None) for layer in model._flatten_layers()]
    )
    return [(one, one.value.clone()) for one in states if isinstance(one, keras.Variable)]


def _fixed_batch_size(model: Any) -> int | None:
    """The only number of samples that a model takes at a time; None where it takes any.

    That an Input names one binds stateful layers only.
    """
    if not any(getattr(layer, "stateful", False) for layer in model._flatten_layers()):
        return None
    inputs = keras.tree.flatten(getattr(model, "inputs", None))
    sizes = {one.shape[0] for one in inputs if one is not None}
    fixed: int | None = next(iter(sizes - {None}), None)
    return fixed


@dataclass(frozen=True)
class _Seen:
    """What the model made of some samples, of others, and of both; or of some only.

    Attributes:
        evaluated: in evaluation.
        trained: in training.
        targets: of the last.
    """

    evaluated: list[Tree]
    trained: list[Tree]
    targets: Tree

    @property
    def has_zeros(self) -> bool:
        """Whether there is a loss of which nothing is seen."""
        return any(
            not any(values)
            for outputs in (self.evaluated, self.trained)
            for values in _losses(outputs)
        )


def _find(
    module: KerasModel,
    compiled: Any,
    source: ArraySource,
    state: ModelState,
    *,
    is_divided: bool,
) -> Additions:
    if is_divided:
        check_layer_state(module, state, _lots(module, source, _FEW))
    seen = _look(module, source, state, _FEW if is_divided else None)
    if seen.has_zeros and is_divided:
        seen = _look(module, source, state, _MANY)
    kinds = {False: _kinds(module, seen.evaluated, is_divided=is_divided)}
    # What layers add is the same in training, but for what is random or normalised by batches.
    same = len(seen.trained[-1]["losses"]) == len(kinds[False])
    kinds[True] = kinds[False] if same else _kinds(module, seen.trained, is_divided=is_divided)
    loss = KerasLoss(compiled, Additions(are_sums=kinds))
    reduced = loss.reduced(seen.trained[-1], seen.targets)
    own = [number for number, one in enumerate(reduced) if one.is_own] if is_divided else []
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
    seen = _look(module, source, state, _MANY)
    everything = (seen.evaluated[-1]["outputs"], seen.evaluated[-1]["masks"], seen.targets)

    def values(start: int, stop: int) -> list[float]:
        outputs, masks, targets = map_tensors(lambda tensor: tensor[start:stop], everything)
        found = loss.reduced({"outputs": outputs, "masks": masks}, targets)
        return [float(one.total) / (one.weight or 1.0) for one in found]

    lots = [
        [
            values(start, start + _FEW),
            values(start + _FEW, start + 2 * _FEW),
            values(start, start + 2 * _FEW),
        ]
        for start in range(0, 2 * _MANY, 2 * _FEW)
    ]
    return frozenset(
        number
        for number in numbers
        if _is_sum(
            module,
            f"loss {number} of compile returns",
            [(some[number], others[number], both[number]) for some, others, both in lots],
            tolerance=_TOLERANCE_OF_LOSSES,
        )
    )


def _look(
    module: KerasModel, source: ArraySource, state: ModelState, num_each: int | None
) -> _Seen:
    batches = _lots(module, source, num_each)

    def outputs(training: bool) -> list[Tree]:
        module.train(training)
        with torch.no_grad():
            found = [module(*batch.inputs) for batch in batches]
        state.restore()
        return found

    return _Seen(outputs(False), outputs(True), batches[-1].targets)


def _lots(module: KerasModel, source: ArraySource, num_each: int | None) -> list[Batch]:
    """Some samples, as many others, and both; or without a number some only."""
    if num_each is None:  # of which the model may have a fixed number
        size, parts = _fixed_batch_size(module.model) or 2 * _FEW, [slice(None)]
    else:
        size, parts = 2 * num_each, [slice(num_each), slice(num_each, None), slice(None)]
    indices = torch.arange(size) % len(source)
    dtype = next((one.dtype for one in module.parameters()), torch.get_default_dtype())
    return [source.read(indices[part], dtype) for part in parts]


def _losses(outputs: list[Tree]) -> list[tuple[float, ...]]:
    """Of each loss that layers add, what it is for each lot of samples."""
    return list(zip(*([float(loss) for loss in one["losses"]] for one in outputs), strict=True))


def _kinds(module: KerasModel, outputs: list[Tree], *, is_divided: bool) -> tuple[bool, ...]:
    found = _losses(outputs)
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
            stacklevel=2,
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
