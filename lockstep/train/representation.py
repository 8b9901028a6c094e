"""Describes a Trainer's parts for its ``repr``, each in one line."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn, optim

from lockstep.parallel.loss.share_losses import LossAdapter
from lockstep.train.trainer_protocol import TrainerProtocol

_LONGEST = 100


def describe(thing: Any) -> str:
    """A loss, an optimizer, a strategy, or several by name."""
    if isinstance(thing, Mapping):
        return f"{{{', '.join(f'{key!r}: {describe(one)}' for key, one in thing.items())}}}"
    if isinstance(thing, list | tuple):
        return f"[{', '.join(map(describe, thing))}]"
    if isinstance(thing, optim.Optimizer):
        rates = dict.fromkeys(float(one["lr"]) for one in thing.param_groups if "lr" in one)
        return f"{type(thing).__name__}({', '.join(f'lr={rate:.6g}' for rate in rates)})"
    if isinstance(thing, partial):
        return describe(thing.func)
    if isinstance(thing, nn.Module) and any(True for _ in thing.parameters()):
        return type(thing).__name__
    name = getattr(thing, "__qualname__", None)
    text = repr(thing) if name is None else str(name)
    is_short = len(text) <= _LONGEST and "\n" not in text and not text.startswith("<")
    return text if is_short or name is not None else type(thing).__name__


def describe_trainer(trainer: TrainerProtocol, loss: LossAdapter | None) -> str:
    """A Trainer with its parts."""
    parts: dict[str, Any] = {
        "loss": None if loss is None else loss.loss,
        "optimizer": trainer.optimizer,
        "metrics": list(trainer.metrics.by_name) or None,
        "strategy": trainer.strategy,
        "precision": trainer.precision,
    }
    shown = [f"{name}={describe(part)}" for name, part in parts.items() if part is not None]
    return f"Trainer({', '.join([type(trainer.model).__name__, *shown])})"
