"""A team: the helper processes of one host, led by the script's own process as rank 0.

Only rank 0 watches for death: a helper that waits is either woken or killed with all others, and
the kernel kills every helper when the script ends. After any failure the whole team is ended, and
the next one is fresh.
"""

import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from lockstep.errors import WorkerError
from lockstep.launch.helper import (
    CALL,
    DATA,
    FAIL,
    READY,
    RETURN,
    STACKS_SIGNAL,
    reference_of,
)
from lockstep.launch.link import Link, Message

START_TIMEOUT_SECONDS = 120.0
_LOOK_AROUND_SECONDS = 0.02


class _Helper:
    """One helper process as rank 0 sees it."""

    def __init__(self, rank: int, threads: int | None) -> None:
        self.rank = rank
        self.link, theirs = Link.pair()
        self._stacks = os.memfd_create("lockstep-stacks") if hasattr(os, "memfd_create") else -1
        stacks = self._stacks if self._stacks >= 0 else 2
        code = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            "from lockstep.launch.helper import main\n"
            f"main({rank}, {theirs.fileno()}, {stacks}, {os.getpid()})"
        )
        environment = dict(os.environ)
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            env=environment,
            pass_fds=(theirs.fileno(), stacks),
            process_group=0,  # Ctrl-C in the terminal is for the script, which then ends us
        )
        theirs.close()

    def wait_for_input(self, seconds: float) -> bool:
        return bool(select.select([self.link], [], [], seconds)[0])

    def stacks(self) -> str:
        """What the helper does now: its threads' Python stacks."""
        if self._stacks < 0:
            return "(written to the standard error)"
        before = os.fstat(self._stacks).st_size
        self.process.send_signal(STACKS_SIGNAL)
        for _ in range(50):
            time.sleep(0.02)
            size = os.fstat(self._stacks).st_size
            if size > before:
                time.sleep(0.02)
                return os.pread(self._stacks, 1 << 20, before).decode(errors="replace")
        return "(no answer: the process is stopped or deep in a system call)"

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.link.close()
        if self._stacks >= 0:
            os.close(self._stacks)


class Team:
    """Helpers 1 to ``num_helpers``; this process is rank 0.

    Args:
        num_helpers: processes to start.
        threads: OpenMP threads each helper starts with; None leaves the environment's setting.
    """

    def __init__(self, num_helpers: int, threads: int | None = None) -> None:
        self._owner = os.getpid()
        self._position: Callable[[int], str] = lambda rank: "before its first step"
        self._helpers: list[_Helper] = []
        try:
            for rank in range(1, num_helpers + 1):
                self._helpers.append(_spawn(lambda rank=rank: _Helper(rank, threads)))
            for helper in self._helpers:
                self._next(helper, READY, START_TIMEOUT_SECONDS)
        except BaseException:
            self.close()
            raise

    @property
    def num_helpers(self) -> int:
        """Helper processes of this team."""
        return len(self._helpers)

    @property
    def is_alive(self) -> bool:
        """Whether every helper can take a call."""
        return bool(self._helpers) and all(
            helper.process.poll() is None for helper in self._helpers
        )

    def pids(self) -> list[int]:
        """Process ids by rank, from rank 1."""
        return [helper.process.pid for helper in self._helpers]

    def call(
        self,
        function: Callable[..., bytes],
        body: bytes,
        descriptors: tuple[int, ...] = (),
        *,
        position: Callable[[int], str],
    ) -> None:
        """Have every helper run ``function(context, body, descriptors) -> bytes``.

        Args:
            function: at the top level of a module that helpers can import.
            body: its argument, the same for all.
            descriptors: passed along; the caller keeps its own.
            position: says where a rank is ("step 3"), for messages.
        """
        self._position = position
        payload = pickle.dumps((reference_of(function), sys.path, os.getcwd(), body))
        self.broadcast(payload, descriptors, kind=CALL)

    def broadcast(
        self, payload: bytes, descriptors: tuple[int, ...] = (), *, kind: bytes = DATA
    ) -> None:
        """Send the same bytes to every helper."""
        for helper in self._helpers:
            try:
                helper.link.send(Message(kind, payload, descriptors))
            except OSError:
                self._raise_death(helper)

    def gather(self, timeout_seconds: float) -> list[tuple[bytes, tuple[int, ...]]]:
        """One message of data from every helper, by rank."""
        messages = [self._next(helper, DATA, timeout_seconds) for helper in self._helpers]
        return [(message.payload, message.descriptors) for message in messages]

    def finish(self, timeout_seconds: float) -> None:
        """Wait until every helper has returned from the call."""
        for helper in self._helpers:
            self._next(helper, RETURN, timeout_seconds)

    def look_around(self) -> None:
        """Raise if a helper has failed or died.

        Raises:
            WorkerError: with the rank, where it was, and its traceback.
        """
        for helper in self._helpers:
            if helper.wait_for_input(0):
                self._look_at(helper)
            elif helper.process.poll() is not None:
                self._raise_death(helper)

    def raise_timeout(self, waited_seconds: float) -> None:
        """Raise a WorkerError that shows what every helper is doing."""
        shown = "\n".join(
            f"--- rank {helper.rank} ({self._position(helper.rank)}) ---\n{helper.stacks()}"
            for helper in self._helpers
        )
        raise WorkerError(
            f"Rank 0 has waited {waited_seconds:.0f} s for its helpers ({self._position(0)}). "
            f"A rank hangs, or computes longer than the time allowed. All ranks' stacks:\n{shown}"
        )

    def close(self) -> None:
        """End all helpers now. A process forked from the script leaves them alone."""
        helpers, self._helpers = self._helpers, []
        if os.getpid() == self._owner:
            for helper in helpers:
                helper.end()

    def _next(self, helper: _Helper, kind: bytes, timeout_seconds: float) -> Message:
        began = time.monotonic()
        while not helper.wait_for_input(_LOOK_AROUND_SECONDS):
            for other in self._helpers:
                if other.process.poll() is not None and not other.wait_for_input(0):
                    self._raise_death(other)
            waited = time.monotonic() - began
            if waited > timeout_seconds:
                self.raise_timeout(waited)
        message = self._receive(helper)
        assert message.kind == kind, (message.kind, kind)
        return message

    def _look_at(self, helper: _Helper) -> None:
        """A helper has sent something while rank 0 waits for another thing: only failures matter.

        Data stays in the socket; a failure is the first byte of a message.
        """
        first = helper.link.peek()
        if first in (FAIL, b""):
            self._receive(helper)

    def _receive(self, helper: _Helper) -> Message:
        try:
            message = helper.link.receive()
        except (EOFError, ConnectionError):
            self._raise_death(helper)
        if message.kind == FAIL:
            self._raise_failure(helper.rank, message)
        return message

    def _raise_failure(self, rank: int, message: Message) -> None:
        text, summary, error = pickle.loads(message.payload)
        raise WorkerError(
            f"Rank {rank} failed ({self._position(rank)}): {summary}\n"
            f"--- traceback of rank {rank} ---\n{text}"
        ) from error

    def _raise_death(self, helper: _Helper) -> Any:
        try:
            status = helper.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            status = 0
        raise WorkerError(
            f"Rank {helper.rank} (process {helper.process.pid}) ended "
            f"({self._position(helper.rank)}): {_describe_exit(status)}."
        )


def _describe_exit(status: int) -> str:
    if status < 0:
        name = signal.Signals(-status).name
        hint = "; the kernel does this when memory runs out" if name == "SIGKILL" else ""
        return f"killed by {name}{hint}"
    return f"it left with exit status {status}"


def _spawn(make: Callable[[], _Helper]) -> _Helper:
    """Start a helper from a thread that lives as long as this process.

    The kernel kills a helper when the *thread* that started it ends (man 2 prctl,
    PR_SET_PDEATHSIG), and ``fit`` may be called from a short-lived one.
    """
    answers: SimpleQueue[_Helper | BaseException] = SimpleQueue()
    _spawner().put((make, answers))
    answer = answers.get()
    if isinstance(answer, BaseException):
        raise answer
    return answer


_Request = tuple[Callable[[], _Helper], "SimpleQueue[_Helper | BaseException]"]
_requests: dict[int, "SimpleQueue[_Request]"] = {}
_lock = threading.Lock()


def _spawner() -> "SimpleQueue[_Request]":
    """The queue of this process's spawning thread, which is started on first use."""
    with _lock:
        pid = os.getpid()  # a fork has no threads: it needs a spawner of its own
        if pid not in _requests:
            _requests[pid] = SimpleQueue()
            threading.Thread(
                target=_serve_requests, args=(_requests[pid],), name="lockstep-spawner", daemon=True
            ).start()
        return _requests[pid]


def _serve_requests(requests: "SimpleQueue[_Request]") -> None:
    while True:
        make, answers = requests.get()
        try:
            answers.put(make())
        except BaseException as error:
            answers.put(error)
