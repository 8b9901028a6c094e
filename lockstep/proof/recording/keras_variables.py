"""The layers and variables of Keras models on torch, which torch does not list as modules."""

from collections.abc import Iterator, Sequence
from typing import Any


def layers_of(model: Any) -> Sequence[Any]:
    """All layers of a model of Keras; none of another model."""
    flatten = getattr(model, "_flatten_layers", None)
    return () if flatten is None else tuple(flatten())


def fixed_variables(model: Any) -> Iterator[Any]:
    """What no optimizer trains, as a batch normalisation's moments; torch has it as parameters."""
    for layer in layers_of(model):
        yield from layer._non_trainable_variables
