"""The strategy of the enclosing ``with strategy.scope():``."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from lockstep.data.batch_dims import SAMPLES_FIRST, BatchDims

_current: ContextVar[Any] = ContextVar("lockstep_strategy", default=None)
_dims: ContextVar[BatchDims] = ContextVar("lockstep_batch_dims", default=SAMPLES_FIRST)


def current_strategy() -> Any:
    """The innermost scope's strategy, or None."""
    return _current.get()


def current_dims() -> BatchDims:
    """The dims of the samples, by the innermost scope."""
    return _dims.get()


@contextmanager
def strategy_scope(strategy: Any, dims: BatchDims = SAMPLES_FIRST) -> Iterator[Any]:
    """Make a strategy the default within the block."""
    tokens = _current.set(strategy), _dims.set(dims)
    try:
        yield strategy
    finally:
        _current.reset(tokens[0])
        _dims.reset(tokens[1])
