"""The control group of hosts: what their leading processes tell each other besides tensors.

A star of channels: host 0 has one to each of the others, so two hosts hear of each other through
host 0. All hosts call the same things in the same order, with bytes that mean something to the
caller.

Whoever waits here, or only looks, learns that another host has failed, with its name: host 0 passes
on what it hears to all the others. A host that ends because of an error of its own calls ``fail``,
one that is done calls ``close``; where neither comes, as after a kill, the host counts as gone.

Meant for what is small or rare: tensors take channels of their own
(``launch.rendezvous.pair_channels``).
"""

import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from lockstep.channel.polling import LookAround, Stopwatch, is_readable, wait_on
from lockstep.errors import HostError
from lockstep.launch.health.heartbeats import Heartbeats
from lockstep.launch.rendezvous.framed_channel import Frame, FramedChannel
from lockstep.launch.security.secret import Secret
from lockstep.units import first_few

_EXCHANGE = b"E"
_BROADCAST = b"B"
_GATHER = b"G"
_CALLS = {_EXCHANGE: "exchange", _BROADCAST: "broadcast", _GATHER: "gather"}

_SHOWN_CHARACTERS = 200


@dataclass(frozen=True, kw_only=True)
class HostInfo:
    """What a host says of itself when hosts meet.

    Attributes:
        facts: must be the same on all hosts: versions, what is to be trained.
        about: may differ: the host's name ("name"), its number of devices.
    """

    facts: Mapping[str, str]
    about: Mapping[str, str | int]


class ControlGroup:
    """The hosts of a job, seen from one of them.

    Args:
        host: the number of this one.
        infos: of all hosts.
        star: on host 0 the channels to all others, on the others that to host 0.
        secret: what they know each other by.

    Attributes:
        host: the number of this host.
        num_hosts: how many there are.
        infos: what each host says of itself, by host.
        awaited: the hosts that this one waits to hear from now.
        has_told: this host has told the others of a failure, and they of none any more.
        heartbeats: which say whether the others are stopped; None where nobody waits for long.
    """

    def __init__(
        self,
        *,
        host: int,
        infos: Sequence[HostInfo],
        star: Mapping[int, FramedChannel],
        secret: Secret | None,
    ) -> None:
        self.host = host
        self.infos = list(infos)
        self.num_hosts = len(self.infos)
        self._star = dict(star)
        self.secret = secret
        self.has_told = False
        self.heartbeats: Heartbeats | None = None
        self.awaited: tuple[int, ...] = ()

    def exchange(
        self, payload: bytes, look_around: LookAround = wait_on, *, among: int | None = None
    ) -> list[bytes]:
        """Everybody's bytes by host, on every host.

        Args:
            payload: this host's.
            look_around: called while waiting.
            among: so many of the first hosts only, who alone call this; None is all.

        Raises:
            HostError: another host failed, left, is gone, or calls something else; so everywhere.
        """
        members = range(self.num_hosts if among is None else among)
        with self.telling_others():
            if self.host == 0:
                return self._exchange_for_all(payload, look_around, members)
            self._send(0, _EXCHANGE, payload, look_around)
            return [
                payload if host == self.host else self._receive(_EXCHANGE, look_around)
                for host in members
            ]

    def broadcast(self, payload: bytes | None = None, look_around: LookAround = wait_on) -> bytes:
        """Host 0's bytes, on every host; the others give None.

        Raises:
            HostError: as of ``exchange``.
        """
        with self.telling_others():
            if self.host != 0:
                return self._receive(_BROADCAST, look_around)
            assert payload is not None
            for to in self._star:
                self._send(to, _BROADCAST, payload, look_around)
            return payload

    def gather(self, payload: bytes, look_around: LookAround = wait_on) -> list[bytes]:
        """Everybody's bytes by host on host 0; nothing on the others, which do not wait.

        Raises:
            HostError: as of ``exchange``.
        """
        with self.telling_others():
            if self.host != 0:
                self._send(0, _GATHER, payload, look_around)
                return []
            return self._collect(_GATHER, payload, look_around, range(self.num_hosts))

    def check(self, name: str, value: str, look_around: LookAround = wait_on) -> None:
        """See that all hosts have the same value of something.

        Args:
            name: what it is, for the message: "the Plan".
            value: this host's.
            look_around: called while waiting.

        Raises:
            HostError: they have not; on all hosts.
        """
        said = msgspec.json.encode((name, value))
        answers = [_decode_check(part) for part in self.exchange(said, look_around)]
        groups: dict[tuple[str, str], list[str]] = {}
        for host, answer in enumerate(answers):
            groups.setdefault(answer, []).append(self.name_of(host))
        if len(groups) > 1:
            listed = [f"{_shown(each, answers)} on {first_few(groups[each])}" for each in groups]
            raise HostError(
                f"{name} must be the same on all hosts.",
                received="; ".join(listed),
                fix="Run the same script with the same options, data and seed on every host.",
            )

    def look_around(self, waited_seconds: float = 0.0) -> None:
        """See whether the other hosts are still there. Does not wait, and takes no message.

        Raises:
            HostError: one has failed, is gone, or is stopped.
        """
        with self.telling_others():
            for channel in self._star.values():
                channel.look()
            if self.heartbeats is not None:
                self.heartbeats.look(self.name_of)

    @property
    def interface(self) -> tuple[socket.AddressFamily, str]:
        """The family and address of this host where the control group meets it."""
        return next(iter(self._star.values())).own_address

    def name_of(self, host: int) -> str:
        """A host for messages: "Host 1 (node-b)"."""
        return name_of(host, self.infos[host])

    def fail(self, text: str, error: BaseException | None = None) -> None:
        """Tell the others that this host has failed, and why; then close."""
        self._tell(f"{self.name_of(self.host)} failed: {text}", error)
        self.close()

    def close(self) -> None:
        """Leave: the others see that this host is done, not that it is gone."""
        if self.heartbeats is not None:
            self.heartbeats.close()
        for channel in self._star.values():
            channel.close()

    def _send(self, to: int, kind: bytes, payload: bytes, look_around: LookAround) -> None:
        with self._awaiting([to]):
            self._star[to].send(kind, payload, self._watching(look_around))

    def _receive(self, kind: bytes, look_around: LookAround) -> bytes:
        channel = self._star[0]
        with self._awaiting([0]):
            return self._expected(kind, channel.receive(self._watching(look_around)), channel)

    def _exchange_for_all(
        self, payload: bytes, look_around: LookAround, members: range
    ) -> list[bytes]:
        parts = self._collect(_EXCHANGE, payload, look_around, members)
        for to in members[1:]:
            for host, part in enumerate(parts):
                if host != to:
                    self._send(to, _EXCHANGE, part, look_around)
        return parts

    def _collect(
        self, kind: bytes, payload: bytes, look_around: LookAround, members: range
    ) -> list[bytes]:
        """The members' bytes by host, on host 0, in whatever order they come."""
        watch, look = Stopwatch(), self._watching(look_around)
        found = {0: payload}
        while len(found) < len(members):
            missing = {host: self._star[host] for host in members if host not in found}
            for host, channel in missing.items():
                if (frame := channel.take_one()) is not None:
                    found[host] = self._expected(kind, frame, channel)
            waiting = [channel for host, channel in missing.items() if host not in found]
            if waiting and not is_readable(waiting):
                with self._awaiting(host for host in missing if host not in found):
                    look(watch.tick())
        return [found[host] for host in members]

    @contextmanager
    def _awaiting(self, hosts: Iterable[int]) -> Iterator[None]:
        self.awaited = tuple(hosts)
        try:
            yield
        finally:
            self.awaited = ()

    def _watching(self, look_around: LookAround) -> LookAround:
        def look(waited_seconds: float) -> None:
            self.look_around()
            look_around(waited_seconds)

        return look

    def _expected(self, kind: bytes, frame: Frame, channel: FramedChannel) -> bytes:
        if frame.kind == kind:
            return frame.payload
        theirs = _CALLS.get(frame.kind, repr(frame.kind))
        raise HostError(
            "All hosts must come to the same calls in the same order.",
            received=f"{theirs} from {channel.peer}, {_CALLS[kind]} on host {self.host}",
            fix="Run the same script with the same options on every host.",
        )

    @contextmanager
    def telling_others(self) -> Iterator[None]:
        """Host 0 passes on what it learns of one host to all the others."""
        try:
            yield
        except HostError as error:
            if self.host == 0:
                self._tell(str(error), error.raised or error)
            raise

    def _tell(self, text: str, error: BaseException | None) -> None:
        """Tell all others of a failure. Nothing comes after it."""
        if not self.has_told:
            self.has_told = True
            for channel in self._star.values():
                channel.fail(text, error)


def name_of(host: int, info: HostInfo) -> str:
    """A host for messages: its number, and its name if its info has one."""
    name = info.about.get("name")
    return f"Host {host}" if name is None else f"Host {host} ({name})"


def _decode_check(payload: bytes) -> tuple[str, str]:
    try:
        return msgspec.json.decode(payload, type=tuple[str, str])
    except msgspec.DecodeError as error:
        raise HostError(f"Another host sent what is no check: {error}.") from error


def _shown(answer: tuple[str, str], all_answers: Sequence[tuple[str, str]]) -> str:
    """A value, or of a long one the part where they begin to differ; its name if that differs."""
    names, values = zip(*all_answers, strict=True)
    name, value = answer
    if len(value) > _SHOWN_CHARACTERS:
        columns = enumerate(zip(*values, strict=False))
        alike = next((place for place, signs in columns if len(set(signs)) > 1), len(value))
        start = max(alike - _SHOWN_CHARACTERS // 4, 0)
        value = f"...{value[start : start + _SHOWN_CHARACTERS]}..."
    return repr(value) if len(set(names)) == 1 else f"{name} = {value!r}"
