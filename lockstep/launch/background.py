"""Threads that do one thing after the other, and end once they are closed.

They are daemons: where the thing under way never ends (a read from a network that is gone), the
script can still end, and whoever closes them waits no longer than two seconds.
"""

import contextvars
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, TypeVar

from lockstep.launch.health.diagnostics import stack_of

_LOOK_AROUND_SECONDS = 0.02
_PATIENCE_SECONDS = 2.0

_T = TypeVar("_T")
_Job = tuple[Future[Any], Callable[[], Any]]


class Background:
    """Runs functions in threads of its own, which start with the first of them.

    Args:
        name: the threads'.
        num_threads: one calls the functions in the order in which they were given.
    """

    def __init__(self, name: str, num_threads: int = 1) -> None:
        self._name = name
        self._num_threads = num_threads
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        weakref.finalize(self, _end, self._jobs, num_threads)  # if nobody has closed it

    def submit(self, act: Callable[[], _T]) -> "Future[_T]":
        """Have a thread call a function, after all that was given before is begun."""
        while len(self._threads) < self._num_threads:
            thread = threading.Thread(
                target=contextvars.copy_context().run,
                args=(_work, self._jobs),
                name=self._name,
                daemon=True,
            )
            thread.start()
            self._threads.append(thread)
        future: Future[_T] = Future()
        self._jobs.put((future, act))
        return future

    def stack(self) -> str:
        """Where the first thread is now."""
        number = self._threads[0].ident if self._threads else None
        return "" if number is None else stack_of(number)

    def close(self) -> None:
        """End the threads, with what they are at, if that does not take long."""
        threads, self._threads = self._threads, []
        _end(self._jobs, len(threads))
        for thread in threads:
            thread.join(_PATIENCE_SECONDS)


def is_done(future: "Future[Any]", gives_up: Callable[[], bool]) -> bool:
    """Wait until a function has returned or raised; False if the waiting was given up."""
    while not wait([future], _LOOK_AROUND_SECONDS).done:
        if gives_up():
            return False
    return True


def _end(jobs: "SimpleQueue[_Job | None]", num_threads: int) -> None:
    for _ in range(num_threads):
        jobs.put(None)


def _work(jobs: "SimpleQueue[_Job | None]") -> None:
    while (job := jobs.get()) is not None:
        future, act = job
        try:
            future.set_result(act())
        except BaseException as error:  # whatever it is, who waits for it gets it
            future.set_exception(error)
        del job, future, act  # what they hold must not live on while this waits
