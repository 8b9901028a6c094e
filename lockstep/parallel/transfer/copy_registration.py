"""Repeats registrations that constructors make outside of the model, for unpickled copies."""

import sys

from torch import nn

_TRANSFORMERS = "transformers.utils.output_capturing"


def register_copies(model: nn.Module) -> None:
    """Register the modules of an unpickled model with their library.

    transformers registers for each class what its models can record (hidden states, attentions, the
    logits of routers), and gives None for an unknown class.
    """
    registry = getattr(sys.modules.get(_TRANSFORMERS), "_CAN_RECORD_REGISTRY", None)
    if registry is None:
        return
    for module in model.modules():
        if hasattr(module, "_can_record_outputs"):
            registry[module] = module._can_record_outputs
