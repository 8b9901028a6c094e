"""Numbers by name for loggers: those of logs, which may have lists, and of an optimizer."""

from collections.abc import Iterator
from typing import Any

from lockstep.train.trainer_protocol import TrainerProtocol


def scalars(logs: dict[str, Any] | None) -> dict[str, float]:
    """All numbers in logs: the second of a list is ``name/1``, the key "a" of a dict ``name/a``."""
    return {
        name: number for key, value in (logs or {}).items() for name, number in _flat(key, value)
    }


def _flat(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, int | float):
        yield name, float(value)
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _flat(f"{name}/{key}", part)
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from _flat(f"{name}/{index}", part)


def learning_rates(trainer: TrainerProtocol) -> dict[str, float]:
    """``learning_rate`` of the optimizer, or ``learning_rate/0`` and so on for several groups."""
    groups = [] if trainer.optimizer is None else trainer.optimizer.param_groups
    rates = [float(group["lr"]) for group in groups if "lr" in group]
    return dict(_flat("learning_rate", rates[0] if len(rates) == 1 else rates))
