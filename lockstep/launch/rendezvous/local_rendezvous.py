"""How the processes of one host, each started by a launcher, find the process that leads them.

The leader listens on a Unix socket with an abstract name: it has no file, ends with its owner, and
exists in one network namespace only. Every process there can connect, or take the name first. So
the other end must run as the same user, as the kernel says, and both prove that they know the job's
secret, if it has one, in the same handshake as hosts (``handshake``). The purpose of a connection
contains the follower's number, and each number is admitted once.

The connection is not sealed: only its owners can read or change what goes over a Unix socket, and
it carries descriptors.

Linux only.
"""

import errno
import hashlib
import os
import socket
import sys
import time
from collections.abc import Mapping

from lockstep.channel.polling import LOOK_AROUND_SECONDS, Stopwatch, has_hung_up, wait_on
from lockstep.cluster.place import Place
from lockstep.errors import WorkerError
from lockstep.formatting import first_few
from lockstep.launch.notices import Notice
from lockstep.launch.security.handshake import (
    NO_SECRET,
    OTHER_JOB,
    OTHER_PROTOCOL,
    OTHER_SECRET,
    Gate,
    HandshakeError,
    call,
    purpose_of,
)
from lockstep.launch.security.secret import Secret
from lockstep.launch.sockets import listen
from lockstep.launch.workers.process_state import PeerProcess

_HANDSHAKE_SECONDS = 5.0

# Refusals that do not change if a follower tries again, and their messages.
_FINAL = {
    OTHER_PROTOCOL: OTHER_PROTOCOL,
    OTHER_SECRET: "it has another secret than this process",
    NO_SECRET: NO_SECRET,
    OTHER_JOB: "it expects no process {number}, or another one has connected as that",
}


def meet_followers(
    place: Place, secret: bytes | None, *, num_followers: int, timeout_seconds: float
) -> list[PeerProcess]:
    """Wait for processes 1 to ``num_followers`` of this host; returns them by number.

    Raises:
        WorkerError: some did not connect in time; with their numbers.
    """
    _check_platform()
    numbers = {_purpose(place, number): number for number in range(1, num_followers + 1)}
    watch, notice = Stopwatch(), Notice(lambda: _awaited(place, numbers, gate))
    gate = Gate(
        _listen(place, watch, timeout_seconds),
        Secret(secret or b""),
        numbers,
        once=True,
        seconds=_HANDSHAKE_SECONDS,
    )
    followers: dict[bytes, PeerProcess] = {}
    try:
        while gate.purposes:
            for admission in gate.admit(LOOK_AROUND_SECONDS):
                followers[admission.purpose] = PeerProcess(admission.channel.socket)
            for purpose in [each for each in followers if has_hung_up(followers[each].sock)]:
                followers.pop(purpose).close()  # it gave up, and may connect again
                gate.purposes.add(purpose)
            if gate.purposes:
                notice.show_if_due(watch.tick())
            if gate.purposes and watch.seconds > timeout_seconds:
                raise _incomplete(place, numbers, gate, timeout_seconds)
    except BaseException:
        for follower in followers.values():
            follower.close()
        raise
    finally:
        gate.close()
    return [followers[purpose] for purpose in numbers]


def meet_leader(place: Place, secret: bytes | None, *, timeout_seconds: float) -> PeerProcess:
    """Connect to process 0 of this host, which may start later.

    Raises:
        WorkerError: it did not listen in time, or refuses this process.
    """
    _check_platform()
    watch, last_answer = Stopwatch(), "no process listens"
    while watch.tick() <= timeout_seconds:
        try:
            channel = call(
                socket.AF_UNIX,
                _name_of(place),
                Secret(secret or b""),
                _purpose(place, place.process),
                seconds=min(_HANDSHAKE_SECONDS, timeout_seconds),
                look_around=wait_on,
            )
            return PeerProcess(channel.socket)
        except HandshakeError as error:
            last_answer = f"{error.peer}: {error}"
            if str(error) in _FINAL:
                why = _FINAL[str(error)].format(number=place.process)
                raise _refused(place, f"{error.peer}: {why}") from error
        except OSError:  # no listener yet, its queue is full, or it closed the connection
            pass
        time.sleep(LOOK_AROUND_SECONDS)
    raise WorkerError(
        f"Process {place.process} of this host, started by {place.launcher}, has waited "
        f"{timeout_seconds:.0f} s for process 0, which leads the host's processes.",
        received=last_answer,
        fix="All processes must run the same script, with the same secret, and call fit, evaluate "
        "and predict equally often.",
    )


def _listen(place: Place, watch: Stopwatch, timeout_seconds: float) -> socket.socket:
    """The leader's listener, when the name is free: an earlier listener may be about to close.

    Raises:
        WorkerError: it did not become free in time.
    """
    while True:
        try:
            return listen(socket.AF_UNIX, _name_of(place))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        if watch.tick() > timeout_seconds:
            raise WorkerError(
                "The socket name for this host's processes must be free.",
                received=f"job {place.job!r} on host {place.host}: in use for "
                f"{timeout_seconds:.0f} s",
                fix=f"Check that no other process of this job leads the host, and that "
                f"{place.launcher} has not started two jobs under one name.",
            )
        time.sleep(LOOK_AROUND_SECONDS)


def _missing(numbers: Mapping[bytes, int], gate: Gate) -> list[str]:
    return [str(number) for purpose, number in numbers.items() if purpose in gate.purposes]


def _awaited(place: Place, numbers: Mapping[bytes, int], gate: Gate) -> str:
    missing = _missing(numbers, gate)
    return (
        f"Waiting for {len(missing)} of {len(numbers) + 1} processes of this host, started by "
        f"{place.launcher}: process {first_few(missing)}."
    )


def _incomplete(
    place: Place, numbers: Mapping[bytes, int], gate: Gate, waited_seconds: float
) -> WorkerError:
    missing = _missing(numbers, gate)
    refused = f"; {gate.num_refused} were refused, the last: {gate.last_refusal}"
    return WorkerError(
        f"{len(missing)} of this host's processes, started by {place.launcher}, did not take part "
        f"in this call within {waited_seconds:.0f} s: process {first_few(missing)}.",
        received=f"{len(numbers) - len(missing)} of {len(numbers)} besides process 0"
        f"{refused if gate.num_refused else ''}",
        fix="All processes must run the same script, with the same secret, and call fit, evaluate "
        "and predict as often as process 0.",
    )


def _refused(place: Place, why: str) -> WorkerError:
    return WorkerError(
        "The process that leads this host must belong to the same job as this process.",
        received=why,
        fix=f"Check the variables that {place.launcher} sets, and that no two jobs have one name.",
    )


def _name_of(place: Place) -> bytes:
    """The socket's abstract name (a zero byte first), for this user, job and host."""
    identity = (place.job, place.host, *map(str, place.rendezvous), os.geteuid())
    return b"\0lockstep-" + hashlib.sha256(repr(identity).encode()).hexdigest().encode()


def _purpose(place: Place, number: int) -> bytes:
    return purpose_of("processes of a host", _name_of(place), number)


def _check_platform() -> None:
    if sys.platform != "linux":
        raise WorkerError(
            "Several processes of one host that a launcher started can train together only on "
            "Linux.",
            received=sys.platform,
            fix="Start one process per host, which starts its helpers itself.",
        )
