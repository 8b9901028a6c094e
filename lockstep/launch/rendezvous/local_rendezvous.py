"""How the processes of one host, each started by a launcher, find the one that leads.

The leader listens on a Unix socket with an abstract name: it lies in no folder, goes with its
owner, and is seen in the own network namespace only. Anybody there can connect, or take the name
first. So the other end must run as the same user, which the kernel tells, and both prove that they
know the job's secret, if it has one, in the same handshake as hosts (``handshake``). The purpose of
a connection names the follower's number, and each number is admitted once.

What follows is not sealed: nobody can read or change what goes over a Unix socket but its owners,
and it carries descriptors.

Linux only.
"""

import errno
import hashlib
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.channel.polling import LOOK_AROUND_SECONDS, Stopwatch, has_hung_up, wait_on
from lockstep.cluster.place import Place
from lockstep.errors import WorkerError
from lockstep.launch.notices import Notice
from lockstep.launch.security.handshake import (
    NO_SECRET,
    OTHER_JOB,
    OTHER_PROTOCOL,
    OTHER_SECRET,
    Gate,
    HandshakeError,
    introduce,
    purpose_of,
)
from lockstep.launch.security.secret import Secret
from lockstep.launch.sockets import connect, listen
from lockstep.launch.workers.process_state import PeerProcess, pid_of
from lockstep.units import first_few

_HANDSHAKE_SECONDS = 5.0

# What a leader is told, or found, to be, however often a follower tries.
_FINAL = {
    OTHER_PROTOCOL: OTHER_PROTOCOL,
    OTHER_SECRET: "it has another secret, or this process has",
    NO_SECRET: NO_SECRET,
    OTHER_JOB: "it does not wait for process {number}: there is none, or another one has come",
}


@dataclass(frozen=True, kw_only=True)
class LocalPeer:
    """A connection to a process that has proved to be what it says.

    Attributes:
        sock: the connection.
        peer: the process at its other end.
    """

    sock: socket.socket
    peer: PeerProcess

    def close(self) -> None:
        """Hang up."""
        self.sock.close()
        self.peer.close()


def meet_followers(
    place: Place, secret: bytes | None, *, num_followers: int, timeout_seconds: float
) -> list[LocalPeer]:
    """Wait for processes 1 to ``num_followers`` of this host; returns them by number.

    Raises:
        WorkerError: some have not come in time; with their numbers.
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
    followers: dict[bytes, LocalPeer] = {}
    try:
        while gate.purposes:
            for admission in gate.admit(LOOK_AROUND_SECONDS):
                sock = admission.channel.socket
                followers[admission.purpose] = LocalPeer(sock=sock, peer=PeerProcess(sock))
            for purpose in [each for each in followers if has_hung_up(followers[each].sock)]:
                followers.pop(purpose).close()  # it gave up, and may come again
                gate.purposes.add(purpose)
            if gate.purposes:
                notice.look(watch.tick())
            if gate.purposes and watch.seconds > timeout_seconds:
                raise _incomplete(place, numbers, gate, timeout_seconds)
    except BaseException:
        for follower in followers.values():
            follower.close()
        raise
    finally:
        gate.close()
    return [followers[purpose] for purpose in numbers]


def meet_leader(place: Place, secret: bytes | None, *, timeout_seconds: float) -> LocalPeer:
    """Find process 0 of this host, however late.

    Raises:
        WorkerError: it has not come in time, or sends this process away.
    """
    _check_platform()
    watch, seen = Stopwatch(), "nobody there"
    while watch.tick() <= timeout_seconds:
        seconds = min(_HANDSHAKE_SECONDS, timeout_seconds)
        leader = ""
        try:
            sock = connect(socket.AF_UNIX, _name_of(place), seconds, wait_on)
            leader = f"process {pid_of(sock)}"
            introduce(
                sock,
                Secret(secret or b""),
                _purpose(place, place.process),
                seconds=seconds,
                look_around=wait_on,
            )
            return LocalPeer(sock=sock, peer=PeerProcess(sock))
        except HandshakeError as error:
            seen = f"{leader}: {error}"
            if str(error) in _FINAL:
                why = _FINAL[str(error)].format(number=place.process)
                raise _refused(place, f"{leader}: {why}") from error
        except OSError:  # nobody there, a full house, hung up
            pass
        time.sleep(LOOK_AROUND_SECONDS)
    raise WorkerError(
        f"Process {place.process} of this host, started by {place.launcher}, has waited "
        f"{timeout_seconds:.0f} s for process 0, which leads the host's processes.",
        received=seen,
        fix="All of them must run the same script, with the same secret, and call fit, "
        "evaluate and predict equally often.",
    )


def _listen(place: Place, watch: Stopwatch, timeout_seconds: float) -> socket.socket:
    """The leader's listener, as soon as the name is free: an earlier meeting may be about to end.

    Raises:
        WorkerError: it is not free in time.
    """
    while True:
        try:
            return listen(socket.AF_UNIX, _name_of(place))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        if watch.tick() > timeout_seconds:
            raise WorkerError(
                "The name by which the processes of this host find each other is taken.",
                received=f"job {place.job!r} on host {place.host}, "
                f"tried for {timeout_seconds:.0f} s",
                fix=f"Another process of this job leads the host, or {place.launcher} has "
                "started two jobs under one name.",
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
    refused = f"; {gate.num_refused} were turned away, the last: {gate.last_refusal}"
    return WorkerError(
        f"Of this host's processes, started by {place.launcher}, {len(missing)} did not come "
        f"to this call within {waited_seconds:.0f} s: process {first_few(missing)}.",
        received=f"{len(numbers) - len(missing)} of {len(numbers)} besides process 0"
        f"{refused if gate.num_refused else ''}",
        fix="All of them must run the same script, with the same secret, and call fit, "
        "evaluate and predict as often as process 0.",
    )


def _refused(place: Place, why: str) -> WorkerError:
    return WorkerError(
        "The process that leads this host's processes is not the one to work with.",
        received=why,
        fix=f"Check the variables that {place.launcher} sets, and that no two jobs have one name.",
    )


def _name_of(place: Place) -> bytes:
    """The abstract name (it begins with a zero byte): of this user's job, and of this host's."""
    told = (place.job, place.host, *map(str, place.rendezvous), os.geteuid())
    return b"\0lockstep-" + hashlib.sha256(repr(told).encode()).hexdigest().encode()


def _purpose(place: Place, number: int) -> bytes:
    return purpose_of("processes of a host", _name_of(place), number)


def _check_platform() -> None:
    if sys.platform != "linux":
        raise WorkerError(
            "Processes that a launcher started for one host can work together on Linux only.",
            received=sys.platform,
            fix="Start one process per host: it starts its helpers by itself.",
        )
