"""What constructors write down elsewhere than in the model, for copies that had no constructor."""

import sys

from torch import nn

_TRANSFORMERS = "transformers.utils.output_capturing"


def register_copies(model: nn.Module) -> None:
    """Have a library know the modules of a model that was unpickled.

    transformers notes for each class what its models can record (hidden states, attentions, the
    logits of routers), and gives None for a class that it does not know.
    """
    registry = getattr(sys.modules.get(_TRANSFORMERS), "_CAN_RECORD_REGISTRY", None)
    if registry is None:
        return
    for module in model.modules():
        if hasattr(module, "_can_record_outputs"):
            registry[module] = module._can_record_outputs
