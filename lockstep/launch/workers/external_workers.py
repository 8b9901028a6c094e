"""External workers: helpers that a launcher has started, and that run the user's script.

torchrun and srun start a process for each device, and each of them runs the whole script. Process 0
of a host leads: it has a ``Team`` of the others, as of helpers that it starts itself. The others
reach the same ``fit`` as the leader, and serve its calls there::

    leader                                  follower
    ──────                                  ────────
    attach_team    ◀── meeting ──▶          attach
    team.call      ◀── READY, CALL ──▶      attachment.serve_call
    team.finish    ◀── RETURN ──            ... returns; the script goes on
    team.call      ◀── READY, CALL ──▶      attachment.serve_call

A follower is the user's process: Lockstep neither kills it nor sends it signals. After a call its
signal handlers, search path and working directory are as before, and an exception in a call is also
raised in the follower. Messages may be unpickled: they come from a process of the same user.

After a failure both ends close the connection, and meet again for the next call. Linux only.
"""

import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from lockstep.channel.polling import LookAround
from lockstep.cluster.place import Place
from lockstep.errors import WorkerError, problem
from lockstep.launch.forks import give_up_in_forks
from lockstep.launch.health.diagnostics import make_event, notify, stacks_on_request
from lockstep.launch.health.failure import failure_error, noting_on, pack_failure, unpack_failure
from lockstep.launch.rendezvous.local_rendezvous import meet_followers, meet_leader
from lockstep.launch.workers.helper import FAIL, RETURN, HelperContext
from lockstep.launch.workers.helper_handle import HelperHandle
from lockstep.launch.workers.link import Link, Message, give_up
from lockstep.launch.workers.process_state import PeerProcess, StoppedProcessTimer
from lockstep.launch.workers.team import Team

# The leader's first message: the follower's rank, with descriptors of its diagnostics file and of
# the event that requests its stacks.
WELCOME = b"W"


# --- the leader's side ---------------------------------------------------------------------------


def attach_team(
    place: Place,
    secret: bytes | None,
    *,
    num_helpers: int,
    timeout_seconds: float,
    first_rank: int = 1,
) -> Team:
    """A team of the processes 1 to ``num_helpers`` of this host, which this process leads.

    Args:
        place: this process's.
        secret: the job's, if it has one.
        num_helpers: processes to wait for.
        timeout_seconds: longest wait for them here, and for each of them at the start of a call.
        first_rank: process 1's rank; the others have the next.

    Raises:
        WorkerError: some did not connect; with their numbers.
    """
    assert place.leads
    assert num_helpers > 0
    followers = meet_followers(
        place, secret, num_followers=num_helpers, timeout_seconds=timeout_seconds
    )

    def found(rank: int) -> _Follower:
        number = rank - first_rank + 1
        return _Follower(rank, place, number, followers[number - 1])

    try:
        return Team(
            num_helpers, found, first_rank=first_rank, start_timeout_seconds=timeout_seconds
        )
    except BaseException:
        for follower in followers:
            follower.close()
        raise


class _Follower(HelperHandle):
    """A follower as its leader sees it. Its output goes to its launcher.

    Args:
        rank: its rank.
        place: the leader's.
        number: its process's, among those of its host.
        peer: its process.
    """

    def __init__(self, rank: int, place: Place, number: int, peer: PeerProcess) -> None:
        super().__init__(rank, Link(peer.sock))
        self._place = place
        self._number = number
        self._peer = peer
        self._stack_event = make_event()
        descriptors = (self.diagnostics.descriptor, self._stack_event)
        with suppress(OSError):  # it has ended: the first call raises that
            self.link.send(Message(WELCOME, str(rank).encode(), descriptors))

    def has_ended(self) -> bool:
        return self._peer.has_ended()

    def describe_end(self) -> str:
        if self._peer.is_ending():
            return "its process has ended; its output or its launcher says why"
        return "its process runs, but has left the call"

    def describe_absence(self, reason: str) -> str:
        return problem(
            f"Rank {self.rank} did not take part in this call.",
            received=f"{reason} (process {self._peer.pid}, number {self._number} of its host)",
            fix=f"Every process that {self._place.launcher} has started must run the same script, "
            "and call fit, evaluate and predict as often as process 0.",
        )

    def ask_for_stacks(self) -> None:
        notify(self._stack_event)

    def end(self) -> None:
        """Disconnect from the process: its call ends, and its script continues."""
        self._peer.close()
        if self._stack_event >= 0:
            os.close(self._stack_event)
            self._stack_event = -1


# --- a follower's side ---------------------------------------------------------------------------


def attach(place: Place, secret: bytes | None, *, timeout_seconds: float) -> "Attachment":
    """Find the process that leads this host, to serve its calls.

    Args:
        place: this process's, which does not lead.
        secret: the job's, if it has one.
        timeout_seconds: longest wait for the leader, which may start later.

    Raises:
        WorkerError: it did not connect in time, or refuses this process.
    """
    assert not place.leads
    return Attachment(meet_leader(place, secret, timeout_seconds=timeout_seconds))


class Attachment(HelperContext):
    """A follower's end of the link to its leader, which lasts for many calls.

    This process outlives the leader, and raises its failure.

    Attributes:
        has_leader_failed: True if ``leader_loss`` was the leader's own exception.
    """

    def __init__(self, leader: PeerProcess) -> None:
        super().__init__(0, Link(leader.sock))  # the rank comes with WELCOME
        self.has_leader_failed = False
        self._leader = leader
        self._stopped_timer = StoppedProcessTimer()
        self._descriptors: list[int] = []  # of the diagnostics file and the event
        self._finalizer = weakref.finalize(
            self, _close, self._link, self._leader, self._descriptors
        )
        give_up_in_forks(self, "close")  # the leader must see when the script itself closes it

    @property
    def is_open(self) -> bool:
        """True if another call can be served."""
        return self._finalizer.alive

    def serve_call(self) -> Any:
        """Wait for the leader's next call, run its function, and return the result.

        Raises:
            WorkerError: the leader has ended, or given up the call.
            BaseException: the function's own exception, which the leader gets too.
        """
        assert self.is_open
        try:
            call = self.await_call()
            diagnostics, event = self._descriptors
            with stacks_on_request(event, diagnostics), _restored_afterwards():
                result = self.run(call)
            self._send(Message(RETURN))
        except BaseException as error:
            with noting_on(error), suppress(OSError):
                self._link.send(Message(FAIL, pack_failure(error)), give_up)
            with noting_on(error):
                self.close()
            raise
        return result

    def look_around(self, waited_seconds: float) -> None:
        """Raise WorkerError if the leader has ended, given up the call, or is stopped."""
        if (loss := self.leader_loss()) is not None:
            raise loss
        self.check_answering(waited_seconds)

    def leader_loss(self) -> WorkerError | None:
        """How the leader ended, failed or gave up; None while it is connected."""
        return self._loss() if self._link.is_cut else None

    def check_answering(self, waited_seconds: float) -> None:
        """Raise a WorkerError if the leader is stopped."""
        if self._stopped_timer.is_over_limit(self._leader.pid, waited_seconds):
            raise WorkerError(
                f"Rank 0 of this host (process {self._leader.pid}) is stopped, as by SIGSTOP."
            )

    def close(self) -> None:
        """Close the connection, without a message: the leader's next call fails."""
        self._finalizer()

    def _handle(self, message: Message) -> None:
        if message.kind == WELCOME:
            self.rank = int(message.payload)
            self._descriptors[:] = message.descriptors
        else:
            super()._handle(message)

    def _send(self, message: Message) -> None:
        try:
            super()._send(message)
        except BrokenPipeError as error:
            raise self._loss() from error

    def _receive(self, look_around: LookAround, *, is_idle: bool = False) -> Message:
        try:
            message = super()._receive(look_around)  # the leader may stop at any time
        except EOFError as error:
            raise self._loss() from error
        if message.kind == FAIL:
            raise _failure_in(message)
        return message

    def _loss(self) -> WorkerError:
        """The leader's last message, if it is a failure; otherwise how its process ended."""
        with suppress(EOFError):
            while (message := self._link.take_one()) is not None:
                message.close()
                if message.kind == FAIL:
                    self.has_leader_failed = True
                    return _failure_in(message)
        what = (
            "has ended: its output or its launcher says why"
            if self._leader.is_ending()
            else "has given up this call: its own error says why"
        )
        return WorkerError(f"Rank 0 of this host (process {self._leader.pid}) {what}.")


def _failure_in(message: Message) -> WorkerError:
    return failure_error("rank 0 of this host", unpack_failure(message.payload))


@contextmanager
def _restored_afterwards() -> Iterator[None]:
    """After the block, set the module search path and working directory to what they were."""
    path = list(sys.path)
    directory = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)  # it may have been removed
    try:
        yield
    finally:
        sys.path[:] = path
        os.fchdir(directory)
        os.close(directory)


def _close(link: Link, leader: PeerProcess, descriptors: list[int]) -> None:
    link.close()  # and the descriptors of a message that has come in part
    leader.close()
    while descriptors:
        os.close(descriptors.pop())
