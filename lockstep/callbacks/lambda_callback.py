"""A callback made of functions."""

import inspect
from collections.abc import Callable
from typing import Any

from lockstep.errors import OptionError, Problems
from lockstep.formatting import listed
from lockstep.train.callbacks.callback import Callback

_METHODS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class LambdaCallback(Callback):
    """Calls your functions in place of a callback's methods, with the same arguments.

    ``LambdaCallback(on_epoch_end=lambda epoch, logs: print(epoch, logs["loss"]))``. A function gets
    all arguments of its method; ``logs`` is None if there are none.

    Args:
        functions: by the name of the method of ``lockstep.Callback``.

    Raises:
        OptionError: a name is not that of a method, or a value cannot be called.
    """

    def __init__(self, **functions: Any) -> None:
        problems = Problems()
        for name, function in functions.items():
            if name not in _METHODS:
                problems.add(
                    f"A function's name must be one of {listed(_METHODS)}.",
                    received=repr(name),
                    fix="Correct the name.",
                )
            elif not callable(function):
                problems.add(
                    f"`{name}` must be a function.", received=repr(function), fix="Pass a lambda."
                )
        problems.raise_if_any(OptionError)
        for name, function in functions.items():
            vars(self)[name] = _with_defaults(getattr(Callback, name), function)


def _with_defaults(method: Callable[..., None], function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function to get all arguments of a method, including defaults."""
    signature = inspect.signature(method)

    def call(*arguments: Any) -> Any:
        bound = signature.bind(None, *arguments)
        bound.apply_defaults()
        return function(*bound.args[1:])

    return call
