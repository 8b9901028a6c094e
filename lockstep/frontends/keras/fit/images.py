"""Images as Keras has them, channels last, without copies around every layer.

torch's layers take channels first, in shape; in memory the channels may be last all the same, which
is where Keras has them. Keras 3.15 copies the input of every convolution and every pooling into the
other order, and that of convolutions back again, which takes longer than many a layer itself. So
here the axes are turned, and nothing is copied. Outputs and gradients are the same: to the bit, but
for few layers whose sums torch takes in another order then.

What comes out has another order in memory than in plain Keras, which only code that is not Keras's
can tell; see ``only_keras_sees``.
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
    """Within the block, in this thread, Keras's layers turn axes instead of copying images."""
    with _turns.to(_turned):
        yield


def only_keras_sees(layers: Iterable[Any]) -> bool:
    """Whether no code but Keras's sees what layers make of their inputs."""
    return all(
        type(layer).__module__.startswith("keras.src.")
        and type(layer).__name__ not in _OF_USERS
        and getattr(getattr(layer, "activation", None), "__module__", "keras.src.").startswith(
            "keras.src."
        )
        for layer in layers
    )


def _turned(inputs: torch.Tensor) -> torch.Tensor:
    """Channels first in shape. Of sequences torch has no such order in memory: these are copied.

    So is what is in no order, of which torch's layers cannot always take the gradient.
    """
    if inputs.ndim in (4, 5) and inputs.is_contiguous():
        return inputs.movedim(-1, 1)
    copied: torch.Tensor = _turns.plain(inputs)
    return copied
