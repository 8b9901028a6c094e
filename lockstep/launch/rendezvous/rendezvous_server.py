"""Host 0's side of the rendezvous, and the messages of both sides.

A ``Deadline`` limits the sum of a host's waits for the others.
"""

import contextlib
import errno
import ipaddress
import math
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import msgspec

from lockstep.channel.polling import LOOK_AROUND_SECONDS, LookAround, Stopwatch
from lockstep.channel.sealed_channel import Channel
from lockstep.cluster.place import Address, Place
from lockstep.errors import HostError, Problems
from lockstep.formatting import first_few, format_seconds
from lockstep.launch.health.diagnostics import show
from lockstep.launch.notices import Notice
from lockstep.launch.rendezvous.control_group import ControlGroup, HostInfo, name_of
from lockstep.launch.rendezvous.framed_channel import MOST_BYTES, Frame, FramedChannel, RemotePeer
from lockstep.launch.security.handshake import HANDSHAKE_SECONDS, Gate, purpose_of
from lockstep.launch.security.secret import Secret
from lockstep.launch.sockets import listen, resolve
from lockstep.launch.untrusted import decode_untrusted

_PAUSE_SECONDS = 0.2


class DeadlineError(Exception):
    """A host's waits together have taken longer than its timeout."""


@dataclass(frozen=True, kw_only=True)
class Deadline:
    """The limit of the sum of this host's waits for the others.

    Attributes:
        watch: counts the seconds.
        timeout_seconds: the limit.
        look_around: called every 20 ms.
        patience_seconds: the limit if enough hosts have joined to start.
    """

    watch: Stopwatch
    timeout_seconds: float
    look_around: LookAround
    patience_seconds: float = math.inf

    def announced(self, describe: Callable[[], str]) -> "Deadline":
        """The same deadline, whose waits show a ``Notice``."""
        notice = Notice(describe)

        def look_around(waited_seconds: float) -> None:
            self.look_around(waited_seconds)
            notice.show_if_due(waited_seconds)

        return replace(self, look_around=look_around)

    def extended(self) -> "Deadline":
        """A deadline of twice the time from now on, for hosts that still need host 0's message."""
        return replace(self, watch=Stopwatch(), timeout_seconds=2 * self.timeout_seconds)

    def check(self, waited_seconds: float = 0.0) -> None:
        """Look around. The seconds of a single wait do not matter.

        Raises:
            DeadlineError: all waits together took too long.
        """
        self.look_around(self.watch.tick())
        if self.watch.seconds > self.timeout_seconds:
            raise DeadlineError

    def pause(self) -> None:
        """Wait a moment."""
        watch = Stopwatch()
        while watch.tick() < _PAUSE_SECONDS:
            time.sleep(LOOK_AROUND_SECONDS)
            self.check()

    def __str__(self) -> str:
        return format_seconds(self.timeout_seconds)


INFO = b"C"  # a host to host 0
WAITING = b"W"  # host 0 to the hosts that have joined: the numbers of the missing ones
INFOS = b"A"  # host 0 to all: the control group is complete, with its hosts' infos by number

_MOST_INFO_BYTES = 1 << 20
_UNKNOWN_HOST = -1  # has not sent its number yet


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A host's first message: its number and its host info."""

    host: int
    num_hosts: int
    min_hosts: int | None
    info: HostInfo

    @property
    def count(self) -> str:
        """The number of the job's hosts, for messages."""
        if self.min_hosts is None:
            return str(self.num_hosts)
        return f"{self.min_hosts} to {self.num_hosts}"


def make_entry(place: Place, info: HostInfo) -> Entry:
    """The first message of the host at this Place."""
    return Entry(host=place.host, num_hosts=place.num_hosts, min_hosts=place.min_hosts, info=info)


def needed_hosts(place: Place) -> str:
    """The hosts that must join, for messages."""
    if place.min_hosts is None:
        return f"All {place.num_hosts} hosts"
    return f"At least {place.min_hosts} of {place.num_hosts} hosts"


def awaited_hosts(where: object, missing: list[int], num_hosts: int) -> str:
    """The notice of a host while others are missing."""
    return f"Waiting at {where} for {len(missing)} of {num_hosts} hosts: {numbers_of(missing)}."


def purpose_of_meeting(place: Place) -> bytes:
    """The purpose of handshakes at a job's rendezvous."""
    return purpose_of("rendezvous", place.job)


class RendezvousServer:
    """Host 0's side.

    Attributes:
        where: the address at which host 0 listens; None until it does.
        refused: why it cannot listen yet, by address.
        unidentified: channels whose hosts have not sent their info, and their handshakes' times.
        channels: of the hosts that have sent their info.
        infos: theirs, and host 0's.
        left: the last host that joined and left again, for messages.
    """

    def __init__(self, place: Place, secret: Secret, info: HostInfo, deadline: Deadline) -> None:
        self.place = place
        self.secret = secret
        self.deadline = deadline.announced(self._describe)
        self.where: Address | None = None
        self.refused: dict[str, str] = {}
        self.unidentified: dict[FramedChannel, float] = {}
        self.channels: dict[int, FramedChannel] = {}
        self.infos = {0: info}
        self.left = ""

    def run(self) -> ControlGroup:
        """Admit the hosts, and complete the control group."""
        listener = _listen(self.place, self.deadline, self.refused)
        gate = Gate(listener, self.secret, {purpose_of_meeting(self.place)})
        self.where = Address(*gate.address[:2])
        try:
            self._admit_hosts(gate)
            return self._close_control_group()
        except BaseException as error:
            refusal = self._incomplete(gate) if isinstance(error, DeadlineError) else error
            self._send_failure(refusal)
            raise refusal from None
        finally:
            gate.close()

    def _describe(self) -> str:
        if self.where is None:
            return (
                f"Host 0 cannot listen at the rendezvous: {_listed(self.refused)}. It tries again "
                f"for {self.deadline}; if this stays so, name another rendezvous."
            )
        return awaited_hosts(self.where, self.missing, self.place.num_hosts)

    @property
    def missing(self) -> list[int]:
        """The hosts that have not joined."""
        return [host for host in range(self.place.num_hosts) if host not in self.infos]

    def _admit_hosts(self, gate: Gate) -> None:
        """Admit all hosts, or those that join in time if they are enough.

        Raises:
            DeadlineError: they are not enough.
        """
        deadline = self.deadline
        try:
            while self.missing:
                self._handle_arrivals(gate)
                if self._has_enough and deadline.watch.seconds > deadline.patience_seconds:
                    break
        except DeadlineError:
            if not self._has_enough:
                raise
        if self.missing:
            self._announce_partial_start()
            self.deadline = deadline.extended()

    @property
    def _has_enough(self) -> bool:
        """True if the hosts that have joined may start without the others."""
        least = self.place.min_hosts
        return least is not None and len(self.infos) >= least

    def _announce_partial_start(self) -> None:
        here = [name_of(host, self.infos[host]) for host in sorted(self.infos)]
        waited = min(self.deadline.timeout_seconds, self.deadline.patience_seconds)
        show(
            f"{len(here)} of {self.place.num_hosts} hosts start: {first_few(here)}. No connection "
            f"from {numbers_of(self.missing)} in {format_seconds(waited)}{self.left}.\n"
        )

    def _handle_arrivals(self, gate: Gate) -> None:
        for admission in gate.admit(LOOK_AROUND_SECONDS):
            peer = RemotePeer(host=_UNKNOWN_HOST, name=address_of(admission.channel))
            self.unidentified[FramedChannel(admission.channel, peer, _MOST_INFO_BYTES)] = (
                time.monotonic()
            )
        before = self.missing
        self._forget_closed()
        for channel, since in list(self.unidentified.items()):
            self._take_info(channel, since)
        if self.missing != before:
            self._send_missing()
        if self.missing:
            self.deadline.check()

    def _send_missing(self) -> None:
        for channel in self.channels.values():
            # A closed channel is removed in the next round.
            with contextlib.suppress(HostError):
                channel.send(WAITING, msgspec.json.encode(self.missing), self.deadline.check)

    def _forget_closed(self) -> None:
        for host, channel in list(self.channels.items()):
            if _has_left(channel):
                self._forget(host)

    def _forget(self, host: int) -> None:
        self.left = f"; {self.channels[host].peer} joined and left again"
        self.channels.pop(host).close()
        del self.infos[host]

    def _take_info(self, channel: FramedChannel, since: float) -> None:
        try:
            frame = channel.take_one()
        except HostError:
            if channel.was_tampered_with:
                raise
            self._close_unidentified(channel)  # closed before it sent its number; it may call again
            return
        if frame is not None:
            self._admit(channel, frame)
        elif time.monotonic() - since > HANDSHAKE_SECONDS:
            self._close_unidentified(channel)

    def _close_unidentified(self, channel: FramedChannel) -> None:
        del self.unidentified[channel]
        channel.close()

    def _admit(self, channel: FramedChannel, frame: Frame) -> None:
        """Note which host has joined.

        Raises:
            HostError: it does not fit the job. It gets this error, like all others.
        """
        entry = decode_untrusted(frame.payload, Entry, f"A host at {channel.peer.name}")
        if entry.host in self.channels and _has_left(self.channels[entry.host]):
            self._forget(entry.host)
        self._check(entry, channel)
        del self.unidentified[channel]
        channel.peer = peer_of(entry.host, entry.info, channel.peer.name)
        channel.most_bytes = MOST_BYTES
        self.channels[entry.host], self.infos[entry.host] = channel, entry.info

    def _check(self, entry: Entry, channel: FramedChannel) -> None:
        problems = Problems()
        name = f"{name_of(entry.host, entry.info)} at {channel.peer.name}"
        own, num_hosts = make_entry(self.place, self.infos[0]), self.place.num_hosts
        if entry.count != own.count:
            problems.add(
                "All hosts must be started with the same number of hosts.",
                received=f"{own.count} on host 0, {entry.count} on {name}",
                fix="Start all hosts with the same number.",
            )
        elif not 0 < entry.host < num_hosts:
            problems.add(
                f"Hosts other than host 0 must have numbers from 1 to {num_hosts - 1}.",
                received=name,
                fix="Start each host with another number; host 0 is at the rendezvous.",
            )
        elif entry.host in self.channels:
            problems.add(
                f"Only one process may lead host {entry.host}.",
                received=f"{self.channels[entry.host].peer} and {name}",
                fix="Start each host with another number.",
            )
        difference = _difference(self.infos[0].facts, entry.info.facts, entry.host)
        if difference:
            problems.add(
                f"{name} must have the same versions and script as host 0.",
                received=difference,
                fix="Install the same versions, and start the same script, on every host.",
            )
        problems.raise_if_any(HostError)

    def _close_control_group(self) -> ControlGroup:
        hosts = sorted(self.infos)
        infos = [self.infos[host] for host in hosts]
        payload = msgspec.json.encode([*zip(hosts, infos, strict=True)])
        for channel in self.channels.values():
            try:
                channel.send(INFOS, payload, self.deadline.check)
            except HostError as error:
                if not error.is_loss:
                    raise
                # Treat it as lost a moment later: the control group raises the loss, after which
                # the others may meet again.
        for channel in list(self.unidentified):
            self._close_unidentified(channel)
        star = {number: self.channels[host] for number, host in enumerate(hosts) if host}
        for number, channel in star.items():
            channel.peer = replace(channel.peer, host=number)
        return ControlGroup(host=0, infos=infos, star=star, secret=self.secret)

    def _send_failure(self, error: BaseException) -> None:
        """Send all connected hosts the reason why there will be no control group."""
        own = name_of(0, self.infos[0])
        text = str(error) if isinstance(error, HostError) else f"{own} gave up: {error!r}."
        for channel in [*self.channels.values(), *self.unidentified]:
            channel.fail(text)

    def _incomplete(self, gate: Gate) -> HostError:
        assert self.where is not None
        refused = f"; {gate.num_refused} connections were refused, the last: {gate.last_refusal}"
        only_here = "; only this machine can reach that address"
        return HostError(
            f"{needed_hosts(self.place)} must connect to host 0 at {self.where} within "
            f"{self.deadline}.",
            received=f"no connection from {numbers_of(self.missing)}{self.left}"
            f"{refused if gate.num_refused else ''}",
            fix="Check that each was started, with the same rendezvous, job and secret"
            f"{only_here if self.where.is_loopback else ''}.",
        )


def _listen(place: Place, deadline: Deadline, refused: dict[str, str]) -> socket.socket:
    """Host 0's listener, at the first address that is free; ``refused`` gets reasons, by address.

    Raises:
        HostError: none can become free, or none did in time.
    """
    while True:
        may_pass = False
        for address in place.rendezvous:
            try:
                return _listen_at(address)
            except OSError as error:
                refused[str(address)] = reason_of(error)
                may_pass |= isinstance(error, socket.gaierror) or error.errno == errno.EADDRINUSE
        try:
            if not may_pass:
                raise DeadlineError
            deadline.pause()
        except DeadlineError:
            raise HostError(
                "Host 0 must be able to listen at the rendezvous.",
                received=_listed(refused),
                fix="Give an address of host 0 that the other hosts can reach, and a free port.",
            ) from None


def _listen_at(address: Address) -> socket.socket:
    error: OSError | None = None
    for family, where in resolve(address):
        try:
            if ipaddress.ip_address(where[0]).is_unspecified:
                raise OSError(errno.EADDRNOTAVAIL, "it means all interfaces; name one")
            return listen(family, where)
        except OSError as reason:
            error = reason
    assert error is not None
    raise error


def _listed(refused: Mapping[str, str]) -> str:
    return "; ".join(f"{address}: {reason}" for address, reason in refused.items())


def _difference(own: Mapping[str, str], theirs: Mapping[str, str], host: int) -> str:
    """All facts that differ: "torch is 2.13.0 on host 0 and 2.11.0 on host 1"."""
    return "; ".join(
        f"{name} is {own.get(name, 'unknown')} on host 0 and {theirs.get(name, 'unknown')} on "
        f"host {host}"
        for name in {**own, **theirs}
        if own.get(name) != theirs.get(name)
    )


def _has_left(channel: FramedChannel) -> bool:
    """True if an admitted host has closed its connection. It may join again.

    Raises:
        HostError: the connection was tampered with, in either direction.
    """
    try:
        return channel.take_one() is not None  # a host of this job sends nothing now
    except HostError:
        if channel.was_tampered_with or channel.has_report:
            raise
        return True


def peer_of(host: int, info: HostInfo, address: str) -> RemotePeer:
    """A host for messages, with its name and address."""
    name = info.about.get("name")
    return RemotePeer(host=host, name=address if name is None else f"{name}, {address}")


def numbers_of(hosts: list[int]) -> str:
    """Hosts for messages: "hosts 1, 2"."""
    return f"host{'s' if len(hosts) > 1 else ''} {first_few(hosts)}"


def reason_of(error: Exception) -> str:
    """Why a call or a listener failed, without numbers of errors."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def address_of(channel: Channel) -> str:
    """The other end's address."""
    try:
        return str(channel.socket.getpeername()[0])
    except OSError:  # it is closed
        return "an unknown address"
