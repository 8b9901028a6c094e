"""A thread that does one thing after the other, and of which nothing is left once it is closed.

It is a daemon: where the thing under way never ends (a read from a network that is gone), the
script can still end.
"""

import contextvars
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, TypeVar

from lockstep.launch.diagnostics import stack_of

_LOOK_AROUND_SECONDS = 0.02
_PATIENCE_SECONDS = 2.0

_T = TypeVar("_T")
_Job = tuple[Future[Any], Callable[[], Any]]


class Background:
    """Runs functions in a thread of its own, which starts with the first of them.

    Args:
        name: the thread's.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._jobs.put, None)  # if nobody has closed it

    def submit(self, act: Callable[[], _T]) -> "Future[_T]":
        """Have the thread call a function, after all that it was given before."""
        if self._thread is None:
            context = contextvars.copy_context()
            self._thread = threading.Thread(
                target=context.run,
                args=(_work, self._jobs),
                name=self._name,
                daemon=True,
            )
            self._thread.start()
        future: Future[_T] = Future()
        self._jobs.put((future, act))
        return future

    def stack(self) -> str:
        """Where the thread is now."""
        number = None if self._thread is None else self._thread.ident
        return "" if number is None else stack_of(number)

    def close(self) -> None:
        """End the thread, with what it is at, if that does not take long."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join(_PATIENCE_SECONDS)


def is_done(future: "Future[Any]", gives_up: Callable[[], bool]) -> bool:
    """Wait until a function has returned or raised; False if the waiting was given up."""
    while not wait([future], _LOOK_AROUND_SECONDS).done:
        if gives_up():
            return False
    return True


def _work(jobs: "SimpleQueue[_Job | None]") -> None:
    while (job := jobs.get()) is not None:
        future, act = job
        try:
            future.set_result(act())
        except BaseException as error:  # whatever it is, who waits for it gets it
            future.set_exception(error)
        del job, future, act  # what they hold must not live on while this waits
