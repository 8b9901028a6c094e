"""Which watch an optimizer needs."""

from typing import Any

import torch

from lockstep.errors import OptionError
from lockstep.proof.recording.keras_watch import KerasWatch, is_of_keras
from lockstep.proof.recording.names import torch_optimizer
from lockstep.proof.recording.watches import Observer, TorchWatch, Watch
from lockstep.proof.recording.zero_watch import ZeroWatch, has_partitions, zero_of


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
    zeros = [each for each in map(zero_of, given) if each is not None]
    if zeros and len(zeros) == len(given) and all(map(has_partitions, zeros)):
        return ZeroWatch(observer, zeros)
    if zeros:
        raise OptionError(
            "Of DeepSpeed's optimizers, those of ZeRO's stages 0, 1 and 2 can be recorded.",
            received=type(zeros[0]).__name__,
            fix="Record with another stage: the gradients are the same.",
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
