"""Channels-last images without copies around every layer.

torch's layers take shapes with channels first; in memory the channels may still be last, as in
Keras. Keras 3.15 copies the input of every convolution and pooling into the other order, and the
output of convolutions back, which often takes longer than the layer. Here the axes are permuted,
and nothing is copied. Outputs and gradients have the same bits, except in a few layers whose sums
torch then takes in another order.

Outputs have another memory format than in plain Keras, which only code outside of Keras can notice;
see ``only_keras_sees``.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from keras.src.backend.torch import nn as keras_nn

from lockstep.parallel.data_parallel.functional_patch import Redirection

# Keras's layers around the user's code.
_OF_USERS = ("Lambda", "TorchModuleWrapper")

_turns = Redirection("_transpose_spatial_inputs", keras_nn)


@contextmanager
def channels_last_in_memory() -> Iterator[None]:
    """Within the block, in this thread, Keras's layers permute axes instead of copying images."""
    with _turns.to(_turned):
        yield


def only_keras_sees(layers: Iterable[Any]) -> bool:
    """Whether only Keras's code sees the outputs of layers."""
    return all(
        type(layer).__module__.startswith("keras.src.")
        and type(layer).__name__ not in _OF_USERS
        and getattr(getattr(layer, "activation", None), "__module__", "keras.src.").startswith(
            "keras.src."
        )
        for layer in layers
    )


def _turned(inputs: torch.Tensor) -> torch.Tensor:
    """Channels first in shape.

    Sequences are copied, because torch has no such memory format for them. So are tensors that are
    not contiguous, whose gradient torch's layers cannot always take.
    """
    if inputs.ndim in (4, 5) and inputs.is_contiguous():
        return inputs.movedim(-1, 1)
    copied: torch.Tensor = _turns.plain(inputs)
    return copied
