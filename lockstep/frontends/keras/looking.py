"""Looking at a model before it is used on several devices: what it makes of a few samples.

It is run on some samples, on others, and on both together, and left as it was found. What is the
same for both lots together as for each alone can be divided among devices.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import torch

from lockstep.capture.state import ModelState
from lockstep.data.sources import ArraySource, Batch
from lockstep.data.trees import Tree
from lockstep.frontends.keras.attributes import plain_attributes_kept
from lockstep.frontends.keras.model import KerasModel

FEW = 4  # samples of each kind


@dataclass(frozen=True)
class Seen:
    """What the model made of some samples, of others, and of both; or of some only.

    Attributes:
        batches: the samples.
        evaluated: in evaluation.
        trained: in training, if it was run so.
    """

    batches: list[Batch]
    evaluated: list[Tree]
    trained: list[Tree]


def look(
    module: KerasModel,
    source: ArraySource,
    state: ModelState,
    num_each: int | None,
    *,
    trains: bool = True,
) -> Seen:
    """Run the model on so many samples, as many others, and both; or without a number on some.

    Args:
        module: the model.
        source: the samples.
        state: the model's, which is restored.
        num_each: samples of each kind.
        trains: in training, too.
    """
    batches = lots(module, source, num_each)

    def outputs(training: bool) -> list[Tree]:
        module.train(training)
        with torch.no_grad():
            found = [module(*batch.inputs) for batch in batches]
        state.restore()
        return found

    return Seen(batches, outputs(False), outputs(True) if trains else [])


def lots(module: KerasModel, source: ArraySource, num_each: int | None) -> list[Batch]:
    """Some samples, as many others, and both, from all over; or without a number some only."""
    if num_each is None:  # of which the model may have a fixed number
        size, parts = fixed_batch_size(module.model) or 2 * FEW, [slice(None)]
    else:
        size, parts = 2 * num_each, [slice(num_each), slice(num_each, None), slice(None)]
    indices = torch.linspace(0, len(source) - 1, size).long()
    dtype = next((one.dtype for one in module.parameters()), torch.get_default_dtype())
    return [source.read(indices[part], dtype) for part in parts]


def added_losses(outputs: list[Tree]) -> list[tuple[float, ...]]:
    """Of each loss that layers add, what it is for each lot of samples."""
    return list(zip(*([float(rows[0]) for rows in one["losses"]] for one in outputs), strict=True))


@contextmanager
def left_as_found(module: KerasModel) -> Iterator[ModelState]:
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


def fixed_batch_size(model: Any) -> int | None:
    """The only number of samples that a model takes at a time; None where it takes any.

    That an Input names one binds stateful layers only.
    """
    if not any(getattr(layer, "stateful", False) for layer in model._flatten_layers()):
        return None
    inputs = keras.tree.flatten(getattr(model, "inputs", None))
    sizes = {one.shape[0] for one in inputs if one is not None}
    fixed: int | None = next(iter(sizes - {None}), None)
    return fixed
