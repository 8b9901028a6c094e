"""A team: the helper processes of one host, led by the script's own process as rank 0.

Only rank 0 watches for death: a helper that waits is either woken or killed with all others, and
the kernel kills every helper when the script ends. After any failure the whole team is ended, and
the next one is fresh. Where helpers come from, and what their end means, is their origin's to say
(``origin``): a launcher's processes (``attached``) are not ours to kill.
"""

import os
import pickle
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from lockstep.channel.polling import LookAround, Stopwatch, is_readable
from lockstep.errors import WorkerError
from lockstep.launch.forks import give_up_in_forks
from lockstep.launch.health.diagnostics import DiagnosticsFile, show, stack_of
from lockstep.launch.health.failure import MEMORY_RAN_OUT, pack_failure, trouble_of, unpack_failure
from lockstep.launch.workers.helper import (
    CALL,
    DATA,
    FAIL,
    FORGET,
    PING,
    READY,
    RETURN,
    reference_of,
)
from lockstep.launch.workers.link import Message, give_up
from lockstep.launch.workers.process_state import StoppedProcessTimer, is_stopped
from lockstep.launch.workers.worker_backend import WorkerBackend
from lockstep.pickling import search_path

START_TIMEOUT_SECONDS = 120.0
# Longest waits for processes that may just not be running; stopped ones are not waited for.
_PING_TIMEOUT_SECONDS = 10.0
_STACKS_TIMEOUT_SECONDS = 5.0
_STACKS_PAUSE_SECONDS = 0.05


class _Helper:
    """One helper process as rank 0 sees it."""

    def __init__(self, rank: int, origin: WorkerBackend) -> None:
        self.rank = rank
        self.origin = origin
        self.inbox: deque[Message] = deque()
        self.pid = 0
        self.is_ready = False  # until it says that it can take a call
        self.standstill = StoppedProcessTimer()
        self.diagnostics = DiagnosticsFile()
        self.number, self.link = origin.start_helper(rank, self.diagnostics)
        self.is_closed = False

    def pump(self) -> None:
        """Take in what it has sent."""
        if self.is_closed:
            return
        try:
            self.inbox.extend(self.link.take())
        except EOFError:
            self.is_closed = True
        if not self.is_ready and self.inbox and self.inbox[0].kind == READY:
            self.pid = int(self.inbox.popleft().payload)
            self.is_ready = True
            self.origin.note_ready()

    def is_dead(self) -> bool:
        """Whether nothing more will come from it; what it has sent is in the inbox then."""
        if self.is_closed:
            return True
        if not self.origin.has_ended(self.number):
            return False
        self.pump()
        return True

    def is_lost(self) -> bool:
        """Whether it has died during a call; afterwards the user's own processes may."""
        if not self.is_dead():
            return False
        return self.is_ready and all(message.kind != RETURN for message in self.inbox)

    def is_in_trouble(self) -> bool:
        """Whether the next thing it has to say, if any, is that it has failed or died."""
        self.pump()
        if not self.inbox and self.is_lost():
            return not self.inbox or self.inbox[0].kind == FAIL
        return bool(self.inbox) and self.inbox[0].kind == FAIL

    def has_failed(self) -> bool:
        """Whether it has told of an exception, perhaps after other things."""
        self.pump()
        return any(message.kind == FAIL for message in self.inbox)

    def close(self) -> None:
        """Give up this end's descriptors, and those of messages that nobody has read."""
        self.link.close()
        self.diagnostics.close()
        for message in self.inbox:
            for descriptor in message.descriptors:
                os.close(descriptor)
        self.inbox.clear()


class Team:
    """Helpers with the ranks from ``first_rank`` on; this process has the rank before.

    The helpers start in the background: the first call waits for them.

    Args:
        num_helpers: processes to start.
        make_origin: makes or finds what a helper comes from, such as a template.
        first_rank: of the helpers; this process is rank 0 of its host.
        start_timeout_seconds: longest wait for the helpers to start.

    Raises:
        WorkerError: no process can be started.
    """

    def __init__(
        self,
        num_helpers: int,
        make_origin: Callable[[], WorkerBackend],
        *,
        first_rank: int = 1,
        start_timeout_seconds: float = START_TIMEOUT_SECONDS,
    ) -> None:
        self._start_timeout = start_timeout_seconds
        self._timeout = start_timeout_seconds
        self._position: Callable[[int], str] = _between_calls
        self._rank = first_rank - 1
        self._helpers: list[_Helper] = []
        give_up_in_forks(self, "abandon")
        weakref.finalize(self, _end_helpers, self._helpers)
        try:
            for rank in range(first_rank, first_rank + num_helpers):
                self._helpers.append(_Helper(rank, make_origin()))
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
        """Whether no helper has died or failed, as far as can be told without asking."""
        for helper in self._helpers:
            helper.pump()
        return bool(self._helpers) and not any(
            helper.inbox or helper.is_dead() for helper in self._helpers
        )

    def answers(self) -> bool:
        """Whether every idle helper answers; one that is stopped does not."""
        if not self.is_alive:
            return False
        if not all(helper.is_ready for helper in self._helpers):
            return True  # still on their way: the first call waits for them
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
        """What every helper does now, or did when it crashed: its threads' stacks, by rank."""
        return dict(zip(self.known_pids(), self._stacks(), strict=True))

    def wait_until_ready(self) -> None:
        """Wait until all helpers have started.

        Raises:
            WorkerError: one ended before that, or time is up; with what it wrote to its standard
                error.
        """
        watch = Stopwatch()
        while not all(helper.is_ready for helper in self._helpers):
            for helper in self._helpers:
                if helper.has_failed():
                    self._raise_trouble(helper)
                if not helper.is_ready and helper.is_dead():
                    raise _no_start(helper, helper.origin.describe_end(helper.number))
            if watch.tick() > self._start_timeout:
                raise self._too_late(watch.seconds)
            self._wait()
        for origin in {helper.origin for helper in self._helpers}:
            show(origin.read_new())

    def call(
        self,
        function: Callable[..., bytes],
        body: bytes,
        descriptors: tuple[int, ...] = (),
        *,
        position: Callable[[int], str],
        timeout_seconds: float,
    ) -> None:
        """Have every helper run ``function(context, body, descriptors) -> bytes``.

        Args:
            function: at the top level of a module that helpers can import.
            body: its argument, the same for all.
            descriptors: passed along; the caller keeps its own.
            position: says where a rank is ("in fit, step 3"), for messages.
            timeout_seconds: longest wait for a helper, in all that belongs to this call.
        """
        self.wait_until_ready()
        self._position = position
        self._timeout = timeout_seconds
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
                self._raise_trouble(helper)

    def gather(self, timeout_seconds: float) -> list[tuple[bytes, tuple[int, ...]]]:
        """One message of data from every helper, by rank."""
        messages = [self._next(helper, DATA, timeout_seconds) for helper in self._helpers]
        return [(message.payload, message.descriptors) for message in messages]

    def finish(self, timeout_seconds: float) -> None:
        """Wait until every helper has returned from the call."""
        for helper in self._helpers:
            self._next(helper, RETURN, timeout_seconds)
            helper.is_ready = helper.origin.stays_ready
        self._position = _between_calls  # it knows the call's memory: let go of that

    def look_around(self, is_awaited: Callable[[int], bool] = lambda rank: True) -> None:
        """Raise if a helper has died, or one that rank 0 waits for has failed.

        When all ranks fail alike, rank 0's own exception is the one to see. So the failure of a
        helper that is ahead of rank 0 is no news yet: rank 0 may be about to fail by itself.

        Args:
            is_awaited: whether rank 0 now waits for this rank.

        Raises:
            WorkerError: with the rank, where it was, and its traceback.
        """
        for helper in self._helpers:
            if not helper.has_failed() and helper.is_lost() and not helper.has_failed():
                self._raise_trouble(helper)
        for helper in self._helpers:
            if helper.has_failed() and is_awaited(helper.rank):
                self._raise_trouble(helper)

    def check_answering(self, waited_seconds: float) -> None:
        """Raise a WorkerError if a helper was stopped, as by SIGSTOP, and has not gone on."""
        for helper in self._helpers:
            if helper.standstill.is_over_limit(helper.pid, waited_seconds):
                raise _loss(
                    helper.rank,
                    "hung",
                    f"Rank {helper.rank} (process {helper.pid}) is stopped "
                    f"({self._position(helper.rank)}), as by SIGSTOP, and was waited for.",
                )

    def raise_timeout(self, waited_seconds: float) -> NoReturn:
        """Raise a WorkerError that shows what every rank is doing."""
        raise self._with_stacks(
            f"waited {waited_seconds:.0f} s for its helpers",
            "A rank hangs, or computes longer than the time allowed.",
            threading.get_ident(),
        )

    def raise_slow_read(self, waited_seconds: float, thread: int) -> NoReturn:
        """Raise a WorkerError where rank 0 is at one read for too long, in this thread."""
        error = self._with_stacks(
            f"been reading samples for {waited_seconds:.0f} s",
            "The dataset hangs, or takes longer than the time allowed.",
            thread,
        )
        error.is_loss = False  # it is this process that hangs
        error.rank = self._rank
        raise error

    def ended(self) -> dict[int, str]:
        """Between calls: the ranks whose helpers have ended, and what is known of each end."""
        for helper in self._helpers:
            helper.pump()
        return {
            helper.rank: helper.origin.describe_end(helper.number)
            for helper in self._helpers
            if helper.is_dead()
        }

    def tell_failure(self, error: BaseException) -> None:
        """Tell all who still listen why the call ends, as far as they take it in at once."""
        message = Message(FAIL, pack_failure(error))
        for helper in self._helpers:
            with suppress(OSError, TimeoutError):
                helper.link.send(message, give_up)

    def forget(self) -> None:
        """Have the helpers keep nothing of earlier calls."""
        with suppress(WorkerError):  # it ends those that do not hear
            self.broadcast(b"", kind=FORGET)

    def close(self) -> None:
        """End all helpers now."""
        _end_helpers(self._helpers)

    def abandon(self) -> None:
        """In a fork of the script: the helpers are not ours."""
        _close_helpers(self._helpers)

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

    def _next(self, helper: _Helper, kind: bytes, timeout_seconds: float) -> Message:
        watch = Stopwatch()
        while True:
            for other in self._helpers:
                # Who has had its turn in this gather is ahead: see ``look_around``.
                is_ahead = other.rank < helper.rank and other.has_failed()
                if other.is_in_trouble() and not is_ahead:
                    self._raise_trouble(other)
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
        error = _no_start(late, f"it is not ready after {waited_seconds:.0f} s")
        late.origin.close()  # a template that hangs must not get another chance
        return error

    # --- trouble ---------------------------------------------------------------------------------

    def _raise_trouble(self, helper: _Helper) -> NoReturn:
        """Raise what a helper died of: its exception, or what the kernel says."""
        where = self._position(helper.rank)
        for message in helper.inbox:
            if message.kind == FAIL:
                failure = unpack_failure(message.payload)
                raise trouble_of(f"rank {helper.rank}", failure, where, helper.rank)
        reason = helper.origin.describe_end(helper.number)
        last_output = helper.diagnostics.read_new()
        shown = f"\n--- last output of rank {helper.rank} ---\n{last_output}" if last_output else ""
        raise _loss(
            helper.rank,
            "out of memory" if f": {MEMORY_RAN_OUT}" in reason else "dead",
            f"Rank {helper.rank} (process {helper.pid}) ended ({where}): {reason}.{shown}",
        )

    def _with_stacks(self, doing: str, remark: str, thread: int) -> WorkerError:
        for helper in self._helpers:
            if helper.has_failed():
                self._raise_trouble(helper)
        where = self._position(self._rank)
        own = stack_of(thread)
        shown = "".join(
            f"\n--- rank {helper.rank} ({self._position(helper.rank)}) ---\n{stacks}"
            for helper, stacks in zip(self._helpers, self._stacks(), strict=True)
        )
        return _loss(
            None,
            "hung",
            f"Rank {self._rank} has {doing} ({where}). {remark} All ranks' stacks:\n"
            f"--- rank {self._rank} ({where}) ---\n{own}{shown}",
        )

    def _stacks(self) -> list[str]:
        """What every helper does now: its threads' Python stacks."""
        for helper in self._helpers:
            helper.diagnostics.read_new()
            helper.origin.ask_for_stacks(helper.number)
        watch = Stopwatch()
        seen, has_answered = 0, False
        while watch.tick() < _STACKS_TIMEOUT_SECONDS:
            time.sleep(_STACKS_PAUSE_SECONDS)
            before, seen = seen, sum(helper.diagnostics.num_bytes for helper in self._helpers)
            if has_answered and seen == before:  # nothing more is coming
                break
            has_answered = all(
                helper.diagnostics.has_new or helper.is_dead() or is_stopped(helper.pid)
                for helper in self._helpers
            )
        return [
            helper.diagnostics.read_new()
            or "(no answer: the process is stopped, or deep in a system call)\n"
            for helper in self._helpers
        ]


def _end_helpers(helpers: list[_Helper]) -> None:
    by_origin: dict[WorkerBackend, list[int]] = {}
    for helper in helpers:
        by_origin.setdefault(helper.origin, []).append(helper.number)
    for origin, numbers in by_origin.items():
        origin.end(numbers)
    _close_helpers(helpers)


def _close_helpers(helpers: list[_Helper]) -> None:
    while helpers:
        helpers.pop().close()


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


def _no_start(helper: _Helper, reason: str) -> WorkerError:
    said = helper.diagnostics.read_new()
    message = helper.origin.describe_absence(helper.number, helper.rank, reason, said)
    return WorkerError(message)
