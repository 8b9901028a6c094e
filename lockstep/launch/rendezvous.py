"""The rendezvous: how the leading processes of all hosts find each other.

Host 0 listens where the launcher says, at the address of that one interface. The others call, again
and again: host 0 may start later, and its name may not be known yet. After the handshake each hands
in its card. Once all have come, and all cards go together, host 0 gives everybody all cards, and
stops listening.

Meanwhile whoever was let in is told whom the others wait for, so each can name the missing ones. A
host that goes away again before the circle is closed may come back.
"""

import errno
import ipaddress
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from lockstep.cluster.place import Address, Place
from lockstep.errors import HostError, Problems, problem
from lockstep.launch.circle import Card, Circle, name_of
from lockstep.launch.handshake import HANDSHAKE_SECONDS, Gate, HandshakeError, call, purpose_of
from lockstep.launch.link import LOOK_AROUND_SECONDS, LookAround, Stopwatch, wait_on
from lockstep.launch.secret import Secret
from lockstep.launch.sockets import listen, resolve
from lockstep.launch.wire import MOST_BYTES, Frame, Peer, Wire
from lockstep.units import first_few, format_seconds

_CARD = b"C"  # a host to host 0
_WAITING = b"W"  # host 0 to those who have come: the numbers of those who have not
_CARDS = b"A"  # host 0 to all: the circle is closed

_MOST_CARD_BYTES = 1 << 16
# A host that does not answer must not keep the next candidate waiting for long.
_CALL_SECONDS = HANDSHAKE_SECONDS / 2
_PAUSE_SECONDS = 0.2
_T = TypeVar("_T")

_NOBODY = -1  # a host that has not said which one it is


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    """What a host hands in: which one it is, and its card."""

    host: int
    num_hosts: int
    card: Card


class _OverError(Exception):
    """This host has waited for as long as it was to."""


@dataclass(frozen=True, kw_only=True)
class _Patience:
    """How long this host waits for the others, everything together."""

    watch: Stopwatch
    timeout_seconds: float
    look_around: LookAround

    def look(self, waited_seconds: float = 0.0) -> None:
        """Look around, whatever a single wait has taken.

        Raises:
            _OverError: all waits together took too long.
        """
        self.look_around(self.watch.tick())
        if self.watch.seconds > self.timeout_seconds:
            raise _OverError

    def pause(self) -> None:
        """Let others come."""
        watch = Stopwatch()
        while watch.tick() < _PAUSE_SECONDS:
            time.sleep(LOOK_AROUND_SECONDS)
            self.look()

    def __str__(self) -> str:
        return format_seconds(self.timeout_seconds)


def meet(
    place: Place,
    secret: Secret | None,
    card: Card,
    *,
    timeout_seconds: float,
    look_around: LookAround = wait_on,
) -> Circle:
    """Meet the other hosts of the job. Called by the process that leads its host.

    Args:
        place: what the launcher says.
        secret: what all hosts know; where there is one host, None will do.
        card: what this host says of itself.
        timeout_seconds: until all hosts must have come; looking up a name may take longer.
        look_around: called every 20 ms with the seconds waited so far; raises to give up.

    Raises:
        HostError: a host did not come, is not what this one is, or cannot be reached.
    """
    assert place.leads
    if place.num_hosts == 1:
        return Circle(host=0, cards=[card], star={}, secret=None)
    assert secret is not None
    patience = _Patience(
        watch=Stopwatch(), timeout_seconds=timeout_seconds, look_around=look_around
    )
    if place.host == 0:
        return _Reception(place, secret, card, patience).hold()
    return _Visit(place, secret, card, patience).pay()


def _purpose(place: Place) -> bytes:
    return purpose_of("rendezvous", place.job)


class _Reception:
    """Host 0's side.

    Attributes:
        entering: those who have proved that they are ours, and since when; no card yet.
        wires: of those who have handed in their card.
        cards: theirs, and host 0's.
    """

    def __init__(self, place: Place, secret: Secret, card: Card, patience: _Patience) -> None:
        self.place = place
        self.secret = secret
        self.patience = patience
        self.entering: dict[Wire, float] = {}
        self.wires: dict[int, Wire] = {}
        self.cards = {0: card}

    def hold(self) -> Circle:
        """Let everybody in, and close the circle."""
        listener = _listen(self.place, self.patience)
        gate = Gate(listener, self.secret, {_purpose(self.place)})
        try:
            while self.missing:
                self._go_on(gate)
            return self._close_circle()
        except BaseException as error:
            refusal = self._incomplete(gate) if isinstance(error, _OverError) else error
            self._dismiss(refusal)
            raise refusal from None
        finally:
            gate.close()

    @property
    def missing(self) -> list[int]:
        """The hosts that have not come."""
        return [host for host in range(self.place.num_hosts) if host not in self.cards]

    def _go_on(self, gate: Gate) -> None:
        for guest in gate.admit(LOOK_AROUND_SECONDS):
            peer = Peer(host=_NOBODY, name=_address_of(guest.socket))
            self.entering[Wire(guest.socket, peer, _MOST_CARD_BYTES)] = time.monotonic()
        before = self.missing
        self._forget_who_left()
        for wire, since in list(self.entering.items()):
            self._take_card(wire, since)
        if self.missing != before:
            for wire in self.wires.values():
                wire.send(_WAITING, msgspec.json.encode(self.missing), self.patience.look)
        if self.missing:
            self.patience.look()

    def _forget_who_left(self) -> None:
        for host, wire in list(self.wires.items()):
            if _has_gone(wire):
                wire.close()
                del self.wires[host], self.cards[host]

    def _take_card(self, wire: Wire, since: float) -> None:
        try:
            frame = wire.take_one()
        except HostError:  # gone before it said which one it is; it may come again
            self._turn_away(wire)
            return
        if frame is not None:
            self._enter(wire, frame)
        elif time.monotonic() - since > HANDSHAKE_SECONDS:
            self._turn_away(wire)

    def _turn_away(self, wire: Wire) -> None:
        del self.entering[wire]
        wire.close()

    def _enter(self, wire: Wire, frame: Frame) -> None:
        """Note who has come.

        Raises:
            HostError: it does not belong here; it is told, like all others.
        """
        try:
            entry = msgspec.json.decode(frame.payload, type=_Entry)
        except msgspec.DecodeError as error:
            raise HostError(f"A host at {wire.peer.name} sent what is no card: {error}.") from error
        if entry.host in self.wires and _has_gone(self.wires[entry.host]):
            self.wires.pop(entry.host).close()
            del self.cards[entry.host]
        self._check(entry, wire)
        del self.entering[wire]
        wire.peer = _peer(entry.host, entry.card, wire.peer.name)
        wire.most_bytes = MOST_BYTES
        self.wires[entry.host], self.cards[entry.host] = wire, entry.card

    def _check(self, entry: _Entry, wire: Wire) -> None:
        problems = Problems()
        name = f"{name_of(entry.host, entry.card)} at {wire.peer.name}"
        num_hosts = self.place.num_hosts
        if entry.num_hosts != num_hosts:
            problems.add(
                "All hosts must be told the same number of hosts.",
                received=f"{num_hosts} on host 0, {entry.num_hosts} on {name}",
                fix="Start all hosts with the same number.",
            )
        elif not 0 < entry.host < num_hosts:
            problems.add(
                f"Hosts other than host 0 must have numbers from 1 to {num_hosts - 1}.",
                received=name,
                fix="Start each host with a number of its own; host 0 is at the rendezvous.",
            )
        elif entry.host in self.wires:
            problems.add(
                f"Each process must lead a host of its own: two say that they are host "
                f"{entry.host}.",
                received=f"{self.wires[entry.host].peer} and {name}",
                fix="Start each host with a number of its own.",
            )
        difference = _difference(self.cards[0].facts, entry.card.facts, entry.host)
        if difference:
            problems.add(
                f"{name} must be what host 0 is.",
                received=difference,
                fix="Install the same versions, and start the same script, on every host.",
            )
        problems.raise_if_any(HostError)

    def _close_circle(self) -> Circle:
        cards = [self.cards[host] for host in range(self.place.num_hosts)]
        for wire in self.wires.values():
            wire.send(_CARDS, msgspec.json.encode(cards), self.patience.look)
        for wire in list(self.entering):
            self._turn_away(wire)
        return Circle(host=0, cards=cards, star=self.wires, secret=self.secret)

    def _dismiss(self, error: BaseException) -> None:
        """Tell all who are here why there will be no circle."""
        own = name_of(0, self.cards[0])
        text = str(error) if isinstance(error, HostError) else f"{own} gave up: {error!r}."
        for wire in [*self.wires.values(), *self.entering]:
            wire.fail(text)

    def _incomplete(self, gate: Gate) -> HostError:
        where = gate.address
        refused = f"; {gate.num_refused} connections were refused, the last of them from "
        local = ipaddress.ip_address(where[0]).is_loopback
        return HostError(
            problem(
                f"All {self.place.num_hosts} hosts must come to host 0 at "
                f"{Address(name=where[0], port=where[1])} within {self.patience}.",
                received=f"nothing from {_hosts(self.missing)}"
                + (refused + gate.last_refusal if gate.num_refused else ""),
                fix="See that each was started, with the same rendezvous, job and secret"
                + ("; only this machine can reach that address." if local else "."),
            )
        )


class _Visit:
    """The side of any other host."""

    def __init__(self, place: Place, secret: Secret, card: Card, patience: _Patience) -> None:
        self.place = place
        self.secret = secret
        self.card = card
        self.patience = patience
        self.answers: dict[str, str] = {}  # what came of the last call, by address
        self.missing: list[int] = []  # once this host was let in

    def pay(self) -> Circle:
        """Call until host 0 answers, and wait for the circle to close."""
        try:
            while True:
                for address in self.place.rendezvous:
                    circle = self._call_at(address)
                    if circle:
                        return circle
                self.patience.pause()
        except _OverError:
            raise self._in_vain() from None

    def _call_at(self, address: Address) -> Circle | None:
        try:
            found = resolve(address)
        except OSError as error:
            self.answers[str(address)] = _reason(error)
            return None
        for family, where in found:
            try:
                sock = call(
                    family,
                    where,
                    self.secret,
                    _purpose(self.place),
                    seconds=_CALL_SECONDS,
                    look_around=self.patience.look,
                )
            except (HandshakeError, OSError) as error:
                self.answers[str(address)] = _reason(error)
                continue
            circle = self._stay(Wire(sock, Peer(host=0, name=_address_of(sock))), str(address))
            if circle:
                return circle
        return None

    def _stay(self, wire: Wire, address: str) -> Circle | None:
        """Hand in the card, and wait for the others; None if host 0 goes away without a word.

        Raises:
            HostError: host 0 has said why there will be no circle.
        """
        entry = _Entry(host=self.place.host, num_hosts=self.place.num_hosts, card=self.card)
        try:
            wire.send(_CARD, msgspec.json.encode(entry), self.patience.look)
            while (frame := wire.receive(self.patience.look)).kind == _WAITING:
                self.missing = _decode(frame, list[int])
            cards = _decode(frame, list[Card])
        except HostError as error:
            wire.close()
            if wire.was_told:
                raise
            self.answers[address], self.missing = str(error), []
            return None
        except BaseException:
            wire.close()
            raise
        wire.peer = _peer(0, cards[0], wire.peer.name)
        return Circle(host=self.place.host, cards=cards, star={0: wire}, secret=self.secret)

    def _in_vain(self) -> HostError:
        if self.missing:
            return HostError(
                problem(
                    f"All {self.place.num_hosts} hosts must come to host 0 within {self.patience}.",
                    received=f"this is host {self.place.host}; nothing from {_hosts(self.missing)}",
                    fix="See that each was started, with the same rendezvous, job and secret.",
                )
            )
        listed = "; ".join(f"{address}: {answer}" for address, answer in self.answers.items())
        return HostError(
            problem(
                f"Host {self.place.host} must reach host 0 at the rendezvous within "
                f"{self.patience}.",
                received=listed or "no answer",
                fix="See that host 0 was started, with the same rendezvous, job and secret, and "
                "that no firewall is in the way.",
            )
        )


def _listen(place: Place, patience: _Patience) -> socket.socket:
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
                answers[str(address)] = _reason(error)
                may_pass |= isinstance(error, socket.gaierror) or error.errno == errno.EADDRINUSE
        try:
            if not may_pass:
                raise _OverError
            patience.pause()
        except _OverError:
            listed = "; ".join(f"{address}: {answer}" for address, answer in answers.items())
            raise HostError(
                problem(
                    "Host 0 must be able to listen at the rendezvous.",
                    received=listed,
                    fix="Give an address of host 0 that the other hosts can reach, and a port that "
                    "is free.",
                )
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


def _peer(host: int, card: Card, address: str) -> Peer:
    name = card.about.get("name")
    return Peer(host=host, name=address if name is None else f"{name}, {address}")


def _hosts(hosts: list[int]) -> str:
    return f"host{'s' if len(hosts) > 1 else ''} {first_few(hosts)}"


def _has_gone(wire: Wire) -> bool:
    try:
        return wire.take_one() is not None  # who talks out of turn is none of ours
    except HostError:
        return True


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _address_of(sock: socket.socket) -> str:
    """Of the other end."""
    try:
        return str(sock.getpeername()[0])
    except OSError:  # it has gone again
        return "an unknown address"


def _decode(frame: Frame, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(frame.payload, type=kind)
    except msgspec.DecodeError as error:
        raise HostError(f"Host 0 sent what has no place in a rendezvous: {error}.") from error
