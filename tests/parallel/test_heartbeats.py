"""Heartbeats: what is heard of a host that runs, is stopped, or can no longer say."""

import os
import signal
import time
from collections.abc import Iterator

import pytest

from lockstep.errors import HostError
from lockstep.launch.health.heartbeats import Heartbeats, _send_beat
from lockstep.launch.workers import process_state
from tests.channels import channel_pair
from tests.faults.processes import is_alive

pytestmark = pytest.mark.thorough

Pair = tuple[Heartbeats, Heartbeats]

SECONDS = 30.0


def look_for(heartbeats: Heartbeats, seconds: float) -> None:
    """Wait, as a rank does."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        heartbeats.check("Host {}".format)
        time.sleep(0.02)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """Those of two hosts, which have begun to beat."""
    monkeypatch.setattr(process_state, "STOPPED_SECONDS", 2.0)
    first, second = channel_pair()
    ours, theirs = Heartbeats({1: first}), Heartbeats({0: second})
    try:
        until = time.monotonic() + SECONDS
        while not ours._silences:
            assert time.monotonic() < until
            look_for(ours, 0.1)
        yield ours, theirs
    finally:
        ours.close()
        theirs.close()


def test_hosts_that_run_are_heard(pair: Pair) -> None:
    ours, theirs = pair
    look_for(ours, 2.5)
    pids = [*ours._monitor.pids(), *theirs._monitor.pids()]
    for each in pair:
        each.close()
    assert not any(map(is_alive, pids))


def test_a_host_that_is_stopped_is_not_heard(pair: Pair) -> None:
    ours, theirs = pair
    os.kill(theirs._monitor.pids()[0], signal.SIGSTOP)
    with pytest.raises(HostError, match=r"Host 1 is stopped.*no heartbeat for 2 s") as found:
        look_for(ours, SECONDS)
    assert found.value.is_loss
    os.kill(theirs._monitor.pids()[0], signal.SIGCONT)


@pytest.mark.exhaustive
def test_who_does_not_wait_misses_nothing(pair: Pair) -> None:
    ours, _ = pair
    time.sleep(3.5)  # computes
    look_for(ours, 1.9)


def test_the_end_of_a_monitor_says_nothing(pair: Pair) -> None:
    ours, theirs = pair
    theirs.close()
    look_for(ours, 2.5)


def test_a_monitor_that_was_killed_says_nothing(pair: Pair) -> None:
    ours, theirs = pair
    os.kill(theirs._monitor.pids()[0], signal.SIGKILL)
    look_for(theirs, 0.3)
    assert not theirs._channels
    look_for(ours, 2.5)


def test_a_beat_that_is_none_is_an_error(pair: Pair) -> None:
    ours, theirs = pair
    os.kill(theirs._monitor.pids()[0], signal.SIGSTOP)
    (channel,) = theirs._channels.values()
    channel.socket.send(bytes(100))
    with pytest.raises(HostError, match="Host 1") as found:
        look_for(ours, 2.5)
    assert not found.value.is_loss


def test_a_connection_that_the_other_host_has_closed_is_closed() -> None:
    ours, theirs = channel_pair()
    theirs.close()
    while _send_beat(ours):
        time.sleep(0.001)
    assert ours.socket.fileno() == -1
