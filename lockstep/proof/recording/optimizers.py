"""Which watch an optimizer needs."""

from typing import Any

import torch

from lockstep.errors import OptionError
from lockstep.proof.recording.keras_watch import KerasWatch, is_of_keras
from lockstep.proof.recording.names import torch_optimizer, wrapped_by
from lockstep.proof.recording.watches import Observer, TorchWatch, Watch


def watch(observer: Observer, optimizer: Any) -> Watch:
    """Watch an optimizer, several, or None for all of torch that step on the model's parameters.

    Raises:
        OptionError: it is no optimizer.
    """
    if optimizer is None:
        return TorchWatch(observer, None)
    given = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    if given and all(map(is_of_keras, given)):
        return KerasWatch(observer, given)
    if any(map(_is_of_zero, given)):
        raise OptionError(
            "The optimizer must step on the model's own parameters, or on DTensors.",
            received="one of DeepSpeed's, which steps on flat pieces (ZeRO, or its bf16)",
            fix="Record with ZeRO stage 0, in float32 or with torch.autocast.",
        )
    optimizers = [torch_optimizer(each) for each in given]
    wrong = [each for each in optimizers if not isinstance(each, torch.optim.Optimizer)]
    if wrong or not optimizers:
        raise OptionError(
            "The optimizer must be one of torch's or Keras's, or what a library has made of one.",
            received=type(wrong[0]).__name__ if wrong else "none",
            fix="Pass the object whose step is called; or None, for any optimizer of torch that "
            "steps on the model's parameters.",
        )
    return TorchWatch(observer, optimizers)


def _is_of_zero(optimizer: Any) -> bool:
    """Whether it, or one that it wraps, is an optimizer of DeepSpeed that makes flat pieces."""
    while optimizer is not None:
        if any(each.__name__ == "ZeROOptimizer" for each in type(optimizer).__mro__):
            return True
        optimizer = wrapped_by(optimizer)
    return False
