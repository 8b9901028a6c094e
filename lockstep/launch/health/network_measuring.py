"""Measures the network between hosts: bandwidth and latency of each pair, and clock offsets.

Each pair has its own connection, and one pair measures at a time: at once, they would share the
network and measure less. Times are taken where bytes arrive, so that bytes in buffers do not count
as sent.

One connection carries all data. If several connections together are faster (on a fast network, or
over a long distance), so is training that opens several.
"""

import select
import statistics
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from itertools import combinations

import msgspec

from lockstep.channel.polling import LookAround, Stopwatch, wait_for
from lockstep.channel.sealed_channel import Channel, lost
from lockstep.errors import HostError
from lockstep.launch.rendezvous.control_group import ControlGroup
from lockstep.launch.rendezvous.pair_channels import open_channels
from lockstep.launch.untrusted import decode_untrusted

NUM_PINGS = 20
MEASURING_SECONDS = 0.5  # of each direction, about

# A host that is silent for this long is given up.
SILENCE_SECONDS = 30.0

# Volumes grow until one takes long enough, at most by this factor: buffers can make a slow network
# look fast, and it must not be flooded.
_FIRST_BYTES = 1 << 16
_GROWTH = 4
_MARGIN = 1.25

_CHUNK_BYTES = 1 << 18
_PING = struct.Struct("!d")
_PONG = struct.Struct("!dd")
_VOLUME = struct.Struct("!Q")
_TIME = struct.Struct("!d")

Clock = Callable[[], float]


class PairReport(msgspec.Struct, frozen=True, kw_only=True):
    """The network between two hosts.

    Attributes:
        first: number of the one host.
        second: number of the other.
        round_trip_seconds: of a few bytes; the median.
        offset_seconds: how far the second's clock is ahead of the first's.
        there: bytes per second from the first to the second.
        back: bytes per second from the second to the first.
    """

    first: int
    second: int
    round_trip_seconds: float
    offset_seconds: float
    there: float
    back: float


class HostSurvey(msgspec.Struct, frozen=True, kw_only=True):
    """One host's part of the survey.

    Attributes:
        address: its own, on the interface that leads to the others.
        pairs: the pairs of which it is the first host.
    """

    address: str
    pairs: tuple[PairReport, ...]


def survey_network(
    control_group: ControlGroup, seconds: float = MEASURING_SECONDS, clock: Clock = time.time
) -> list[HostSurvey]:
    """Measure every pair of hosts. All hosts of a control group of several call it.

    Args:
        control_group: of the hosts.
        seconds: of each pair and direction, about.
        clock: this host's.

    Returns:
        On host 0 each host's part; nothing on the others.

    Raises:
        HostError: another host failed, was lost, or is silent.
    """
    pairs = list(combinations(range(control_group.num_hosts), 2))
    channels = open_channels(
        control_group, dict.fromkeys(pairs, 1), timeout_seconds=SILENCE_SECONDS
    )
    with ExitStack() as stack:
        talks = {
            host: Conversation(
                stack.enter_context(closing(mine[0])),
                control_group.name_of(host),
                control_group.look_around,
            )
            for host, mine in channels.items()
        }
        reports = []
        for first, second in pairs:
            control_group.exchange(b"", _until_all_come)
            if control_group.host == first:
                reports.append(measure_pair(talks[second], (first, second), seconds, clock))
            elif control_group.host == second:
                answer_pair(talks[first], seconds, clock)
        own = HostSurvey(address=control_group.interface[1], pairs=tuple(reports))
        said = control_group.gather(msgspec.json.encode(own), _until_all_come)
    return [
        decode_untrusted(payload, HostSurvey, control_group.name_of(host))
        for host, payload in enumerate(said)
    ]


def measure_pair(
    talk: "Conversation", pair: tuple[int, int], seconds: float, clock: Clock = time.time
) -> PairReport:
    """The first host's part: it sends requests, and gets all results."""
    round_trips, offsets = zip(*(_ping(talk, clock) for _ in range(NUM_PINGS)), strict=True)
    there = _pour(talk, seconds)
    back = _drain(talk)
    return PairReport(
        first=pair[0],
        second=pair[1],
        round_trip_seconds=statistics.median(round_trips),
        # The quickest answer has the most exact offset (RFC 5905, clock filter).
        offset_seconds=offsets[round_trips.index(min(round_trips))],
        there=there,
        back=back,
    )


def answer_pair(talk: "Conversation", seconds: float, clock: Clock = time.time) -> None:
    """The second host's part."""
    for _ in range(NUM_PINGS):
        talk.receive(_PING.size)
        arrived = clock()
        talk.send(_PONG.pack(arrived, clock()))
    _drain(talk)
    _pour(talk, seconds)


class Conversation:
    """A connection to another host that carries plain bytes; all waits have a limit.

    Args:
        channel: the connection.
        peer: the host at the other end, for messages.
        look_around: called while waiting; raises to give up.
    """

    def __init__(self, channel: Channel, peer: str, look_around: LookAround) -> None:
        self._channel = channel
        self._peer = peer
        self._look_around = look_around

    def send(self, data: bytes | memoryview) -> None:
        """Send all of it."""
        self._channel.put(data)
        self._retry(self._flush, select.POLLOUT)

    def receive(self, num_bytes: int) -> bytes:
        """Wait for this many bytes."""
        buffer = memoryview(bytearray(num_bytes))
        while num_bytes > 0:
            num_bytes -= self.receive_into(buffer[-num_bytes:])
        return bytes(buffer)

    def receive_into(self, buffer: memoryview) -> int:
        """Wait for some bytes; returns how many came."""
        return self._retry(lambda: self._channel.receive_into(buffer), select.POLLIN)

    def _flush(self) -> int:
        if not self._channel.flush():
            raise BlockingIOError
        return 0

    def _retry(self, move: Callable[[], int], events: int) -> int:
        watch = Stopwatch()
        while True:
            try:
                return move()
            except BlockingIOError:
                wait_for(self._channel, events, watch, self._look)
            except OSError as error:
                raise lost(self._peer, error) from error

    def _look(self, waited_seconds: float) -> None:
        self._look_around(waited_seconds)
        if waited_seconds > SILENCE_SECONDS:
            why = f"nothing got through for {SILENCE_SECONDS:.0f} s"
            raise HostError(f"{self._peer} no longer answers: {why}.")


def _ping(talk: Conversation, clock: Clock) -> tuple[float, float]:
    """Seconds of a round trip, and of the other clock's lead."""
    # Time around the clock's readings, so that a delay between them lengthens the round trip.
    began, sent = time.perf_counter(), clock()
    talk.send(_PING.pack(sent))
    theirs_arrived, theirs_sent = _PONG.unpack(talk.receive(_PONG.size))
    arrived, round_trip = clock(), time.perf_counter() - began
    return round_trip, ((theirs_arrived - sent) + (theirs_sent - arrived)) / 2


def _pour(talk: Conversation, seconds: float) -> float:
    """Send more and more until it takes long enough; returns the last bytes per second.

    A volume that takes long is sent twice, and the quicker one counts: during the other the
    receiving process may not have been running.
    """
    chunk = memoryview(bytes(_CHUNK_BYTES))
    num_bytes = _FIRST_BYTES
    speeds: list[float] = []  # with this number of bytes
    while True:
        talk.send(_VOLUME.pack(num_bytes))
        for start in range(0, num_bytes, _CHUNK_BYTES):
            talk.send(chunk[: num_bytes - start])
        took: float = _TIME.unpack(talk.receive(_TIME.size))[0]
        speeds.append(num_bytes / max(took, 1e-9))
        if took < seconds:
            enough = _MARGIN * speeds[-1] * seconds
            num_bytes = round(min(max(enough, 2 * num_bytes), _GROWTH * num_bytes))
            speeds.clear()
        elif len(speeds) == 2:
            talk.send(_VOLUME.pack(0))
            return max(speeds)


def _drain(talk: Conversation) -> float:
    """The receiver's part of ``_pour``: answer each volume with the seconds that it took."""
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    last, speed = 0, 0.0
    while True:
        num_bytes: int = _VOLUME.unpack(talk.receive(_VOLUME.size))[0]
        if num_bytes == 0:
            return speed
        if num_bytes != last:
            last, speed = num_bytes, 0.0
        began, missing = time.perf_counter(), num_bytes
        while missing > 0:
            missing -= talk.receive_into(buffer[:missing])
        took = time.perf_counter() - began
        speed = max(speed, num_bytes / max(took, 1e-9))
        talk.send(_TIME.pack(took))


def _until_all_come(waited_seconds: float) -> None:
    if waited_seconds > 2 * SILENCE_SECONDS:
        raise HostError(
            "All hosts must come to the same measurements.",
            received=f"nothing from one of them for {waited_seconds:.0f} s",
            fix="See what the command says on the other hosts.",
        )
