"""The strategy of the enclosing ``with strategy.scope():``."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_current: ContextVar[Any] = ContextVar("lockstep_strategy", default=None)


def current_strategy() -> Any:
    """The innermost scope's strategy, or None."""
    return _current.get()


@contextmanager
def strategy_scope(strategy: Any) -> Iterator[Any]:
    """Make a strategy the default within the block."""
    token = _current.set(strategy)
    try:
        yield strategy
    finally:
        _current.reset(token)
