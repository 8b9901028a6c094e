"""The control group: small collectives between the leading processes of all hosts.

A star of channels: host 0 has one to each of the others, so messages between two others go through
host 0. All hosts make the same calls in the same order; the bytes are the caller's.

Every wait and check raises an error with the name of a host that has failed: host 0 passes failures
on to all others. A host that ends because of its own error calls ``fail``, and one that is done
calls ``close``; a host that does neither, as after a kill, is lost.

It is for small or rare messages: tensors have other channels (``launch.rendezvous.pair_channels``).
"""

import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from lockstep.channel.polling import LookAround, Stopwatch, is_readable, wait_on
from lockstep.errors import HostError
from lockstep.launch.health.heartbeats import Heartbeats
from lockstep.launch.rendezvous.framed_channel import Frame, FramedChannel
from lockstep.launch.security.secret import Secret

_EXCHANGE = b"E"
_BROADCAST = b"B"
_GATHER = b"G"
_CALLS = {_EXCHANGE: "exchange", _BROADCAST: "broadcast", _GATHER: "gather"}


@dataclass(frozen=True, kw_only=True)
class HostInfo:
    """A host's information about itself, sent when hosts meet.

    Attributes:
        facts: must be equal on all hosts: versions, the training's description.
        about: may differ: the host's name ("name"), its number of devices.
    """

    facts: Mapping[str, str]
    about: Mapping[str, str | int]


class ControlGroup:
    """The hosts of a job, seen from one of them.

    Args:
        host: this host's number.
        infos: of all hosts.
        star: on host 0 the channels to all others, on the others that to host 0.
        secret: the job's.

    Attributes:
        host: this host's number.
        num_hosts: the number of hosts.
        infos: of all hosts, by host.
        awaited: the hosts for whose messages this one waits now.
        has_reported: this host has reported a failure to the others, after which it sends nothing.
        heartbeats: show whether the others are stopped; None if there are no long waits.
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
        self.has_reported = False
        self.heartbeats: Heartbeats | None = None
        self.awaited: tuple[int, ...] = ()

    def exchange(
        self, payload: bytes, look_around: LookAround = wait_on, *, among: int | None = None
    ) -> list[bytes]:
        """All hosts' bytes by host, on every host.

        Args:
            payload: this host's.
            look_around: called while waiting.
            among: only so many of the first hosts call this and take part; None is all.

        Raises:
            HostError: another host failed, left, is lost, or makes another call; on all hosts.
        """
        members = range(self.num_hosts if among is None else among)
        with self.passing_on_failures():
            if self.host == 0:
                return self._exchange_for_all(payload, look_around, members)
            self._send(0, _EXCHANGE, payload, look_around)
            return [
                payload if host == self.host else self._receive(_EXCHANGE, look_around)
                for host in members
            ]

    def broadcast(self, payload: bytes | None = None, look_around: LookAround = wait_on) -> bytes:
        """Host 0's bytes, on every host; the others pass None.

        Raises:
            HostError: see ``exchange``.
        """
        with self.passing_on_failures():
            if self.host != 0:
                return self._receive(_BROADCAST, look_around)
            assert payload is not None
            for to in self._star:
                self._send(to, _BROADCAST, payload, look_around)
            return payload

    def gather(self, payload: bytes, look_around: LookAround = wait_on) -> list[bytes]:
        """All hosts' bytes by host, on host 0; an empty list on the others, which do not wait.

        Raises:
            HostError: see ``exchange``.
        """
        with self.passing_on_failures():
            if self.host != 0:
                self._send(0, _GATHER, payload, look_around)
                return []
            return self._collect(_GATHER, payload, look_around, range(self.num_hosts))

    def look_around(self, waited_seconds: float = 0.0) -> None:
        """Check that the other hosts are connected. Does not wait, and takes no message.

        Raises:
            HostError: one has failed, is lost, or is stopped.
        """
        with self.passing_on_failures():
            for channel in self._star.values():
                channel.check()
            if self.heartbeats is not None:
                self.heartbeats.check(self.name_of)

    @property
    def interface(self) -> tuple[socket.AddressFamily, str]:
        """The family and address of this host on the control group's interface."""
        return next(iter(self._star.values())).own_address

    def name_of(self, host: int) -> str:
        """A host for messages: "Host 1 (node-b)"."""
        return name_of(host, self.infos[host])

    def fail(self, text: str, error: BaseException | None = None) -> None:
        """Report this host's failure to the others, and close."""
        self._report(f"{self.name_of(self.host)} failed: {text}", error)
        self.close()

    def close(self) -> None:
        """Leave the group; for the others this host is done, not lost."""
        if self.heartbeats is not None:
            self.heartbeats.close()
        for channel in self._star.values():
            channel.close()

    def _send(self, to: int, kind: bytes, payload: bytes, look_around: LookAround) -> None:
        with self._awaiting([to]):
            self._star[to].send(kind, payload, self._checking(look_around))

    def _receive(self, kind: bytes, look_around: LookAround) -> bytes:
        channel = self._star[0]
        with self._awaiting([0]):
            return self._expected(kind, channel.receive(self._checking(look_around)), channel)

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
        """The members' bytes by host, on host 0, received in any order."""
        watch, look = Stopwatch(), self._checking(look_around)
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

    def _checking(self, look_around: LookAround) -> LookAround:
        def look(waited_seconds: float) -> None:
            self.look_around()
            look_around(waited_seconds)

        return look

    def _expected(self, kind: bytes, frame: Frame, channel: FramedChannel) -> bytes:
        if frame.kind == kind:
            return frame.payload
        theirs = _CALLS.get(frame.kind, repr(frame.kind))
        raise HostError(
            "All hosts must make the same calls in the same order.",
            received=f"{theirs} from {channel.peer}, {_CALLS[kind]} on host {self.host}",
            fix="Run the same script with the same options on every host.",
        )

    @contextmanager
    def passing_on_failures(self) -> Iterator[None]:
        """Within the block, host 0 reports an error about one host to all others."""
        try:
            yield
        except HostError as error:
            if self.host == 0:
                self._report(str(error), error.raised or error)
            raise

    def _report(self, text: str, error: BaseException | None) -> None:
        """Report a failure to all others, once; nothing is sent after it."""
        if not self.has_reported:
            self.has_reported = True
            for channel in self._star.values():
                channel.fail(text, error)


def name_of(host: int, info: HostInfo) -> str:
    """A host for messages: its number, and its name if its info has one."""
    name = info.about.get("name")
    return f"Host {host}" if name is None else f"Host {host} ({name})"
