"""Calls that need a deeper stack than a thread has.

pickle goes from each object to those it refers to. Layers that know their neighbours, as those of
Keras do, are a chain as long as the model is deep.
"""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from typing import TypeVar

_T = TypeVar("_T")

_LEVELS = 100_000
_STACK_BYTES = 1 << 29  # of addresses; memory is taken as the stack grows
_lock = threading.Lock()  # stack size and limit are those of the process


def with_deep_stack(call: Callable[[], _T]) -> _T:
    """What a call returns, in a thread in which it may go 100,000 levels deep.

    Raises:
        BaseException: what the call raises.
    """
    outcome: Future[_T] = Future()
    context = copy_context()

    def run() -> None:
        try:
            outcome.set_result(context.run(call))
        except BaseException as error:  # whatever it is, the caller gets it
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
