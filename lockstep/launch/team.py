"""A team: the helper processes of one host, led by the script's own process as rank 0.

Only rank 0 watches for death: a helper that waits is either woken or killed with all others, and
the kernel kills every helper when the script ends. After any failure the whole team is ended, and
the next one is fresh.
"""

import os
import pickle
import sys
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from lockstep.errors import WorkerError
from lockstep.launch.failure import describe_exit, unpack_failure
from lockstep.launch.helper import (
    CALL,
    DATA,
    FAIL,
    PING,
    READY,
    RETURN,
    STACKS_SIGNAL,
    reference_of,
)
from lockstep.launch.interpreter import search_path
from lockstep.launch.link import Link, LookAround, Message, Stopwatch, is_readable
from lockstep.launch.scrap import Scrap
from lockstep.launch.template import Template

START_TIMEOUT_SECONDS = 120.0
_PING_TIMEOUT_SECONDS = 2.0
_STACKS_TIMEOUT_SECONDS = 1.0
_DEATH_TIMEOUT_SECONDS = 5.0


class _Helper:
    """One helper process as rank 0 sees it."""

    def __init__(self, rank: int, template: Template) -> None:
        self.rank = rank
        self.template = template
        self.inbox: deque[Message] = deque()
        self.pid = 0
        self.scrap = Scrap()
        self.link, theirs = Link.pair()
        self.number = template.start_helper(rank, theirs, self.scrap)
        theirs.close()
        self.is_closed = False

    @property
    def is_ready(self) -> bool:
        """Whether it has said that it can take a call."""
        return self.pid > 0

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
            self.template.is_warm = True

    def is_dead(self) -> bool:
        """Whether nothing more will come from it; what it has sent is in the inbox then."""
        if self.is_closed:
            return True
        if self.template.status(self.number) is None:
            return False
        self.pump()
        return True

    def is_in_trouble(self) -> bool:
        """Whether the next thing it has to say, if any, is that it has failed or died."""
        self.pump()
        if not self.inbox and self.is_dead():
            return not self.inbox or self.inbox[0].kind == FAIL
        return bool(self.inbox) and self.inbox[0].kind == FAIL

    def has_failed(self) -> bool:
        """Whether it has told of an exception, be it after other things."""
        self.pump()
        return any(message.kind == FAIL for message in self.inbox)

    def status(self) -> int | None:
        """How it ended, once the kernel has told."""
        deadline = time.monotonic() + _DEATH_TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            status = self.template.status(self.number)
            if status is not None:
                return status
            time.sleep(0.005)
        return None

    def close(self) -> None:
        """Give up this end's descriptors, and those of messages that nobody has read."""
        self.link.close()
        self.scrap.close()
        for message in self.inbox:
            for descriptor in message.descriptors:
                os.close(descriptor)
        self.inbox.clear()


class Team:
    """Helpers 1 to ``num_helpers``; this process is rank 0.

    The helpers start in the background: the first call waits for them.

    Args:
        num_helpers: processes to start.
        make_template: makes or finds the template that a helper comes from.
        start_timeout_seconds: longest wait for the helpers to start.

    Raises:
        WorkerError: no process can be started.
    """

    def __init__(
        self,
        num_helpers: int,
        make_template: Callable[[], Template],
        *,
        start_timeout_seconds: float = START_TIMEOUT_SECONDS,
    ) -> None:
        self._start_timeout = start_timeout_seconds
        self._timeout = start_timeout_seconds
        self._position: Callable[[int], str] = _between_calls
        self._helpers: list[_Helper] = []
        _living.add(self)
        weakref.finalize(self, _end_helpers, self._helpers)
        try:
            for rank in range(1, num_helpers + 1):
                self._helpers.append(_Helper(rank, make_template()))
        except BaseException:
            self.close()
            raise

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
                helper.is_dead() for helper in self._helpers
            ):
                return False
            self._wait()
            for helper in self._helpers:
                helper.pump()
        return all(helper.inbox.popleft().kind == READY for helper in self._helpers)

    def pids(self) -> list[int]:
        """Process ids by rank, from rank 1; waits until all helpers have started."""
        self.wait_until_ready()
        return [helper.pid for helper in self._helpers]

    def wait_until_ready(self) -> None:
        """Wait until all helpers have started.

        Raises:
            WorkerError: one ended before that, or time is up; with what it wrote to its standard
                error.
        """
        watch = Stopwatch()
        while not all(helper.is_ready for helper in self._helpers):
            for helper in self._helpers:
                helper.pump()
                if not helper.is_ready and helper.is_dead():
                    raise _no_start(helper, describe_exit(helper.status() or 0))
            if watch.tick() > self._start_timeout:
                raise self._too_late(watch.seconds)
            self._wait()
        for template in {helper.template for helper in self._helpers}:
            sys.stderr.write(template.scrap.read_new())  # warnings of imports, most likely

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
        payload = pickle.dumps((reference_of(function), search_path(), _directory(), body))
        self.broadcast(payload, descriptors, kind=CALL)

    def broadcast(
        self, payload: bytes, descriptors: tuple[int, ...] = (), *, kind: bytes = DATA
    ) -> None:
        """Send the same bytes to every helper."""
        message = Message(kind, payload, descriptors)
        for helper in self._helpers:
            try:
                helper.link.send(message, self._patience(self._timeout))
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
            if not helper.has_failed() and helper.is_dead() and not helper.has_failed():
                self._raise_trouble(helper)
        for helper in self._helpers:
            if helper.has_failed() and is_awaited(helper.rank):
                self._raise_trouble(helper)

    def raise_timeout(self, waited_seconds: float) -> None:
        """Raise a WorkerError that shows what every rank is doing."""
        for helper in self._helpers:
            if helper.has_failed():
                self._raise_trouble(helper)
        own = "".join(traceback.format_stack()[:-1])
        shown = "".join(
            f"\n--- rank {helper.rank} ({self._position(helper.rank)}) ---\n{stacks}"
            for helper, stacks in zip(self._helpers, self._stacks(), strict=True)
        )
        raise WorkerError(
            f"Rank 0 has waited {waited_seconds:.0f} s for its helpers ({self._position(0)}). "
            f"A rank hangs, or computes longer than the time allowed. All ranks' stacks:\n"
            f"--- rank 0 ({self._position(0)}) ---\n{own}{shown}"
        )

    def close(self) -> None:
        """End all helpers now."""
        _end_helpers(self._helpers)

    def abandon(self) -> None:
        """In a fork of the script: the helpers are not ours."""
        _close_helpers(self._helpers)

    # --- waiting ---------------------------------------------------------------------------------

    def _wait(self) -> None:
        is_readable([helper.link for helper in self._helpers if not helper.is_closed])

    def _patience(self, timeout_seconds: float) -> LookAround:
        def look_around(waited_seconds: float) -> None:
            self.look_around()
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
            if watch.tick() > timeout_seconds:
                self.raise_timeout(watch.seconds)
            self._wait()

    def _too_late(self, waited_seconds: float) -> WorkerError:
        late = next(helper for helper in self._helpers if not helper.is_ready)
        error = _no_start(late, f"it is not ready after {waited_seconds:.0f} s")
        late.template.close()  # a template that hangs must not get another chance
        return error

    # --- trouble ---------------------------------------------------------------------------------

    def _raise_trouble(self, helper: _Helper) -> None:
        """Raise what a helper died of: its exception, or what the kernel says."""
        where = self._position(helper.rank)
        for message in helper.inbox:
            if message.kind == FAIL:
                failure = unpack_failure(message.payload)
                raise WorkerError(
                    f"Rank {helper.rank} failed ({where}): {failure.summary}\n"
                    f"--- traceback of rank {helper.rank} ---\n{failure.text}"
                ) from failure.error
        status = helper.status()
        reason = "its link is closed" if status is None else describe_exit(status)
        last_words = helper.scrap.read_new()
        raise WorkerError(
            f"Rank {helper.rank} (process {helper.pid}) ended ({where}): {reason}."
            + (f"\n--- last words of rank {helper.rank} ---\n{last_words}" if last_words else "")
        )

    def _stacks(self) -> list[str]:
        """What every helper does now: its threads' Python stacks."""
        for helper in self._helpers:
            helper.scrap.read_new()
            helper.template.signal([helper.number], STACKS_SIGNAL)
        deadline = time.monotonic() + _STACKS_TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.02)
            if all(helper.scrap.has_new for helper in self._helpers):
                break
        time.sleep(0.05)  # what has begun to come may not be there in whole
        return [
            helper.scrap.read_new()
            or "(no answer: the process is stopped, or deep in a system call)\n"
            for helper in self._helpers
        ]


def _end_helpers(helpers: list[_Helper]) -> None:
    by_template: dict[Template, list[int]] = {}
    for helper in helpers:
        by_template.setdefault(helper.template, []).append(helper.number)
    for template, numbers in by_template.items():
        template.end(numbers)
    _close_helpers(helpers)


def _close_helpers(helpers: list[_Helper]) -> None:
    while helpers:
        helpers.pop().close()


def _between_calls(rank: int) -> str:
    return "between calls"


def _directory() -> str | None:
    with suppress(FileNotFoundError):  # the script's directory may have been removed
        return os.getcwd()
    return None


def _no_start(helper: _Helper, reason: str) -> WorkerError:
    said = helper.template.scrap.read_new() + helper.scrap.read_new()
    return WorkerError(
        f"Rank {helper.rank}'s process could not start: {reason}. "
        f"It was to run {sys.executable}. Its standard error:\n{said or '(empty)'}"
    )


_living: "weakref.WeakSet[Team]" = weakref.WeakSet()


def _abandon_all() -> None:
    for team in list(_living):
        team.abandon()
    _living.clear()


os.register_at_fork(after_in_child=_abandon_all)
