"""A meeting: the processes of one host, each started by a launcher, find the one that leads.

The leader listens on a Unix socket with an abstract name: it lies in no folder, goes with its
owner, and is seen in the own network namespace only. Anybody there can connect, or take the name
first. So both ends ask the kernel whose process the other is, and both prove that they know the
job's secret, if it has one, before anything but bytes of fixed length is read::

    leader      →  greeting: version, nonce
    follower    →  hello:    nonce, number of the process, proof
    leader      →  verdict:  admitted or why not, proof

Whoever is no follower of this host is sent away, and disturbs nobody else.

Linux only.
"""

import errno
import hashlib
import hmac
import os
import secrets
import socket
import struct
import sys
import time
from collections import Counter
from dataclasses import dataclass

from lockstep.cluster.place import Place
from lockstep.errors import WorkerError, problem
from lockstep.launch.link import LOOK_AROUND_SECONDS, Stopwatch, has_hung_up, is_readable
from lockstep.launch.peer import Peer
from lockstep.units import first_few

_GREETING = struct.Struct("<16s32s")  # version, nonce
_HELLO = struct.Struct("<32sI32s")  # nonce, number, proof
_VERDICT = struct.Struct("<c32s")  # verdict, proof
_VERSION = b"lockstep-host-1\0"
_NONCE_BYTES = 32

_ADMITTED, _TAKEN, _UNKNOWN, _STRANGER = b"A", b"T", b"U", b"S"

# Most time that a connection may take to say who it is, and most such connections at a time.
_HELLO_SECONDS = 5.0
_MOST_GUESTS = 64


@dataclass(frozen=True, kw_only=True)
class Attendee:
    """A connection to a process that has proved to be what it says.

    Attributes:
        sock: the connection.
        peer: the process at its other end.
    """

    sock: socket.socket
    peer: Peer

    def close(self) -> None:
        """Hang up."""
        self.sock.close()
        self.peer.close()


def meet_followers(
    place: Place, secret: bytes | None, *, num_followers: int, timeout_seconds: float
) -> list[Attendee]:
    """Wait for processes 1 to ``num_followers`` of this host; returns them by number.

    Raises:
        WorkerError: some have not come in time; with their numbers.
    """
    _check_platform()
    rendezvous_server = _RendezvousServer(place, secret, num_followers)
    watch = Stopwatch()
    try:
        while not rendezvous_server.is_complete:
            rendezvous_server.open()
            rendezvous_server.receive_guests()
            if watch.tick() > timeout_seconds:
                raise rendezvous_server.describe_absence(timeout_seconds)
        return rendezvous_server.take_followers()
    finally:
        rendezvous_server.close()


def meet_leader(place: Place, secret: bytes | None, *, timeout_seconds: float) -> Attendee:
    """Find process 0 of this host, be it late.

    Raises:
        WorkerError: it has not come in time, or sends this process away.
    """
    _check_platform()
    caller = _Caller(place, secret, timeout_seconds)
    while True:
        if (leader := caller.call()) is not None:
            return leader
        time.sleep(LOOK_AROUND_SECONDS)


# --- the leader's side ---------------------------------------------------------------------------


class _Guest:
    """A connection that has not said yet who it is."""

    def __init__(self, sock: socket.socket, peer: Peer) -> None:
        self.attendee = Attendee(sock=sock, peer=peer)
        self.nonce = secrets.token_bytes(_NONCE_BYTES)
        self.watch = Stopwatch()
        self._heard = b""
        sock.setblocking(False)
        sock.send(_GREETING.pack(_VERSION, self.nonce))  # there is room: it is the first

    def hear(self) -> bytes | None:
        """Its whole hello, once that is there.

        Raises:
            OSError: there will be none.
        """
        try:
            more = self.attendee.sock.recv(_HELLO.size - len(self._heard))
        except BlockingIOError:
            more = None
        if more == b"" or (more is None and self.watch.tick() > _HELLO_SECONDS):
            raise ConnectionError("that did not say who they are")
        self._heard += more or b""
        return self._heard if len(self._heard) == _HELLO.size else None


class _RendezvousServer:
    """Where followers come in, and others are sent away."""

    def __init__(self, place: Place, secret: bytes | None, num_followers: int) -> None:
        self._place = place
        self._key = secret or b""
        self._numbers = range(1, num_followers + 1)
        self._listener: socket.socket | None = None
        self._guests: list[_Guest] = []
        self._followers: dict[int, Attendee] = {}
        self._refused: Counter[str] = Counter()

    @property
    def is_complete(self) -> bool:
        """Whether all have come."""
        return len(self._followers) == len(self._numbers)

    def open(self) -> None:
        """Listen, as soon as the name is free: an earlier meeting may be about to end."""
        if self._listener is not None:
            return
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(_name_of(self._place))
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                raise
            return
        listener.setblocking(False)
        listener.listen()
        self._listener = listener

    def receive_guests(self) -> None:
        """Hear whoever is there, or wait a moment."""
        if self._listener is None:
            time.sleep(LOOK_AROUND_SECONDS)
            return
        is_full = len(self._guests) >= _MOST_GUESTS
        doors = [] if is_full else [self._listener]
        is_readable([*doors, *(guest.attendee.sock for guest in self._guests)])
        if not is_full:
            self._let_in(self._listener)
        for guest in list(self._guests):
            self._hear(guest)

    def take_followers(self) -> list[Attendee]:
        """The followers, which are the caller's now."""
        followers, self._followers = self._followers, {}
        return [followers[number] for number in self._numbers]

    def describe_absence(self, waited_seconds: float) -> WorkerError:
        """The error for a meeting that is not complete."""
        launcher = self._place.launcher
        if self._listener is None:
            return WorkerError(
                problem(
                    "The name by which the processes of this host find each other is taken.",
                    received=f"job {self._place.job!r} on host {self._place.host}, "
                    f"tried for {waited_seconds:.0f} s",
                    fix=f"Another process of this job leads the host, or {launcher} has started "
                    "two jobs under one name.",
                )
            )
        missing = [str(number) for number in self._numbers if number not in self._followers]
        turned = "".join(f"; turned away: {n} {reason}" for reason, n in self._refused.items())
        return WorkerError(
            problem(
                f"Of this host's processes, started by {launcher}, {len(missing)} did not come to "
                f"this call within {waited_seconds:.0f} s: process {first_few(missing)}.",
                received=f"{len(self._followers)} of {len(self._numbers)} besides process 0"
                f"{turned}",
                fix="All of them must run the same script, with the same secret, and call fit, "
                "evaluate and predict as often as process 0.",
            )
        )

    def close(self) -> None:
        """Hang up on all that were not taken."""
        for each in (*(guest.attendee for guest in self._guests), *self._followers.values()):
            each.close()
        if self._listener is not None:
            self._listener.close()

    def _let_in(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        peer = Peer(sock)
        try:
            if not peer.is_same_user:
                raise PermissionError("of another user")
            self._guests.append(_Guest(sock, peer))
        except OSError as error:
            self._refused[str(error)] += 1
            sock.close()
            peer.close()

    def _hear(self, guest: _Guest) -> None:
        number, verdict = 0, b""
        try:
            if (hello := guest.hear()) is None:
                return
            number, verdict = self._judge(guest, hello)
            proof = _proof(self._key, b"leader" + verdict, guest.nonce, hello)
            guest.attendee.sock.send(_VERDICT.pack(verdict, proof))
        except OSError as error:
            verdict = b""
            self._refused[str(error)] += 1
        self._guests.remove(guest)
        if verdict == _ADMITTED:
            self._followers[number] = guest.attendee
        else:
            guest.attendee.close()

    def _judge(self, guest: _Guest, hello: bytes) -> tuple[int, bytes]:
        """The number that a guest says it has, and what becomes of it."""
        nonce, number, proof = _HELLO.unpack(hello)
        expected = _proof(self._key, b"follower", guest.nonce, nonce, _number_bytes(number))
        if not hmac.compare_digest(proof, expected):
            self._refused["with another secret"] += 1
            return 0, _STRANGER
        if number not in self._numbers:
            self._refused[f"as process {number}"] += 1
            return number, _UNKNOWN
        former = self._followers.get(number)
        if former is not None and not has_hung_up(former.sock):
            self._refused[f"as another process {number}"] += 1
            return number, _TAKEN
        if former is not None:
            self._followers.pop(number).close()  # it gave up, and has come again
        return number, _ADMITTED


# --- a follower's side ---------------------------------------------------------------------------


class _Caller:
    """A follower on its way to the leader."""

    def __init__(self, place: Place, secret: bytes | None, timeout_seconds: float) -> None:
        self._place = place
        self._key = secret or b""
        self._timeout = timeout_seconds
        self._watch = Stopwatch()
        self._seen = "nobody there"

    def call(self) -> Attendee | None:
        """Try once; None where it may be worth another try.

        Raises:
            WorkerError: it is not, or time is up.
        """
        self._check_time()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        peer = None
        try:
            sock.setblocking(False)
            sock.connect(_name_of(self._place))
            peer = Peer(sock)
            self._introduce(sock, peer)
        except BaseException as error:
            sock.close()
            if peer is not None:
                peer.close()
            if isinstance(error, OSError):  # nobody there, a full house, hung up
                return None
            raise
        return Attendee(sock=sock, peer=peer)

    def _introduce(self, sock: socket.socket, peer: Peer) -> None:
        if not peer.is_same_user:
            self._seen = f"process {peer.pid} of another user there"
            raise PermissionError(self._seen)
        self._seen = f"process {peer.pid} there, which does not answer"
        version, challenge = _GREETING.unpack(self._read(sock, _GREETING.size))
        if version != _VERSION:
            raise self._refused(f"process {peer.pid} speaks as {version!r}, not {_VERSION!r}")
        nonce = secrets.token_bytes(_NONCE_BYTES)
        number = self._place.process
        proof = _proof(self._key, b"follower", challenge, nonce, _number_bytes(number))
        hello = _HELLO.pack(nonce, number, proof)
        sock.send(hello)
        verdict, answer = _VERDICT.unpack(self._read(sock, _VERDICT.size))
        self._heed(verdict, answer, _proof(self._key, b"leader" + verdict, challenge, hello), peer)

    def _heed(self, verdict: bytes, proof: bytes, expected: bytes, peer: Peer) -> None:
        number = self._place.process
        if verdict == _STRANGER or not hmac.compare_digest(proof, expected):
            raise self._refused(f"process {peer.pid} has another secret, or this one has")
        if verdict == _TAKEN:
            raise self._refused(f"process {peer.pid} has another process {number} already")
        if verdict == _UNKNOWN:
            raise self._refused(f"process {peer.pid} expects no process {number} on this host")

    def _read(self, sock: socket.socket, num_bytes: int) -> bytes:
        heard = b""
        while len(heard) < num_bytes:
            self._check_time()
            if is_readable([sock]):
                more = sock.recv(num_bytes - len(heard))
                if not more:
                    raise ConnectionError("hung up")
                heard += more
        return heard

    def _check_time(self) -> None:
        if self._watch.tick() > self._timeout:
            raise WorkerError(
                problem(
                    f"Process {self._place.process} of this host, started by "
                    f"{self._place.launcher}, has waited {self._timeout:.0f} s for process 0, "
                    "which leads the host's processes.",
                    received=self._seen,
                    fix="All of them must run the same script, with the same secret, and call fit, "
                    "evaluate and predict equally often.",
                )
            )

    def _refused(self, why: str) -> WorkerError:
        return WorkerError(
            problem(
                "The process that leads this host's processes is not the one to work with.",
                received=why,
                fix=f"Check the variables that {self._place.launcher} sets, and that no two jobs "
                "have one name.",
            )
        )


# --- both ----------------------------------------------------------------------------------------


def _name_of(place: Place) -> bytes:
    """The abstract name (it begins with a zero byte): of this user's job, and of this host's."""
    told = (place.job, place.host, *map(str, place.rendezvous), os.geteuid())
    return b"\0lockstep-" + hashlib.sha256(repr(told).encode()).hexdigest().encode()


def _number_bytes(number: int) -> bytes:
    return number.to_bytes(4, "little")


def _proof(key: bytes, label: bytes, *parts: bytes) -> bytes:
    """That its sender knows the key. The parts' lengths are fixed, so they cannot be shifted."""
    return hmac.digest(key, _VERSION + label + b"".join(parts), "sha256")


def _check_platform() -> None:
    if sys.platform != "linux":
        raise WorkerError(
            problem(
                "Processes that a launcher started for one host can work together on Linux only.",
                received=sys.platform,
                fix="Start one process per host: it starts its helpers by itself.",
            )
        )
