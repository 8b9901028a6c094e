"""Measures the network between host 0 and each other host: bandwidth and latency.

Each link has its own connection, and one link is measured at a time: at once, they would share host
0's network and measure less. The receiver asks for data and measures until it has arrived, so bytes
in buffers do not count as sent.

One connection carries all data. If several connections together are faster (on a fast network, or
over a long distance), so is training that opens several.
"""

import statistics
import time
from contextlib import ExitStack, closing

import msgspec

from lockstep.errors import HostError
from lockstep.launch.rendezvous.control_group import ControlGroup
from lockstep.launch.rendezvous.framed_channel import FramedChannel, RemotePeer
from lockstep.launch.rendezvous.pair_channels import open_channels
from lockstep.launch.untrusted import decode_untrusted

NUM_PINGS = 20
MEASURING_SECONDS = 0.5  # of each direction, about

# A host that is silent for this long is given up.
SILENCE_SECONDS = 30.0

_CHUNK = bytes(1 << 18)

# Volumes grow until one takes long enough, at most by this factor: buffers can make a slow network
# look fast, and it must not be flooded.
_GROWTH = 4
_MARGIN = 1.25

_KIND = b"M"


class LinkReport(msgspec.Struct, frozen=True, kw_only=True):
    """The network between host 0 and another host.

    Attributes:
        host: number of the other.
        round_trip_seconds: of a few bytes; the median.
        there: bytes per second from host 0 to the other.
        back: bytes per second from the other to host 0.
    """

    host: int
    round_trip_seconds: float
    there: float
    back: float


def measure_links(
    control_group: ControlGroup, seconds: float = MEASURING_SECONDS
) -> list[LinkReport]:
    """Measure the link between host 0 and every other host. All hosts of a control group call it.

    Args:
        control_group: of the hosts.
        seconds: of each link and direction, about.

    Returns:
        On host 0 a report for each other host; nothing on the others.

    Raises:
        HostError: another host failed, was lost, or is silent.
    """
    own, others = control_group.host, range(1, control_group.num_hosts)
    ends = open_channels(control_group, {(0, host): 1 for host in others}, SILENCE_SECONDS)
    reports = []
    with ExitStack() as stack:
        links = {}
        for host, (end,) in ends.items():
            peer = RemotePeer(host=host, name=str(control_group.infos[host].about["name"]))
            channel = stack.enter_context(closing(FramedChannel(end, peer)))
            links[host] = MeasuredLink(channel, control_group)
        for host in others:
            control_group.exchange(b"", _until_all_come)
            if own == 0:
                reports.append(links[host].measured(host, seconds))
            elif own == host:
                links[0].answer(seconds)
    return reports


class MeasuredLink:
    """A connection to another host, of which it is measured how fast data arrives.

    Args:
        channel: the connection.
        control_group: of the hosts; it says if one has failed.
    """

    def __init__(self, channel: FramedChannel, control_group: ControlGroup) -> None:
        self._channel = channel
        self._control_group = control_group

    def measured(self, host: int, seconds: float) -> LinkReport:
        """Host 0's part."""
        round_trip = statistics.median(self._seconds_to_receive(1, 1) for _ in range(NUM_PINGS))
        back = self._bytes_per_second(seconds)
        self._send_requested()
        there = decode_untrusted(self._receive(), float, str(self._channel.peer))
        return LinkReport(host=host, round_trip_seconds=round_trip, there=there, back=back)

    def answer(self, seconds: float) -> None:
        """The other host's part."""
        self._send_requested()
        there = self._bytes_per_second(seconds)
        self._send(msgspec.json.encode(there))

    def _bytes_per_second(self, seconds: float) -> float:
        """Ask for more and more until it takes long enough; returns the last bytes per second.

        A volume that takes long is sent twice, and the quicker one counts: during the other the
        sending process may not have been running.
        """
        count = 1
        while (took := self._seconds_to_receive(count, len(_CHUNK))) < seconds:
            enough = round(_MARGIN * count * seconds / took)
            count = min(max(enough, 2 * count), _GROWTH * count)
        took = min(took, self._seconds_to_receive(count, len(_CHUNK)))
        self._request(0, 0)
        return count * len(_CHUNK) / took

    def _seconds_to_receive(self, count: int, size: int) -> float:
        began = time.perf_counter()
        self._request(count, size)
        for _ in range(count):
            self._receive()
        return time.perf_counter() - began

    def _request(self, count: int, size: int) -> None:
        """Ask the other host for messages; a request for none is the last one."""
        self._send(msgspec.json.encode((count, size)))

    def _send_requested(self) -> None:
        """Send what the other host asks for, until it has asked for the last time."""
        count = 1
        while count:
            payload, sender = self._receive(), str(self._channel.peer)
            count, size = decode_untrusted(payload, tuple[int, int], sender)
            for _ in range(count):
                self._send(_CHUNK[:size])

    def _send(self, payload: bytes) -> None:
        self._channel.send(_KIND, payload, self._look)

    def _receive(self) -> bytes:
        return self._channel.receive(self._look).payload

    def _look(self, waited_seconds: float) -> None:
        self._control_group.look_around()
        if waited_seconds > SILENCE_SECONDS:
            why = f"nothing got through for {SILENCE_SECONDS:.0f} s"
            raise HostError(f"{self._channel.peer} no longer answers: {why}.")


def _until_all_come(waited_seconds: float) -> None:
    if waited_seconds > 2 * SILENCE_SECONDS:
        raise HostError(
            "All hosts must begin the same measurements.",
            received=f"no message from one of them for {waited_seconds:.0f} s",
            fix="Read the command's output on the other hosts.",
        )
