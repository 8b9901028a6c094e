"""Makes a Trainer's model, in its precision, and checks the dims of its samples."""

import copy
from collections.abc import Callable

from torch import nn

from lockstep.data.batch_dims import BatchDims
from lockstep.data.map_style.sources import Source, as_input_source
from lockstep.data.trees import map_tensors, tensors_of
from lockstep.errors import DataError, OptionError
from lockstep.parallel.storage.meta_init import allocate, build_on_meta, check_on_meta
from lockstep.train.input.stream_broadcast import SharedStream
from lockstep.train.scope import current_dims
from lockstep.train.validation.checks import prepare_model


def made_models(
    model: nn.Module | Callable[[], nn.Module], precision: str
) -> tuple[nn.Module, nn.Module]:
    """The model, and one of the same shape to inspect: itself, or one without memory."""
    if isinstance(model, nn.Module) and not any(one.is_meta for one in model.parameters()):
        prepare_model(model, precision)
        return model, model
    if isinstance(model, nn.Module):
        check_on_meta(model)
        made, meta_model = model, copy.deepcopy(model)
    else:
        made, meta_model = build_on_meta(model), build_on_meta(model)
    for one in (made, meta_model):
        prepare_model(one, precision)
    allocate(made)
    return made, meta_model.to("meta")


def made_up_sample(source: Source | SharedStream) -> Source:
    """One sample of zeros, with the shapes of the samples of an empty source.

    Raises:
        DataError: the source does not have these shapes.
    """
    inputs = getattr(source, "inputs", None)
    if next(tensors_of(inputs), None) is None:
        raise DataError(
            "An empty dataset does not tell the shape of its samples.",
            received="a dataset of length 0",
            fix="Pass an array of shape (0, ...) instead.",
        )
    zeros = map_tensors(lambda tensor: tensor.new_zeros(1, *tensor.shape[1:]), inputs)
    return as_input_source(zeros, name="inputs")


def check_scope(dims: BatchDims) -> None:
    """Refuse a scope's ``batch_dim``: it is for Keras models, and a Trainer ignores it.

    Raises:
        OptionError: the scope's is not the Trainer's.
    """
    if current_dims() and current_dims() != dims:
        raise OptionError(
            "A scope's `batch_dim` is for Keras models.",
            received="a Trainer with another one",
            fix="Pass batch_dim to the Trainer, too.",
        )
