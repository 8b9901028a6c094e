"""Imports optional packages, with a clear error if one is not installed."""

from importlib import import_module
from typing import Any

from lockstep.errors import ExtraError


def import_extra(module: str, *, extra: str, user: str, otherwise: str = "") -> Any:
    """A module of a package that an extra installs.

    Args:
        module: its full name.
        extra: the extra's name.
        user: what needs it, for the message.
        otherwise: an alternative, for the message.

    Raises:
        ExtraError: it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ExtraError(
            f"{user} needs a package that is not installed.",
            received=error,
            fix=f'Run `pip install ".[{extra}]"` in a clone of Lockstep{otherwise}.',
        ) from error
