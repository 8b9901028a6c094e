"""Optional packages: imported when a callback that needs one is made, or a clear error."""

from importlib import import_module
from typing import Any

from lockstep.errors import ExtraError, problem


def import_extra(module: str, *, extra: str, user: str) -> Any:
    """A module of a package that an extra installs.

    Args:
        module: its full name.
        extra: the extra's name.
        user: the callback that needs it, for the message.

    Raises:
        ExtraError: it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ExtraError(
            problem(
                f"{user} needs a package that is not installed.",
                received=error,
                fix=f"pip install 'lockstep-train[{extra}]'",
            )
        ) from error
