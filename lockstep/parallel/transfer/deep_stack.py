"""Calls that need a deeper stack than a thread has.

pickle recurses from each object to those it refers to. Layers with references to their neighbours,
as in Keras, form a chain as long as the model is deep.
"""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from typing import TypeVar

_T = TypeVar("_T")

_LEVELS = 100_000
_STACK_BYTES = 1 << 29  # of addresses; memory is allocated as the stack grows
_lock = threading.Lock()  # stack size and limit belong to the process


def with_deep_stack(call: Callable[[], _T]) -> _T:
    """Run a call in a thread with a stack of 100,000 levels; returns its result.

    Raises:
        BaseException: what the call raises.
    """
    outcome: Future[_T] = Future()
    context = copy_context()

    def run() -> None:
        try:
            outcome.set_result(context.run(call))
        except BaseException as error:  # raised in the caller
            outcome.set_exception(error)

    with _lock:
        limit, size = sys.getrecursionlimit(), threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="lockstep deep stack")
            sys.setrecursionlimit(max(limit, _LEVELS))
            thread.start()
            thread.join()
        finally:
            sys.setrecursionlimit(limit)
            threading.stack_size(size)
    return outcome.result()
