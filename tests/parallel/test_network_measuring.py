"""Hosts measure their links with host 0: in threads, over loopback."""

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TypeVar

import pytest

from lockstep.cluster.place import Address, Place
from lockstep.errors import HostError
from lockstep.launch.health import network_measuring
from lockstep.launch.health.network_measuring import LinkReport, MeasuredLink, measure_links
from lockstep.launch.rendezvous.control_group import HostInfo
from lockstep.launch.rendezvous.host_rendezvous import meet
from lockstep.launch.security.secret import Secret

pytestmark = pytest.mark.thorough

T = TypeVar("T")

TIMEOUT_SECONDS = 30.0
MEASURING_SECONDS = 0.05


def test_host_0_measures_its_links_with_the_others() -> None:
    reports = on_hosts(measured)
    assert reports[1:] == [[], []], "host 0 alone is told"
    assert [link.host for link in reports[0]] == [1, 2]
    for link in reports[0]:
        assert 0 < link.round_trip_seconds < 1
        assert min(link.there, link.back) > 1e6


def test_bytes_count_when_they_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow sender is seen at the receiving end only."""
    delays = {1: 0.02}  # seconds for each message of a host

    def slow(link: MeasuredLink, payload: bytes) -> None:
        time.sleep(delays.get(link._control_group.host, 0.0))
        send(link, payload)

    send = MeasuredLink._send
    monkeypatch.setattr(MeasuredLink, "_send", slow)
    one, other = on_hosts(measured)[0]
    most = len(network_measuring._CHUNK) / delays[1]
    assert one.back < most
    assert other.back > most


def test_a_host_that_fails_ends_the_measuring_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(link: MeasuredLink, seconds: float) -> None:
        if link._control_group.host == 2:
            raise ZeroDivisionError("it has no clock")
        answer(link, seconds)

    answer = MeasuredLink.answer
    monkeypatch.setattr(MeasuredLink, "answer", fail)
    said = on_hosts(outcome)
    assert said[2] == "it has no clock"
    assert "Host 2" in said[0]


def test_a_host_that_keeps_silent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep_silent(link: MeasuredLink, seconds: float) -> None:
        time.sleep(1.0)
        answer(link, seconds)

    answer = MeasuredLink.answer
    monkeypatch.setattr(MeasuredLink, "answer", keep_silent)
    monkeypatch.setattr(network_measuring, "SILENCE_SECONDS", 0.5)
    assert "Host 1 (node-1) no longer answers: nothing got through" in on_hosts(outcome)[0]


def outcome(host: int, port: int) -> str:
    try:
        measured(host, port)
    except (HostError, ZeroDivisionError) as error:
        return str(error)
    return "fine"


def measured(host: int, port: int) -> list[LinkReport]:
    """The reports of one of three hosts."""
    place = Place(
        launcher="a test",
        job="links",
        host=host,
        num_hosts=3,
        rendezvous=(Address(name="127.0.0.1", port=port),),
    )
    info, secret = HostInfo(facts={}, about={"name": f"node-{host}"}), Secret(b"a test's secret")
    with closing(meet(place, secret, info, timeout_seconds=TIMEOUT_SECONDS)) as group:
        try:
            return measure_links(group, MEASURING_SECONDS)
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
