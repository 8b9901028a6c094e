"""Host 0's side of the rendezvous, and what both sides say there.

A ``Deadline`` is how long a host waits for the others, all its waits together.
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
from lockstep.launch.health.diagnostics import show
from lockstep.launch.notices import Notice
from lockstep.launch.rendezvous.control_group import ControlGroup, HostInfo, name_of
from lockstep.launch.rendezvous.framed_channel import MOST_BYTES, Frame, FramedChannel, RemotePeer
from lockstep.launch.security.handshake import HANDSHAKE_SECONDS, Gate, purpose_of
from lockstep.launch.security.secret import Secret
from lockstep.launch.sockets import listen, resolve
from lockstep.launch.untrusted import decode_untrusted
from lockstep.units import first_few, format_seconds

_PAUSE_SECONDS = 0.2


class DeadlineError(Exception):
    """This host has waited for as long as it was to."""


@dataclass(frozen=True, kw_only=True)
class Deadline:
    """How long this host waits for the others, everything together.

    Attributes:
        watch: counts the seconds.
        timeout_seconds: for so long at the most.
        look_around: called every 20 ms.
        patience_seconds: for so long where those that have come are enough to go on.
    """

    watch: Stopwatch
    timeout_seconds: float
    look_around: LookAround
    patience_seconds: float = math.inf

    def announced(self, describe: Callable[[], str]) -> "Deadline":
        """The same, of a host that says what it waits for (see ``Notice``)."""
        notice = Notice(describe)

        def look_around(waited_seconds: float) -> None:
            self.look_around(waited_seconds)
            notice.look(waited_seconds)

        return replace(self, look_around=look_around)

    def extended(self) -> "Deadline":
        """Twice the time from now on: for a host whose word another one waits for."""
        return replace(self, watch=Stopwatch(), timeout_seconds=2 * self.timeout_seconds)

    def look(self, waited_seconds: float = 0.0) -> None:
        """Look around, whatever a single wait has taken.

        Raises:
            DeadlineError: all waits together took too long.
        """
        self.look_around(self.watch.tick())
        if self.watch.seconds > self.timeout_seconds:
            raise DeadlineError

    def pause(self) -> None:
        """Let others come."""
        watch = Stopwatch()
        while watch.tick() < _PAUSE_SECONDS:
            time.sleep(LOOK_AROUND_SECONDS)
            self.look()

    def __str__(self) -> str:
        return format_seconds(self.timeout_seconds)


INFO = b"C"  # a host to host 0
WAITING = b"W"  # host 0 to those who have come: the numbers of those who have not
INFOS = b"A"  # host 0 to all: the control group is closed, with the infos of its hosts by number

_MOST_INFO_BYTES = 1 << 20
_NOBODY = -1  # a host that has not said which one it is


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """What a host sends first: which one it is, and its host info."""

    host: int
    num_hosts: int
    min_hosts: int | None
    info: HostInfo

    @property
    def count(self) -> str:
        """Of the job's hosts, for messages."""
        if self.min_hosts is None:
            return str(self.num_hosts)
        return f"{self.min_hosts} to {self.num_hosts}"


def entry_of(place: Place, info: HostInfo) -> Entry:
    """What a host sends of its Place."""
    return Entry(host=place.host, num_hosts=place.num_hosts, min_hosts=place.min_hosts, info=info)


def needed_hosts(place: Place) -> str:
    """Who must come, for messages."""
    if place.min_hosts is None:
        return f"All {place.num_hosts} hosts"
    return f"At least {place.min_hosts} of {place.num_hosts} hosts"


def awaited_hosts(where: object, missing: list[int], num_hosts: int) -> str:
    """What a host says while others have not come."""
    return f"Waiting at {where} for {len(missing)} of {num_hosts} hosts: {numbers_of(missing)}."


def purpose_of_meeting(place: Place) -> bytes:
    """What the handshakes of a job's rendezvous are for."""
    return purpose_of("rendezvous", place.job)


class RendezvousServer:
    """Host 0's side.

    Attributes:
        where: host 0 listens; None until it does.
        entering: those who have proved that they are ours, and since when; no info yet.
        channels: of the hosts that have sent their info.
        infos: theirs, and host 0's.
        left: who went away again, for messages.
    """

    def __init__(self, place: Place, secret: Secret, info: HostInfo, deadline: Deadline) -> None:
        self.place = place
        self.secret = secret
        self.deadline = deadline.announced(self._describe)
        self.where: Address | None = None
        self.entering: dict[FramedChannel, float] = {}
        self.channels: dict[int, FramedChannel] = {}
        self.infos = {0: info}
        self.left = ""

    def run(self) -> ControlGroup:
        """Let everybody in, and close the control group."""
        listener = _listen(self.place, self.deadline)
        gate = Gate(listener, self.secret, {purpose_of_meeting(self.place)})
        self.where = Address(*gate.address[:2])
        try:
            self._admit_hosts(gate)
            return self._close_control_group()
        except BaseException as error:
            refusal = self._incomplete(gate) if isinstance(error, DeadlineError) else error
            self._dismiss(refusal)
            raise refusal from None
        finally:
            gate.close()

    def _describe(self) -> str:
        if self.where is None:
            wanted = " or ".join(map(str, self.place.rendezvous))
            return f"Waiting until host 0 can listen at {wanted}."
        return awaited_hosts(self.where, self.missing, self.place.num_hosts)

    @property
    def missing(self) -> list[int]:
        """The hosts that have not come."""
        return [host for host in range(self.place.num_hosts) if host not in self.infos]

    def _admit_hosts(self, gate: Gate) -> None:
        """Let in all hosts, or those that come in time, where they are enough.

        Raises:
            DeadlineError: they are not.
        """
        deadline = self.deadline
        try:
            while self.missing:
                self._go_on(gate)
                if self._are_enough and deadline.watch.seconds > deadline.patience_seconds:
                    break
        except DeadlineError:
            if not self._are_enough:
                raise
        if self.missing:
            self._announce_fewer()
            self.deadline = deadline.extended()

    @property
    def _are_enough(self) -> bool:
        """Whether those that have come may go on without the others."""
        least = self.place.min_hosts
        return least is not None and len(self.infos) >= least

    def _announce_fewer(self) -> None:
        here = [name_of(host, self.infos[host]) for host in sorted(self.infos)]
        waited = min(self.deadline.timeout_seconds, self.deadline.patience_seconds)
        show(
            f"{len(here)} of {self.place.num_hosts} hosts go on: {first_few(here)}. Nothing has "
            f"come from {numbers_of(self.missing)} in {format_seconds(waited)}{self.left}.\n"
        )

    def _go_on(self, gate: Gate) -> None:
        for admission in gate.admit(LOOK_AROUND_SECONDS):
            peer = RemotePeer(host=_NOBODY, name=address_of(admission.channel))
            self.entering[FramedChannel(admission.channel, peer, _MOST_INFO_BYTES)] = (
                time.monotonic()
            )
        before = self.missing
        self._forget_who_left()
        for channel, since in list(self.entering.items()):
            self._take_info(channel, since)
        if self.missing != before:
            self._tell_missing()
        if self.missing:
            self.deadline.look()

    def _tell_missing(self) -> None:
        for channel in self.channels.values():
            # One that has gone is forgotten in the next round.
            with contextlib.suppress(HostError):
                channel.send(WAITING, msgspec.json.encode(self.missing), self.deadline.look)

    def _forget_who_left(self) -> None:
        for host, channel in list(self.channels.items()):
            if _has_gone(channel):
                self._forget(host)

    def _forget(self, host: int) -> None:
        self.left = f"; {self.channels[host].peer} came and left again"
        self.channels.pop(host).close()
        del self.infos[host]

    def _take_info(self, channel: FramedChannel, since: float) -> None:
        try:
            frame = channel.take_one()
        except HostError:
            if channel.was_tampered_with:
                raise
            self._turn_away(channel)  # gone before it said which one it is; it may come again
            return
        if frame is not None:
            self._enter(channel, frame)
        elif time.monotonic() - since > HANDSHAKE_SECONDS:
            self._turn_away(channel)

    def _turn_away(self, channel: FramedChannel) -> None:
        del self.entering[channel]
        channel.close()

    def _enter(self, channel: FramedChannel, frame: Frame) -> None:
        """Note which host has come.

        Raises:
            HostError: it does not belong here; it is told, like all others.
        """
        entry = decode_untrusted(frame.payload, Entry, f"A host at {channel.peer.name}")
        if entry.host in self.channels and _has_gone(self.channels[entry.host]):
            self._forget(entry.host)
        self._check(entry, channel)
        del self.entering[channel]
        channel.peer = peer_of(entry.host, entry.info, channel.peer.name)
        channel.most_bytes = MOST_BYTES
        self.channels[entry.host], self.infos[entry.host] = channel, entry.info

    def _check(self, entry: Entry, channel: FramedChannel) -> None:
        problems = Problems()
        name = f"{name_of(entry.host, entry.info)} at {channel.peer.name}"
        own, num_hosts = entry_of(self.place, self.infos[0]), self.place.num_hosts
        if entry.count != own.count:
            problems.add(
                "All hosts must be told the same number of hosts.",
                received=f"{own.count} on host 0, {entry.count} on {name}",
                fix="Start all hosts with the same number.",
            )
        elif not 0 < entry.host < num_hosts:
            problems.add(
                f"Hosts other than host 0 must have numbers from 1 to {num_hosts - 1}.",
                received=name,
                fix="Start each host with a number of its own; host 0 is at the rendezvous.",
            )
        elif entry.host in self.channels:
            problems.add(
                f"Each process must lead a host of its own: two say that they are host "
                f"{entry.host}.",
                received=f"{self.channels[entry.host].peer} and {name}",
                fix="Start each host with a number of its own.",
            )
        difference = _difference(self.infos[0].facts, entry.info.facts, entry.host)
        if difference:
            problems.add(
                f"{name} must be what host 0 is.",
                received=difference,
                fix="Install the same versions, and start the same script, on every host.",
            )
        problems.raise_if_any(HostError)

    def _close_control_group(self) -> ControlGroup:
        hosts = sorted(self.infos)
        infos = [self.infos[host] for host in hosts]
        told = msgspec.json.encode([*zip(hosts, infos, strict=True)])
        for channel in self.channels.values():
            try:
                channel.send(INFOS, told, self.deadline.look)
            except HostError as error:
                if not error.is_loss:
                    raise
                # As if it had gone a moment later: the others learn it in the control group, as the
                # loss that it is, and may meet again.
        for channel in list(self.entering):
            self._turn_away(channel)
        star = {number: self.channels[host] for number, host in enumerate(hosts) if host}
        for number, channel in star.items():
            channel.peer = replace(channel.peer, host=number)
        return ControlGroup(host=0, infos=infos, star=star, secret=self.secret)

    def _dismiss(self, error: BaseException) -> None:
        """Tell all who are here why there will be no control group."""
        own = name_of(0, self.infos[0])
        text = str(error) if isinstance(error, HostError) else f"{own} gave up: {error!r}."
        for channel in [*self.channels.values(), *self.entering]:
            channel.fail(text)

    def _incomplete(self, gate: Gate) -> HostError:
        assert self.where is not None
        refused = f"; {gate.num_refused} connections were refused, the last: {gate.last_refusal}"
        only_here = "; only this machine can reach that address"
        return HostError(
            f"{needed_hosts(self.place)} must come to host 0 at {self.where} within "
            f"{self.deadline}.",
            received=f"nothing from {numbers_of(self.missing)}{self.left}"
            f"{refused if gate.num_refused else ''}",
            fix="See that each was started, with the same rendezvous, job and secret"
            f"{only_here if self.where.is_loopback else ''}.",
        )


def _listen(place: Place, deadline: Deadline) -> socket.socket:
    """Host 0's listener, at the first address that is free.

    Raises:
        HostError: none will ever be, or none was in time.
    """
    while True:
        answers: dict[str, str] = {}
        may_pass = False
        for address in place.rendezvous:
            try:
                return _listen_at(address)
            except OSError as error:
                answers[str(address)] = reason_of(error)
                may_pass |= isinstance(error, socket.gaierror) or error.errno == errno.EADDRINUSE
        try:
            if not may_pass:
                raise DeadlineError
            deadline.pause()
        except DeadlineError:
            listed = "; ".join(f"{address}: {answer}" for address, answer in answers.items())
            raise HostError(
                "Host 0 must be able to listen at the rendezvous.",
                received=listed,
                fix="Give an address of host 0 that the other hosts can reach, and a port that "
                "is free.",
            ) from None


def _listen_at(address: Address) -> socket.socket:
    error: OSError | None = None
    for family, where in resolve(address):
        try:
            if ipaddress.ip_address(where[0]).is_unspecified:
                raise OSError(errno.EADDRNOTAVAIL, "it means every interface; name one")
            return listen(family, where)
        except OSError as reason:
            error = reason
    assert error is not None
    raise error


def _difference(own: Mapping[str, str], theirs: Mapping[str, str], host: int) -> str:
    """All facts that differ: "torch is 2.13.0 on host 0 and 2.11.0 on host 1"."""
    return "; ".join(
        f"{name} is {own.get(name, 'unknown')} on host 0 and {theirs.get(name, 'unknown')} on "
        f"host {host}"
        for name in {**own, **theirs}
        if own.get(name) != theirs.get(name)
    )


def _has_gone(channel: FramedChannel) -> bool:
    """Whether a host that was let in is there no more. It may come again.

    Raises:
        HostError: the connection was tampered with, in whichever direction.
    """
    try:
        return channel.take_one() is not None  # who talks out of turn is none of ours
    except HostError:
        if channel.was_tampered_with or channel.was_told:
            raise
        return True


def peer_of(host: int, info: HostInfo, address: str) -> RemotePeer:
    """A host for messages, with its name and where it is."""
    name = info.about.get("name")
    return RemotePeer(host=host, name=address if name is None else f"{name}, {address}")


def numbers_of(hosts: list[int]) -> str:
    """Hosts for messages: "hosts 1, 2"."""
    return f"host{'s' if len(hosts) > 1 else ''} {first_few(hosts)}"


def reason_of(error: Exception) -> str:
    """Why a call or a listener failed, without numbers of errors."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def address_of(channel: Channel) -> str:
    """Of the other end."""
    try:
        return str(channel.socket.getpeername()[0])
    except OSError:  # it has gone again
        return "an unknown address"
