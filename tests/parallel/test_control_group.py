"""Hosts tell each other what they are to know, and who of them has failed, by name."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations
from typing import Any

import pytest

from lockstep.channel.sealed_channel import Channel
from lockstep.errors import HostError
from lockstep.launch.rendezvous import framed_channel, pair_channels
from lockstep.launch.rendezvous.control_group import ControlGroup
from lockstep.launch.rendezvous.pair_channels import open_channels
from tests.channels import receive, send
from tests.control_groups import (
    SECONDS,
    address,
    enter,
    form,
    listening_ports,
    num_descriptors,
    on_all,
    together,
)
from tests.thorough import core_of

GONE = "Host {0} (node{0}, 127.0.0.1) no longer answers: "


@pytest.fixture
def groups() -> Iterator[list[ControlGroup]]:
    formed = form(3)
    yield formed
    for group in formed:
        group.close()


def give_up(waited_seconds: float) -> None:
    if waited_seconds > SECONDS:
        raise TimeoutError


def die(group: ControlGroup) -> None:
    """Close the connections as the kernel does when a process is killed."""
    for each in group._star.values():
        each._channel.close()


def wait_for_error(group: ControlGroup) -> str:
    """What a host finds that does nothing but look around."""
    started = time.monotonic()
    while time.monotonic() - started < SECONDS:
        try:
            group.look_around()
        except HostError as error:
            return str(error)
        time.sleep(0.01)
    raise TimeoutError


def error_of(call: Callable[[], Any]) -> str:
    with pytest.raises(HostError) as caught:
        call()
    return str(caught.value)


def test_calls_in_any_order(groups: list[ControlGroup]) -> None:
    def call(group: ControlGroup) -> list[Any]:
        own = bytes([group.host])
        return [
            group.exchange(own, give_up),
            group.broadcast(b"from 0" if group.host == 0 else None, give_up),
            group.gather(own * 2, give_up),
            group.broadcast(b"" if group.host == 0 else None, give_up),
            group.exchange(own * group.host, give_up),
            group.gather(b"", give_up),
        ]

    results = on_all(groups, call)
    everybody = [b"\0", b"\1", b"\2"]
    gathered = [[b"\0\0", b"\1\1", b"\2\2"], [], []]
    for host, result in enumerate(results):
        last = [b""] * 3 if host == 0 else []
        expected = [everybody, b"from 0", gathered[host], b"", [b"", b"\1", b"\2\2"], last]
        assert result == expected


def test_large_payloads(groups: list[ControlGroup]) -> None:
    payloads = [bytes([host]) * (10_000_000 * host + 5) for host in range(3)]
    results = on_all(groups, lambda group: group.exchange(payloads[group.host], give_up))
    assert results == [payloads] * 3
    assert on_all(groups, lambda group: group.gather(payloads[2], give_up))[0] == [payloads[2]] * 3


def test_those_who_are_ahead_wait(groups: list[ControlGroup]) -> None:
    """Also when they look around meanwhile: no message is lost."""

    def call(group: ControlGroup) -> list[list[bytes]]:
        results = []
        for number in range(20):
            time.sleep(0.005 * ((group.host + number) % 3))
            group.look_around()
            results.append(group.exchange(b"%d %d" % (number, group.host), give_up))
            group.look_around()
        return results

    expected = [[b"%d %d" % (number, host) for host in range(3)] for number in range(20)]
    assert on_all(groups, call) == [expected] * 3


@pytest.mark.parametrize("failing", core_of([0, 1, 2], [0, 2]))
@pytest.mark.parametrize("way", ["fail", "die"])
@pytest.mark.parametrize("doing", core_of(["exchange", "gather", "look"], ["exchange", "look"]))
def test_all_others_learn_who_failed(
    failing: int, way: str, doing: str, groups: list[ControlGroup]
) -> None:
    def call(group: ControlGroup) -> str:
        if group.host == failing:
            time.sleep(0.1)
            group.fail("no space left") if way == "fail" else die(group)
            return ""
        if doing == "look" or (doing == "gather" and group.host != 0):
            return wait_for_error(group)
        return error_of(partial(getattr(group, doing), b"x", give_up))

    messages = on_all(groups, call)
    del messages[failing]
    if way == "fail":
        assert messages == [f"Host {failing} (node{failing}) failed: no space left"] * 2
    else:
        assert all(message.startswith(GONE.format(failing)) for message in messages), messages


def test_a_failure_is_heard_by_one_who_waits_elsewhere(groups: list[ControlGroup]) -> None:
    """``look_around`` is what other waits call: here with the frames of a call that nobody made."""
    groups[0].broadcast(b"not received yet")
    groups[2].fail("no space left")
    assert wait_for_error(groups[0]) == "Host 2 (node2) failed: no space left"
    assert wait_for_error(groups[1]) == "Host 2 (node2) failed: no space left"


def test_a_host_that_leaves_is_no_failure_until_it_is_needed(groups: list[ControlGroup]) -> None:
    groups[2].gather(b"last words")
    groups[2].close()
    time.sleep(0.05)
    groups[0].look_around()
    groups[1].gather(b"")
    assert groups[0].gather(b"", give_up) == [b"", b"", b"last words"]
    groups[0].look_around()
    expected = "Host 2 (node2, 127.0.0.1) has left"
    errors = together(
        *(partial(error_of, partial(group.exchange, b"", give_up)) for group in groups[:2])
    )
    assert all(error.startswith(expected) for error in errors), errors


def test_who_gives_up_in_the_midst_of_a_message_can_still_say_why(
    groups: list[ControlGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(framed_channel, "_ERROR_SECONDS", SECONDS)
    has_given_up = threading.Event()

    def impatient(waited_seconds: float) -> None:
        if waited_seconds > 0.1:
            raise KeyboardInterrupt

    def interrupted() -> None:
        with pytest.raises(KeyboardInterrupt):
            groups[1].gather(bytes(50_000_000), impatient)
        has_given_up.set()
        groups[1].fail("interrupted")

    def late(group: ControlGroup) -> str:
        assert has_given_up.wait(SECONDS)
        return wait_for_error(group)

    _, first, third = together(interrupted, partial(late, groups[0]), partial(late, groups[2]))
    assert first == third == "Host 1 (node1) failed: interrupted"


def test_different_calls_at_the_same_time_are_an_error(groups: list[ControlGroup]) -> None:
    calls = [
        partial(groups[0].exchange, b"", give_up),
        partial(groups[1].exchange, b"", give_up),
        partial(groups[2].gather, b"", give_up),
    ]
    results = together(*(partial(error_of, call) for call in calls[:2]), calls[2])
    for message in results[:2]:
        assert "same calls in the same order" in message
        assert "gather from Host 2 (node2, 127.0.0.1), exchange on host 0" in message
    assert wait_for_error(groups[2]) == results[0]


def close(opened: list[dict[int, list[Channel]]]) -> None:
    for by_host in opened:
        for channels in by_host.values():
            for channel in channels:
                channel.close()


@pytest.mark.parametrize(
    "counts",
    core_of(
        [
            {(0, 1): 3, (0, 2): 1, (1, 2): 2},
            {(1, 2): 5},
            {(0, 2): 1, (0, 1): 0},
            {},
        ],
        lambda counts: len(counts) == 3,
    ),
)
def test_channels_are_the_same_connections_on_both_sides(
    counts: dict[tuple[int, int], int], groups: list[ControlGroup]
) -> None:
    num_open, listening = num_descriptors(), listening_ports()
    opened = on_all(groups, lambda group: open_channels(group, counts, SECONDS, give_up))
    assert listening_ports() <= listening
    assert num_descriptors() == num_open + 2 * sum(counts.values())
    for low, high in combinations(range(3), 2):
        count = counts.get((low, high), 0)
        pairs = [opened[low].get(high, []), opened[high].get(low, [])]
        assert [len(channels) for channels in pairs] == [count, count]
        for number, (left, right) in enumerate(zip(*pairs, strict=True)):
            for one, other in ((left, right), (right, left)):
                assert not one.socket.getblocking()
                assert not one.socket.get_inheritable()
                assert one.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                assert one.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                send(one, b"%d %d %d" % (low, high, number))
                assert receive(other) == b"%d %d %d" % (low, high, number)
    close(opened)
    on_all(
        groups,
        lambda group: group.exchange(b"the control group still works", give_up),
    )


def test_channels_of_two_openings_are_apart(groups: list[ControlGroup]) -> None:
    def open_twice(group: ControlGroup) -> list[dict[int, list[Channel]]]:
        return [open_channels(group, {(0, 2): 2}, SECONDS, give_up) for _ in range(2)]

    first, _, third = on_all(groups, open_twice)
    for number in range(2):
        send(first[number][2][1], b"%d" % number)
        assert receive(third[number][0][1]) == b"%d" % number
    close(first + third)


def test_all_must_ask_for_the_same_channels(groups: list[ControlGroup]) -> None:
    counts = [{(0, 1): 1}, {(0, 1): 1}, {(0, 2): 1}]
    num_open = num_descriptors()
    calls = [
        partial(open_channels, group, counts[group.host], SECONDS, give_up) for group in groups
    ]
    for message in together(*(partial(error_of, call) for call in calls)):
        assert "the same channels" in message
        assert "[(0, 2, 1)]" in message
    assert num_open - num_descriptors() == 2  # host 0 has told the others, and closed its channels


def test_who_cannot_connect_is_named(
    groups: list[ControlGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a firewall between hosts 1 and 2."""
    genuine = pair_channels._Opening.call

    def blocked(self: Any, host: int, *args: Any) -> Channel:
        if (host, self.control_group.host) == (1, 2):
            assert has_given_up.wait(SECONDS)
            raise self.timeout_error([host], "Connection timed out")
        return genuine(self, host, *args)

    monkeypatch.setattr(pair_channels._Opening, "call", blocked)

    def wait_in_vain() -> str:
        try:
            return error_of(partial(open_channels, groups[1], counts, 0.5, give_up))
        finally:
            has_given_up.set()

    counts, has_given_up = {(0, 2): 1, (1, 2): 2}, threading.Event()
    num_open, listening = num_descriptors(), listening_ports()
    results = together(
        partial(open_channels, groups[0], counts, SECONDS, give_up),
        wait_in_vain,
        partial(error_of, partial(open_channels, groups[2], counts, SECONDS, give_up)),
    )
    close(results[:1])
    assert "Host 2 (node2) must be connected with Host 1 (node1) within 0.5 s." in results[1]
    assert "firewall" in results[1]
    assert "Host 1 (node1) must be connected with Host 2 (node2)" in results[2]
    assert listening_ports() <= listening
    assert num_descriptors() == num_open


def test_a_failure_while_channels_are_opened(
    groups: list[ControlGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, *args: Any) -> None:
        self.control_group.fail("no space left")
        raise HostError("on host 2")

    monkeypatch.setattr(pair_channels._Opening, "call", fail)

    def hear() -> str:
        """Within the call or after it: a failure is heard before what was sent earlier."""
        try:
            calls[1]()
        except HostError as error:
            return str(error)
        return wait_for_error(groups[1])

    calls = [partial(open_channels, group, {(0, 2): 1}, SECONDS, give_up) for group in groups]
    results = together(partial(error_of, calls[0]), hear, partial(error_of, calls[2]))
    failure = "Host 2 (node2) failed: no space left"
    assert results == [failure, failure, "on host 2"]


def test_waiting_for_channels_can_be_given_up(groups: list[ControlGroup]) -> None:
    num_open, listening = num_descriptors(), listening_ports()

    def impatient(waited_seconds: float) -> None:
        if waited_seconds > 0.2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_channels(groups[0], {(0, 1): 1}, SECONDS, impatient)
    assert listening_ports() <= listening
    assert num_descriptors() == num_open


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 address")
def test_circles_over_ipv6() -> None:
    where = type(address())(name="::1", port=address().port)
    both = together(*(partial(enter, host, 2, where) for host in range(2)))
    opened = on_all(both, lambda group: open_channels(group, {(0, 1): 1}, SECONDS, give_up))
    assert opened[0][1][0].socket.family is socket.AF_INET6
    close(opened)
    for group in both:
        group.close()
