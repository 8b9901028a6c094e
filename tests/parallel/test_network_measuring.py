"""Pairs of hosts measure their connection: in threads, over loopback, with clocks of their own."""

import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import TypeVar

import pytest

from lockstep.channel.sealed_channel import Channel
from lockstep.cluster.place import Address, Place
from lockstep.errors import HostError
from lockstep.launch.health import network_measuring
from lockstep.launch.health.network_measuring import (
    Conversation,
    HostSurvey,
    answer_pair,
    measure_pair,
    survey_network,
)
from lockstep.launch.rendezvous.control_group import HostInfo
from lockstep.launch.rendezvous.host_rendezvous import meet
from lockstep.launch.security.secret import Secret
from lockstep.launch.untrusted import decode_untrusted
from tests.channels import sealed

T = TypeVar("T")

TIMEOUT_SECONDS = 30.0
AHEAD_SECONDS = 123.456
MEASURING_SECONDS = 0.05


def ahead(seconds: float) -> float:
    return time.time() + seconds


def in_peace(waited_seconds: float) -> None:
    assert waited_seconds < TIMEOUT_SECONDS


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    """A TCP connection that does not block."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    with near, far:
        yield sealed(near, far)


def test_a_pair_measures_its_way_and_its_clocks(
    ends: tuple[Channel, Channel],
) -> None:
    near, far = (Conversation(end, "The other", in_peace) for end in ends)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(answer_pair, far, MEASURING_SECONDS, partial(ahead, AHEAD_SECONDS))
        report = measure_pair(near, (2, 5), MEASURING_SECONDS)
        other.result(TIMEOUT_SECONDS)
    assert (report.first, report.second) == (2, 5)
    assert 0 < report.round_trip_seconds < 1
    assert report.offset_seconds == pytest.approx(AHEAD_SECONDS, abs=0.05)
    assert report.there > 10e6
    assert report.back > 10e6


def test_bytes_count_when_they_arrive(ends: tuple[Channel, Channel]) -> None:
    """The reader says that it is slow: how fast the sender was rid of them is no matter."""
    bytes_per_second = 4e6
    near = Conversation(ends[0], "The other", in_peace)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(say_slowly, ends[1], bytes_per_second)
        measured = network_measuring._pour(near, 0.2)
        slow.result(TIMEOUT_SECONDS)
    assert measured == pytest.approx(bytes_per_second)


def say_slowly(channel: Channel, bytes_per_second: float) -> None:
    """The reading side of ``_pour`` by hand; the times that it tells are of a rate of its own."""
    talk = Conversation(channel, "The other", in_peace)
    while (num_bytes := struct.unpack("!Q", talk.receive(8))[0]) > 0:
        assert len(talk.receive(num_bytes)) == num_bytes
        talk.send(struct.pack("!d", num_bytes / bytes_per_second))


def test_who_closes_the_connection_is_named(ends: tuple[Channel, Channel]) -> None:
    ends[1].close()
    with pytest.raises(HostError, match=r"Host 1 \(b\) no longer takes part.*(closed|reset)"):
        measure_pair(Conversation(ends[0], "Host 1 (b)", in_peace), (0, 1), MEASURING_SECONDS)


def test_who_keeps_silent_is_named(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_measuring, "SILENCE_SECONDS", 0.2)
    with pytest.raises(HostError, match=r"Host 1 \(b\) no longer answers: nothing got through"):
        measure_pair(Conversation(ends[0], "Host 1 (b)", in_peace), (0, 1), MEASURING_SECONDS)


def test_waiting_can_be_given_up(ends: tuple[Channel, Channel]) -> None:
    def give_up(waited_seconds: float) -> None:
        raise HostError("Host 2 failed: so it is")

    with pytest.raises(HostError, match="Host 2 failed: so it is"):
        measure_pair(Conversation(ends[0], "Host 1", give_up), (0, 1), MEASURING_SECONDS)


def test_three_hosts_survey_all_pairs() -> None:
    clocks = [partial(ahead, host * AHEAD_SECONDS) for host in range(3)]
    surveys = on_hosts(lambda host, port: survey(host, port, clocks[host]))
    assert surveys[1:] == [[], []], "host 0 alone is told"
    assert [each.address for each in surveys[0]] == ["127.0.0.1"] * 3
    pairs = {(pair.first, pair.second): pair for each in surveys[0] for pair in each.pairs}
    assert list(pairs) == [(0, 1), (0, 2), (1, 2)]
    for (first, second), pair in pairs.items():
        apart = (second - first) * AHEAD_SECONDS
        assert pair.offset_seconds == pytest.approx(apart, abs=0.05)
        assert min(pair.there, pair.back) > 1e6


def test_a_host_that_fails_ends_the_survey_of_all() -> None:
    def outcome(host: int, port: int) -> str:
        try:
            survey(host, port, broken_clock if host == 2 else time.time)
        except (HostError, ZeroDivisionError) as error:
            return str(error)
        return "fine"

    said = on_hosts(outcome)
    assert said[2] == "it has no clock"
    assert "Host 2" in said[0]
    assert "Host 2" in said[1]


def broken_clock() -> float:
    raise ZeroDivisionError("it has no clock")


def test_what_is_no_survey_is_refused() -> None:
    for payload in (b"", b"{}", b'{"address": 3, "pairs": []}', b"\xff"):
        with pytest.raises(HostError, match="Host 1 must send data in the format"):
            decode_untrusted(payload, HostSurvey, "Host 1")


def survey(host: int, port: int, clock: Callable[[], float]) -> list[HostSurvey]:
    """What one of three hosts makes of it."""
    place = Place(
        launcher="a test",
        job="survey",
        host=host,
        num_hosts=3,
        rendezvous=(Address(name="127.0.0.1", port=port),),
    )
    info, secret = HostInfo(facts={}, about={}), Secret(b"a secret of the tests")
    with closing(meet(place, secret, info, timeout_seconds=TIMEOUT_SECONDS)) as group:
        try:
            return survey_network(group, MEASURING_SECONDS, clock)
        except BaseException as error:
            group.fail(str(error))
            raise


def on_hosts(function: Callable[[int, int], T]) -> list[T]:
    """Run a function of host and port on three hosts at once."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(function, host, port) for host in range(3)]
        return [one.result(TIMEOUT_SECONDS) for one in running]
