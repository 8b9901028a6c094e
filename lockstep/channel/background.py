"""Background threads that call functions one after the other until they are closed.

They are daemons: if a function never returns (a read from a lost network), the script can still
end, and closing the threads takes at most two seconds. The interpreter closes them before its end:
what a thread's end frees of torch's needs an interpreter, or aborts the process.
"""

import atexit
import contextvars
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, TypeVar

_LOOK_AROUND_SECONDS = 0.02
_PATIENCE_SECONDS = 2.0

_T = TypeVar("_T")
_Job = tuple[Future[Any], Callable[[], Any]]


class Background:
    """Runs functions in its own threads, which start with the first function.

    Args:
        name: the threads'.
        num_threads: with one thread, functions run in the order of submission.
    """

    def __init__(self, name: str, num_threads: int = 1) -> None:
        self._name = name
        self._num_threads = num_threads
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        weakref.finalize(self, _end, self._jobs, num_threads)  # if it was not closed

    def submit(self, function: Callable[[], _T]) -> "Future[_T]":
        """Call a function in a thread, after all earlier ones have started."""
        while len(self._threads) < self._num_threads:
            thread = threading.Thread(
                target=contextvars.copy_context().run,
                args=(_work, self._jobs),
                name=self._name,
                daemon=True,
            )
            thread.start()
            self._threads.append(thread)
            _started.add(self)
        future: Future[_T] = Future()
        self._jobs.put((future, function))
        return future

    def stack(self) -> str:
        """The first thread's Python stack."""
        number = self._threads[0].ident if self._threads else None
        return "" if number is None else stack_of(number)

    def close(self) -> None:
        """End the threads after their present functions; waits at most two seconds for each."""
        threads, self._threads = self._threads, []
        _end(self._jobs, len(threads))
        for thread in threads:
            thread.join(_PATIENCE_SECONDS)


_started: "weakref.WeakSet[Background]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for one in [*_started]:
        one.close()


def stack_of(thread: int) -> str:
    """The Python stack of a thread of this process, by its identifier."""
    frame = sys._current_frames().get(thread)
    return "".join(traceback.format_stack(frame)) if frame else "(the thread has ended)\n"


def is_done(future: "Future[Any]", gives_up: Callable[[], bool]) -> bool:
    """Wait until a function has returned or raised; False if the wait was given up."""
    while not wait([future], _LOOK_AROUND_SECONDS).done:
        if gives_up():
            return False
    return True


def _end(jobs: "SimpleQueue[_Job | None]", num_threads: int) -> None:
    for _ in range(num_threads):
        jobs.put(None)


def _work(jobs: "SimpleQueue[_Job | None]") -> None:
    while (job := jobs.get()) is not None:
        future, function = job
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)
        del job, future, function  # the next wait must not keep their objects alive
