"""A team: the helper processes of one host, called by the script's own process as rank 0.

Only rank 0 watches for deaths: it wakes a helper that waits, or kills it with all others, and the
kernel kills every helper when the script ends. A failure ends the whole team; the next team is
fresh. Lockstep kills its own helpers only, not processes of a launcher (``helper_handle``).
"""

import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from lockstep.channel.background import stack_of
from lockstep.channel.polling import LookAround, Stopwatch, is_readable
from lockstep.errors import WorkerError
from lockstep.launch.forks import give_up_in_forks
from lockstep.launch.health.diagnostics import show
from lockstep.launch.health.failure import (
    MEMORY_RAN_OUT,
    failure_error,
    pack_failure,
    unpack_failure,
)
from lockstep.launch.workers.helper import CALL, DATA, FAIL, PING, READY, RETURN, reference_of
from lockstep.launch.workers.helper_handle import HelperHandle, close_helpers, end_helpers
from lockstep.launch.workers.link import Message, give_up
from lockstep.launch.workers.process_state import is_stopped
from lockstep.pickling import search_path

# A helper may import TensorFlow or torch_tpu for minutes on a busy machine. A dead one is noticed.
START_TIMEOUT_SECONDS = 600.0
# Longest waits for processes that are slow to be scheduled; stopped ones are not waited for.
_PING_TIMEOUT_SECONDS = 10.0
_STACKS_TIMEOUT_SECONDS = 5.0
_STACKS_PAUSE_SECONDS = 0.05


class Team:
    """Helpers with the ranks from ``first_rank`` on; this process has the rank before.

    The helpers start in the background: the first call waits for them.

    Args:
        num_helpers: processes to start.
        start: starts or finds the helper with a rank.
        first_rank: of the helpers; this process is rank 0 of its host.
        start_timeout_seconds: longest wait for the helpers to start.

    Raises:
        WorkerError: no process can be started.
    """

    def __init__(
        self,
        num_helpers: int,
        start: Callable[[int], HelperHandle],
        *,
        first_rank: int = 1,
        start_timeout_seconds: float = START_TIMEOUT_SECONDS,
    ) -> None:
        self._start_timeout = start_timeout_seconds
        self._timeout = start_timeout_seconds
        self._position: Callable[[int], str] = _between_calls
        self._rank = first_rank - 1
        self._helpers: list[HelperHandle] = []
        give_up_in_forks(self, "abandon")
        weakref.finalize(self, end_helpers, self._helpers)
        try:
            for rank in range(first_rank, first_rank + num_helpers):
                self._helpers.append(start(rank))
        except BaseException:
            self.close()
            raise

    @property
    def first_rank(self) -> int:
        """The first helper's rank."""
        return self._rank + 1

    @property
    def num_helpers(self) -> int:
        """Helper processes of this team."""
        return len(self._helpers)

    @property
    def is_alive(self) -> bool:
        """True if no helper is known to have died or failed. Asks none of them."""
        for helper in self._helpers:
            helper.pump()
        return bool(self._helpers) and not any(
            helper.inbox or helper.is_dead() for helper in self._helpers
        )

    def answers(self) -> bool:
        """True if every idle helper answers; a stopped one does not."""
        if not self.is_alive:
            return False
        if any(helper.pid and is_stopped(helper.pid) for helper in self._helpers):
            return False
        if not all(helper.is_ready for helper in self._helpers):
            return True  # they still start: the first call waits for them
        with suppress(WorkerError):
            self.broadcast(b"", kind=PING)
        watch = Stopwatch()
        while not all(helper.inbox for helper in self._helpers):
            if watch.tick() > _PING_TIMEOUT_SECONDS or any(
                helper.is_dead() or is_stopped(helper.pid) for helper in self._helpers
            ):
                return False
            self._wait()
            for helper in self._helpers:
                helper.pump()
        return all(helper.inbox.popleft().kind == READY for helper in self._helpers)

    def pids(self) -> list[int]:
        """Process ids of the helpers, by rank; waits until all helpers have started."""
        self.wait_until_ready()
        return [helper.pid for helper in self._helpers]

    def known_pids(self) -> dict[int, int]:
        """Process ids of the helpers that have started, by rank."""
        return {helper.rank: helper.pid for helper in self._helpers}

    def stacks(self) -> dict[int, str]:
        """The stacks of every helper's threads, now or when it crashed, by rank."""
        return dict(zip(self.known_pids(), self._stacks(), strict=True))

    def wait_until_ready(self) -> None:
        """Wait until all helpers have started.

        Raises:
            WorkerError: one ended before that, or the time is up; the message has its standard
                error.
        """
        watch = Stopwatch()
        while not all(helper.is_ready for helper in self._helpers):
            for helper in self._helpers:
                if helper.has_failed():
                    self._raise_failure(helper)
                if not helper.is_ready and helper.is_dead():
                    raise WorkerError(helper.describe_absence(helper.describe_end()))
            if watch.tick() > self._start_timeout:
                raise self._too_late(watch.seconds)
            self._wait()
        for helper in self._helpers:
            show(helper.read_output())

    def call(
        self,
        function: Callable[..., object],
        body: bytes,
        descriptors: tuple[int, ...] = (),
        *,
        position: Callable[[int], str],
        timeout_seconds: float,
    ) -> None:
        """Have every helper run ``function(context, body, descriptors)``.

        Args:
            function: at the top level of a module that helpers can import.
            body: its argument, the same for all.
            descriptors: passed along; the caller keeps its own.
            position: says where a rank is ("in fit, step 3"), for messages.
            timeout_seconds: longest single wait for a helper during this call.
        """
        self.wait_until_ready()
        self._position = position
        self._timeout = timeout_seconds
        self.start_call(function, body, descriptors)

    def start_call(
        self, function: Callable[..., object], body: bytes, descriptors: tuple[int, ...] = ()
    ) -> None:
        """As ``call``, but return before the helpers have started."""
        payload = pickle.dumps((reference_of(function), search_path(), working_directory(), body))
        self.broadcast(payload, descriptors, kind=CALL)

    def broadcast(
        self, payload: bytes, descriptors: tuple[int, ...] = (), *, kind: bytes = DATA
    ) -> None:
        """Send the same bytes to every helper."""
        message = Message(kind, payload, descriptors)
        for helper in self._helpers:
            try:
                helper.link.send(message, self._until(self._timeout))
            except OSError:
                helper.pump()
                self._raise_failure(helper)

    def gather(self, timeout_seconds: float) -> list[tuple[bytes, tuple[int, ...]]]:
        """One message of data from every helper, by rank."""
        messages = [self._next(helper, DATA, timeout_seconds) for helper in self._helpers]
        return [(message.payload, message.descriptors) for message in messages]

    def finish(self, timeout_seconds: float) -> None:
        """Wait until every helper has returned from the call."""
        for helper in self._helpers:
            self._next(helper, RETURN, timeout_seconds)
            helper.is_ready = False  # it reports when it waits for the next call
        self._position = _between_calls  # the call's own ``position`` refers to its memory

    def look_around(self, is_awaited: Callable[[int], bool] = lambda rank: True) -> None:
        """Raise if a helper has died, or one that rank 0 waits for has failed.

        When all ranks fail alike, users shall see rank 0's own exception. So the failure of a
        helper that is ahead of rank 0 is not raised yet: rank 0 may be about to fail itself.

        Args:
            is_awaited: True if rank 0 now waits for this rank.

        Raises:
            WorkerError: with the rank, where it was, and its traceback.
        """
        for helper in self._helpers:
            if not helper.has_failed() and helper.is_lost() and not helper.has_failed():
                self._raise_failure(helper)
        for helper in self._helpers:
            if helper.has_failed() and is_awaited(helper.rank):
                self._raise_failure(helper)

    def check_answering(self, waited_seconds: float) -> None:
        """Raise a WorkerError if a helper was stopped, as by SIGSTOP, and was not continued."""
        for helper in self._helpers:
            if helper.stopped_timer.is_over_limit(helper.pid, waited_seconds):
                raise _loss(
                    helper.rank,
                    "hung",
                    f"Rank {helper.rank} (process {helper.pid}) is stopped, as by SIGSTOP "
                    f"({self._position(helper.rank)}), and other ranks wait for it.",
                )

    def raise_timeout(self, waited_seconds: float) -> NoReturn:
        """Raise a WorkerError that shows what every rank is doing."""
        raise self._with_stacks(
            f"waited {waited_seconds:.0f} s for its helpers",
            "A rank hangs, or computes for longer than the timeout.",
            threading.get_ident(),
        )

    def raise_slow_read(self, waited_seconds: float, thread: int) -> NoReturn:
        """Raise a WorkerError: one read of rank 0, in this thread, takes too long."""
        error = self._with_stacks(
            f"been reading samples for {waited_seconds:.0f} s",
            "The dataset hangs, or needs longer than the timeout.",
            thread,
        )
        error.is_loss = False  # it is this process that hangs
        error.rank = self._rank
        raise error

    def ended(self) -> dict[int, str]:
        """Between calls: the ranks whose helpers have ended, and how each of them ended."""
        for helper in self._helpers:
            helper.pump()
        return {helper.rank: helper.describe_end() for helper in self._helpers if helper.is_dead()}

    def send_failure(self, error: BaseException) -> None:
        """Send every helper the reason why the call ends, if it can be sent without waiting."""
        message = Message(FAIL, pack_failure(error))
        for helper in self._helpers:
            with suppress(OSError, TimeoutError):
                helper.link.send(message, give_up)

    def close(self) -> None:
        """End all helpers now."""
        end_helpers(self._helpers)

    def abandon(self) -> None:
        """In a fork of the script, whose parent owns the helpers: close their descriptors."""
        close_helpers(self._helpers)

    # --- waiting ---------------------------------------------------------------------------------

    def _wait(self) -> None:
        is_readable([helper.link for helper in self._helpers if not helper.is_closed])

    def _until(self, timeout_seconds: float) -> LookAround:
        def look_around(waited_seconds: float) -> None:
            self.look_around()
            self.check_answering(waited_seconds)
            if waited_seconds > timeout_seconds:
                self.raise_timeout(waited_seconds)

        return look_around

    def _next(self, helper: HelperHandle, kind: bytes, timeout_seconds: float) -> Message:
        watch = Stopwatch()
        while True:
            for other in self._helpers:
                # A rank whose message this gather has read is ahead: see ``look_around``.
                is_ahead = other.rank < helper.rank and other.has_failed()
                if other.fails_next() and not is_ahead:
                    self._raise_failure(other)
            if helper.inbox:
                message = helper.inbox.popleft()
                assert message.kind == kind, (message.kind, kind)
                return message
            self.check_answering(watch.tick())
            if watch.seconds > timeout_seconds:
                self.raise_timeout(watch.seconds)
            self._wait()

    def _too_late(self, waited_seconds: float) -> WorkerError:
        late = next(helper for helper in self._helpers if not helper.is_ready)
        message = late.describe_absence(f"it is not ready after {waited_seconds:.0f} s")
        late.give_up()
        return WorkerError(message)

    # --- failures --------------------------------------------------------------------------------

    def _raise_failure(self, helper: HelperHandle) -> NoReturn:
        """Raise a helper's exception, or how its process ended."""
        where = self._position(helper.rank)
        for message in helper.inbox:
            if message.kind == FAIL:
                failure = unpack_failure(message.payload)
                raise failure_error(f"rank {helper.rank}", failure, where, helper.rank)
        reason = helper.describe_end()
        last_output = helper.diagnostics.read_new()
        output = (
            f"\n--- last output of rank {helper.rank} ---\n{last_output}" if last_output else ""
        )
        raise _loss(
            helper.rank,
            "out of memory" if f": {MEMORY_RAN_OUT}" in reason else "dead",
            f"Rank {helper.rank} (process {helper.pid}) ended ({where}): {reason}.{output}",
        )

    def _with_stacks(self, activity: str, cause: str, thread: int) -> WorkerError:
        for helper in self._helpers:
            if helper.has_failed():
                self._raise_failure(helper)
        where = self._position(self._rank)
        own = stack_of(thread)
        shown = "".join(
            f"\n--- rank {helper.rank} ({self._position(helper.rank)}) ---\n{stacks}"
            for helper, stacks in zip(self._helpers, self._stacks(), strict=True)
        )
        return _loss(
            None,
            "hung",
            f"Rank {self._rank} has {activity} ({where}). {cause} All ranks' stacks:\n"
            f"--- rank {self._rank} ({where}) ---\n{own}{shown}",
        )

    def _stacks(self) -> list[str]:
        """The Python stacks of every helper's threads."""
        for helper in self._helpers:
            helper.diagnostics.read_new()
            helper.ask_for_stacks()
        watch = Stopwatch()
        seen, has_answered = 0, False
        while watch.tick() < _STACKS_TIMEOUT_SECONDS:
            time.sleep(_STACKS_PAUSE_SECONDS)
            before, seen = seen, sum(helper.diagnostics.num_bytes for helper in self._helpers)
            if has_answered and seen == before:
                break
            has_answered = all(
                helper.diagnostics.has_new or helper.is_dead() or is_stopped(helper.pid)
                for helper in self._helpers
            )
        return [
            helper.diagnostics.read_new()
            or "(no answer: the process is stopped, or in a long system call)\n"
            for helper in self._helpers
        ]


def _loss(rank: int | None, kind: str, what: str) -> WorkerError:
    error = WorkerError(what)
    error.is_loss, error.rank, error.kind = True, rank, kind
    return error


def _between_calls(rank: int) -> str:
    return "between calls"


def working_directory() -> str | None:
    """The path of this process's; None if it has been removed."""
    with suppress(FileNotFoundError):
        return os.getcwd()
    return None
