"""Attached processes: helpers that a launcher has started, and that run the user's script.

Under torchrun and srun nobody has to start helpers: there is a process for each device, and each
runs the whole script. Process 0 of a host leads: it has a ``Team`` of the others, as it would have
one of its own helpers. The others come to the same ``fit`` as the leader, and serve it there::

    leader                                  follower
    ──────                                  ────────
    attach_team    ◀── meeting ──▶          attach
    team.call      ◀── READY, CALL ──▶      attachment.serve_call
    team.finish    ◀── RETURN ──            ... returns; the script goes on
    team.call      ◀── READY, CALL ──▶      attachment.serve_call

A follower is the user's process, not ours: nobody kills it or sends it signals, its handlers,
search path and working directory are what they were when a call is over, and what fails in a call
is raised in it as well. Messages may be unpickled: they come from a process of the same user.

After any failure both ends hang up, and meet anew for the next call. Linux only.
"""

import importlib
import os
import pickle
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from lockstep.channel.polling import LookAround
from lockstep.cluster.place import Place
from lockstep.errors import WorkerError, problem
from lockstep.launch.forks import give_up_in_forks
from lockstep.launch.health.diagnostics import (
    DiagnosticsFile,
    make_event,
    notify,
    stacks_on_request,
)
from lockstep.launch.health.failure import failure_error, noting_on, pack_failure, unpack_failure
from lockstep.launch.rendezvous.local_rendezvous import LocalPeer, meet_followers, meet_leader
from lockstep.launch.workers.helper import (
    CALL,
    FAIL,
    PING,
    READY,
    RETURN,
    HelperContext,
    Idleness,
    Leader,
    function_at,
)
from lockstep.launch.workers.link import Link, Message, give_up
from lockstep.launch.workers.process_state import PeerProcess, StoppedProcessTimer
from lockstep.launch.workers.team import Team, working_directory
from lockstep.launch.workers.worker_backend import WorkerBackend

# From the leader, once: the follower's rank, with descriptors of its diagnostics file and of the
# event by which it is asked for its stacks.
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
        timeout_seconds: longest wait for them here, and for each of them to come to a call.
        first_rank: process 1's rank; the others have the next.

    Raises:
        WorkerError: some have not come; with their numbers.
    """
    assert place.leads
    assert num_helpers > 0
    local_peers = meet_followers(
        place, secret, num_followers=num_helpers, timeout_seconds=timeout_seconds
    )
    origin = _Followers(place, local_peers)
    try:
        return Team(
            num_helpers,
            lambda: origin,
            first_rank=first_rank,
            start_timeout_seconds=timeout_seconds,
        )
    except BaseException:
        origin.close()
        raise


class _Followers(WorkerBackend):
    """Followers, numbered as the processes of their host are."""

    stays_ready = False

    def __init__(self, place: Place, local_peers: Sequence[LocalPeer]) -> None:
        self._place = place
        self._coming = dict(enumerate(local_peers, 1))
        self._peers: dict[int, PeerProcess] = {}
        self._stack_events: dict[int, int] = {}

    def start_helper(self, rank: int, diagnostics: DiagnosticsFile) -> tuple[int, Link]:
        event = make_event()
        number = min(self._coming)
        local_peer = self._coming.pop(number)
        self._peers[number], self._stack_events[number] = local_peer.peer, event
        link = Link(local_peer.sock)
        with suppress(OSError):  # it is gone: that shows in the first call
            link.send(Message(WELCOME, str(rank).encode(), (diagnostics.descriptor, event)))
        return number, link

    def note_ready(self) -> None:
        pass  # the process was there before

    def has_ended(self, number: int) -> bool:
        return self._peers[number].has_ended()

    def describe_end(self, number: int) -> str:
        if self._peers[number].is_ending():
            return "its process is gone; what it wrote, or its launcher, says why"
        return "its process lives, but has left the call"

    def describe_absence(self, number: int, rank: int, reason: str, said: str) -> str:
        return problem(
            f"Rank {rank} did not come to this call.",
            received=f"{reason} (process {self._peers[number].pid}, number {number} of its host)",
            fix=f"Every process that {self._place.launcher} has started must run the same script, "
            "and call fit, evaluate and predict as often as process 0.",
        )

    def read_new(self) -> str:
        return ""  # what they write is not ours

    def ask_for_stacks(self, number: int) -> None:
        notify(self._stack_events[number])

    def end(self, numbers: Sequence[int]) -> None:
        """They are told by their links, and go on with what is after the call."""
        for number in numbers:
            self._peers.pop(number).close()
            os.close(self._stack_events.pop(number))

    def close(self) -> None:
        """Hang up on those of which no helper has been made."""
        while self._coming:
            self._coming.popitem()[1].close()


# --- a follower's side ---------------------------------------------------------------------------


def attach(place: Place, secret: bytes | None, *, timeout_seconds: float) -> "Attachment":
    """Find the process that leads this host, to serve its calls.

    Args:
        place: this process's, which does not lead.
        secret: the job's, if it has one.
        timeout_seconds: longest wait for the leader, which may come later.

    Raises:
        WorkerError: it has not come, or sends this process away.
    """
    assert not place.leads
    return Attachment(meet_leader(place, secret, timeout_seconds=timeout_seconds))


class Attachment:
    """A follower's hold on its leader, from one call to the next."""

    def __init__(self, leader: LocalPeer) -> None:
        self._leader = _LeadingProcess(leader)
        self._rank = 0  # until the leader says it
        self._descriptors: list[int] = []  # of the diagnostics file and the event
        self._finalizer = weakref.finalize(self, _hang_up, self._leader, self._descriptors)
        give_up_in_forks(self, "close")  # the leader must see when the script itself hangs up

    @property
    def is_open(self) -> bool:
        """Whether another call can be served."""
        return self._finalizer.alive

    def serve_call(self) -> bytes:
        """Wait for the leader's next call, and do what it says; returns what that returns.

        Raises:
            WorkerError: the leader has ended, or given up.
            BaseException: what the call raised; the leader is told.
        """
        assert self.is_open
        try:
            call = self._await_call()
            result = self._run(call)
            self._leader.send(Message(RETURN, result))
        except BaseException as error:
            with noting_on(error):
                self._leader.send_failure(error)
            with noting_on(error):
                self.close()
            raise
        return result

    def leader_loss(self) -> WorkerError | None:
        """Between calls: how the leader has ended, failed or given up; None while it is there."""
        return self._leader.loss()

    @property
    def has_leader_failed(self) -> bool:
        """Whether the leader itself has told of an error, as ``leader_loss`` has found."""
        return self._leader.has_told

    def check_answering(self, waited_seconds: float) -> None:
        """Raise a WorkerError if the leader was stopped, and has not gone on."""
        self._leader.check_answering(waited_seconds)

    def close(self) -> None:
        """Hang up: the leader is told nothing else, and its next call fails."""
        self._finalizer()

    def _await_call(self) -> Message:
        ready = Message(READY, str(os.getpid()).encode())
        self._leader.send(ready)
        while (message := self._leader.receive_idly()).kind != CALL:
            if message.kind == WELCOME:
                self._rank = int(message.payload)
                self._descriptors[:] = message.descriptors
            else:
                assert message.kind == PING, message.kind
                self._leader.send(ready)
        return message

    def _run(self, call: Message) -> bytes:
        target, path, directory, body = pickle.loads(call.payload)
        diagnostics, event = self._descriptors
        with (
            stacks_on_request(event, diagnostics),
            _search_path(path),
            _working_directory(directory),
        ):
            try:
                function = function_at(target)
            except BaseException:
                for descriptor in call.descriptors:
                    os.close(descriptor)
                raise
            return function(HelperContext(self._rank, self._leader), body, call.descriptors)


class _LeadingProcess(Leader):
    """The process that leads the host. This one outlives it, and raises."""

    def __init__(self, local_peer: LocalPeer) -> None:
        self._link = Link(local_peer.sock)
        self._peer = local_peer.peer
        self._standstill = StoppedProcessTimer()
        self._is_whole = True  # whether all that was begun to be sent has been sent
        self.has_told = False  # of an error of its own

    def send(self, message: Message) -> None:
        self._send(message, self.look_around)

    def receive(self) -> Message:
        return self._receive(self.look_around)

    def look_around(self, waited_seconds: float) -> None:
        """Raise WorkerError if the leader has ended or given up, or is stopped."""
        if (loss := self.loss()) is not None:
            raise loss
        self.check_answering(waited_seconds)

    def check_answering(self, waited_seconds: float) -> None:
        """Raise WorkerError if it was stopped, and has not gone on."""
        if self._standstill.is_over_limit(self._peer.pid, waited_seconds):
            raise WorkerError(
                f"Rank 0 of this host (process {self._peer.pid}) is stopped, as by SIGSTOP."
            )

    def loss(self) -> WorkerError | None:
        """Why the leader is not there any more; None while it is."""
        return self._loss() if self._link.is_cut else None

    def receive_idly(self) -> Message:
        """Wait for a message between calls."""
        return self._receive(Idleness(self.look_around))

    def send_failure(self, error: BaseException) -> None:
        """Tell what has failed here, if the leader can be told anything."""
        if self._is_whole:
            with suppress(OSError, WorkerError):
                self._send(Message(FAIL, pack_failure(error)), give_up)

    def close(self) -> None:
        """Hang up."""
        self._link.close()
        self._peer.close()

    def _send(self, message: Message, look_around: LookAround) -> None:
        self._is_whole = False
        try:
            self._link.send(message, look_around)
        except BrokenPipeError as error:
            raise self._loss() from error
        self._is_whole = True

    def _receive(self, look_around: LookAround) -> Message:
        try:
            message = self._link.receive(look_around)
        except EOFError as error:
            raise self._loss() from error
        if message.kind == FAIL:
            raise _trouble(message)
        return message

    def _loss(self) -> WorkerError:
        """Why the leader is not there any more: what it has said last, or what can be seen."""
        with suppress(EOFError):
            while (message := self._link.take_one()) is not None:
                for descriptor in message.descriptors:
                    os.close(descriptor)
                if message.kind == FAIL:
                    self.has_told = True
                    return _trouble(message)
        what = (
            "has ended: what it wrote, or its launcher, says why"
            if self._peer.is_ending()
            else "has given up this call: its own error says why"
        )
        return WorkerError(f"Rank 0 of this host (process {self._peer.pid}) {what}.")


def _trouble(message: Message) -> WorkerError:
    return failure_error("rank 0 of this host", unpack_failure(message.payload))


@contextmanager
def _search_path(path: Sequence[str]) -> Iterator[None]:
    """Within the block the leader's search path, by which it names modules."""
    own = list(sys.path)
    sys.path[:] = path
    importlib.invalidate_caches()  # the script may have written modules since the last call
    try:
        yield
    finally:
        sys.path[:] = own


@contextmanager
def _working_directory(directory: str | None) -> Iterator[None]:
    """Within the block the leader's working directory, by which it names files."""
    if directory is None or directory == working_directory():
        yield
        return
    own = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)  # it may have no name any more
    try:
        os.chdir(directory)
        yield
    finally:
        os.fchdir(own)
        os.close(own)


def _hang_up(leader: _LeadingProcess, descriptors: list[int]) -> None:
    leader.close()
    while descriptors:
        os.close(descriptors.pop())
