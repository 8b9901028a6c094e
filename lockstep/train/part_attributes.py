"""Attributes of a Trainer that one of its parts has."""

from typing import Any


def of_part(part: str) -> Any:
    """The attribute of the same name of a part.

    Args:
        part: the name of the attribute with the part.
    """
    return _OfPart(part)


class _OfPart:
    def __init__(self, part: str) -> None:
        self._part = part

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, trainer: Any, owner: type) -> Any:
        return self if trainer is None else getattr(getattr(trainer, self._part), self._name)

    def __set__(self, trainer: Any, value: Any) -> None:
        setattr(getattr(trainer, self._part), self._name, value)
