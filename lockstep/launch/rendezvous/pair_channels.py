"""Opens channels between pairs of hosts: connections for tensors, beside the control group's.

In each pair the host with the lower number listens, on the control group's interface and at a free
port, until its channels are open. It announces its address over the control group. The purpose of a
handshake is one channel: a token for this opening, the pair, and the channel's number.
"""

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from lockstep.channel.polling import LOOK_AROUND_SECONDS, LookAround, Stopwatch, wait_on
from lockstep.channel.sealed_channel import Channel
from lockstep.errors import HostError
from lockstep.formatting import format_seconds
from lockstep.launch.rendezvous.control_group import ControlGroup
from lockstep.launch.security.handshake import Gate, HandshakeError, call, purpose_of
from lockstep.launch.security.secret import Secret
from lockstep.launch.sockets import listen
from lockstep.launch.untrusted import decode_untrusted

_TOKEN_BYTES = 16

Counts = Mapping[tuple[int, int], int]
_Channels = dict[int, list[Channel]]


class _Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """A host's message before channels are opened.

    Attributes:
        counts: the number of channels, as (host, other host, number).
        where: the address and port of its listener, if it has one.
        token: the part of its channels' purposes that is new for each opening.
    """

    counts: list[tuple[int, int, int]]
    where: tuple[str, int] | None
    token: bytes


@dataclass
class _Opening:
    """One opening of channels on one host; see ``open_channels``."""

    control_group: ControlGroup
    secret: Secret
    counts: Counts
    timeout_seconds: float
    look_around: LookAround
    watch: Stopwatch = field(default_factory=Stopwatch)

    def opened(self) -> _Channels:
        """All channels. If one cannot be opened, all are closed."""
        host, counts, token = self.control_group.host, self.counts, os.urandom(_TOKEN_BYTES)
        assert all(0 <= low < high < self.control_group.num_hosts for low, high in counts)
        expected = {
            _purpose(token, host, high, number): (high, number)
            for (low, high), count in counts.items()
            if low == host
            for number in range(count)
        }
        gate = self.open_gate(expected) if expected else None
        opened: _Channels = {}
        try:
            announcements = self.exchange_announcements(gate, token)
            self.watch = Stopwatch()  # all hosts have begun
            for low in range(host):
                for number in range(counts.get((low, host), 0)):
                    opened.setdefault(low, []).append(self.call(low, announcements[low], number))
            if gate:
                self.accept(gate, expected, opened)
        except BaseException:
            for channels in opened.values():
                for channel in channels:
                    channel.close()
            raise
        finally:
            if gate:
                gate.close()
        return opened

    def open_gate(self, purposes: Iterable[bytes]) -> Gate:
        family, address = self.control_group.interface
        try:
            return Gate(listen(family, (address, 0)), self.secret, set(purposes), once=True)
        except OSError as error:
            raise HostError(
                f"{self.own_name} must be able to listen at {address}.",
                received=error.strerror or str(error),
                fix="Check whether the interface is still up.",
            ) from error

    def exchange_announcements(self, gate: Gate | None, token: bytes) -> list[_Announcement]:
        group = self.control_group
        wanted = sorted((*pair, count) for pair, count in self.counts.items() if count)
        where = (gate.address[0], gate.address[1]) if gate else None
        own = _Announcement(counts=wanted, where=where, token=token)
        received = group.exchange(msgspec.json.encode(own), self.look_around)
        announcements = [decode_untrusted(payload, _Announcement) for payload in received]
        for host, announcement in enumerate(announcements):
            if announcement.counts != wanted:
                raise HostError(
                    "All hosts must ask for the same channels.",
                    received=f"{announcement.counts} on {group.name_of(host)}, {wanted} on "
                    f"{self.own_name}",
                    fix="Run the same script with the same options on every host.",
                )
        return announcements

    @property
    def own_name(self) -> str:
        return self.control_group.name_of(self.control_group.host)

    def look(self, waited_seconds: float = 0.0) -> None:
        self.control_group.look_around()
        self.look_around(self.watch.tick())

    def call(self, host: int, announcement: _Announcement, number: int) -> Channel:
        """Channel ``number`` to a host with a lower number."""
        assert announcement.where is not None
        family, _ = self.control_group.interface
        purpose = _purpose(announcement.token, host, self.control_group.host, number)
        while True:
            left = self.timeout_seconds - self.watch.tick()
            try:
                return call(
                    family,
                    announcement.where,
                    self.secret,
                    purpose,
                    seconds=max(left, 0.0),
                    look_around=self.look,
                )
            except (HandshakeError, OSError) as error:
                if self.watch.tick() > self.timeout_seconds:
                    raise self.timeout_error([host], str(error)) from error
                # The handshakes of other callers may have displaced this one.
                time.sleep(LOOK_AROUND_SECONDS)
                self.look()

    def accept(
        self, gate: Gate, expected: Mapping[bytes, tuple[int, int]], into: _Channels
    ) -> None:
        """Accept the channels of hosts with higher numbers."""
        numbered: dict[tuple[int, int], Channel] = {}
        try:
            while gate.purposes:
                for admission in gate.admit(LOOK_AROUND_SECONDS):
                    numbered[expected[admission.purpose]] = admission.channel
                self.look()
                if gate.purposes and self.watch.seconds > self.timeout_seconds:
                    missing = sorted({expected[purpose][0] for purpose in gate.purposes})
                    raise self.timeout_error(missing, gate.last_refusal or "no call")
        finally:
            for host, number in sorted(numbered):
                into.setdefault(host, []).append(numbered[host, number])

    def timeout_error(self, hosts: Iterable[int], received: str) -> HostError:
        names = " and ".join(self.control_group.name_of(host) for host in hosts)
        return HostError(
            f"{names} must be connected with {self.own_name} within "
            f"{format_seconds(self.timeout_seconds)}.",
            received=received,
            fix="Check whether a firewall is between these hosts: every pair connects at ports "
            "that the kernel chooses.",
        )


def open_channels(
    control_group: ControlGroup,
    counts: Counts,
    timeout_seconds: float,
    look_around: LookAround = wait_on,
) -> dict[int, list[Channel]]:
    """Open connections, pair by pair. All hosts of a control group must ask for the same ones.

    Args:
        control_group: the hosts.
        counts: the number for hosts (g, h), g < h; other pairs get none.
        timeout_seconds: until all channels must be open, from when all hosts have begun.
        look_around: called while waiting.

    Returns:
        Channels by other host; number k of a pair is the same connection on both sides. They
        belong to the caller.

    Raises:
        HostError: another host did not connect, failed, or is lost.
    """
    secret = control_group.secret
    if secret is None:
        return {}
    with control_group.passing_on_failures():
        return _Opening(control_group, secret, counts, timeout_seconds, look_around).opened()


def _purpose(token: bytes, low: int, high: int, number: int) -> bytes:
    return purpose_of("channel", token, low, high, number)
