"""Checks of what callbacks are made with: each notes its problem, the callback raises them all."""

import os
from collections.abc import Mapping
from typing import Any

from lockstep.errors import Problems


def check_count(name: str, value: object, problems: Problems, *, least: int = 0) -> None:
    """Note what is no integer of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        problems.add(
            f"`{name}` must be an integer of at least {least}.",
            received=repr(value),
            fix=f"Use {max(least, 1)}.",
        )


def check_number(
    name: str, value: object, problems: Problems, *, above: float | None = None
) -> None:
    """Note what is no finite number, or not above a limit."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not -float("inf") < float(value) < float("inf"):  # type: ignore[arg-type]
        problems.add(f"`{name}` must be a finite number.", received=repr(value), fix="Pass one.")
    elif above is not None and float(value) <= above:  # type: ignore[arg-type]
        problems.add(
            f"`{name}` must be greater than {above:g}.", received=repr(value), fix="Raise it."
        )


def check_flag(name: str, value: object, problems: Problems) -> None:
    """Note what is neither True nor False."""
    if not isinstance(value, bool):
        problems.add(f"`{name}` must be True or False.", received=repr(value), fix="Pass either.")


def check_path(name: str, value: object, problems: Problems) -> None:
    """Note what is no path."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        problems.add(
            f"`{name}` must be a path.", received=repr(value), fix="Pass a string or a Path."
        )


def check_name(name: str, value: Any, problems: Problems, *, optional: bool = False) -> None:
    """Note what is no string with something in it; None is one where it is optional."""
    if not (optional and value is None) and not (isinstance(value, str) and value):
        problems.add(f"`{name}` must be a string.", received=repr(value), fix="Pass a name.")


def check_mapping(name: str, value: object, problems: Problems) -> None:
    """Note what is neither a dict nor None."""
    if not isinstance(value, Mapping | None):
        problems.add(f"`{name}` must be a dict.", received=repr(value), fix="Pass {'width': 256}.")


def check_frequency(name: str, value: object, problems: Problems) -> None:
    """Note what is neither "epoch" nor a number of steps."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if value != "epoch" and not is_count:
        problems.add(
            f"`{name}` must be 'epoch' or a number of steps of at least 1.",
            received=repr(value),
            fix="Use 'epoch'.",
        )
