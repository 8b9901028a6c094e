"""Couriers: messages between ranks of different hosts, here threads with socket pairs."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations

import pytest

from lockstep.channel.sealed_channel import Channel
from lockstep.comm.p2p.tcp_p2p import _HEADER, MailChannels
from lockstep.errors import HostError
from tests.channels import channel_pair, send
from tests.control_groups import num_descriptors

SECONDS = 20.0
NAMES = {rank: f"Host {rank} (node{rank})" for rank in range(3)}


def be_patient(waited_seconds: float) -> None:
    assert waited_seconds < SECONDS


@contextmanager
def connected(num_ranks: int) -> Iterator[list[dict[int, Channel]]]:
    """For each rank its channels, by the rank at the other end."""
    ends: list[dict[int, Channel]] = [{} for _ in range(num_ranks)]
    for one, other in combinations(range(num_ranks), 2):
        ends[one][other], ends[other][one] = channel_pair()
    try:
        yield ends
    finally:
        for own in ends:
            for end in own.values():
                end.close()


def couriers_of(ends: list[dict[int, Channel]]) -> list[MailChannels]:
    return [MailChannels(own, NAMES, be_patient, 60.0) for own in ends]


def close_all(couriers: list[MailChannels]) -> None:
    threads = [threading.Thread(target=mail_channels.close) for mail_channels in couriers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()


def test_messages_come_whole_and_are_found_by_their_numbers() -> None:
    large = bytes(range(256)) * 40_000  # more than a socket holds
    with connected(2) as ends:
        left, right = couriers_of(ends)
        left.put(0, 1, large, [1], num_slots=2)
        left.put(3, 1, b"other box", [1], num_slots=2)
        left.put(0, 2, b"", [1], num_slots=2)
        right.put(0, 1, b"back", [0], num_slots=2)
        assert right.take(0, 2, 0) == b""
        assert right.take(3, 1, 0) == b"other box"
        assert right.take(0, 1, 0) == large
        assert left.take(0, 1, 1) == b"back"
        close_all([left, right])


def test_a_sender_waits_until_its_slot_is_free() -> None:
    with connected(2) as ends:
        left, right = couriers_of(ends)
        for number in (1, 2):
            left.put(0, number, b"%d" % number, [1], num_slots=2)
        sent = threading.Event()

        def send_third() -> None:
            left.put(0, 3, b"3", [1], num_slots=2)
            sent.set()

        thread = threading.Thread(target=send_third)
        thread.start()
        assert right.take(0, 1, 0) == b"1"
        assert not sent.wait(0.2)  # taken, and still in use
        right.acknowledge(0, 1, 0)
        assert sent.wait(SECONDS)
        thread.join()
        assert right.take(0, 3, 0) == b"3"
        close_all([left, right])


def test_readers_on_one_rank_take_the_same_message() -> None:
    """Two stages there use a value, and it has come before either of them asks for it."""
    with connected(2) as ends:
        left, right = couriers_of(ends)
        for number in (1, 2):
            left.put(0, number, b"%d" % number, [1, 1], num_slots=2)
        left.put(7, 1, b"later on the same channel", [1], num_slots=1)
        assert right.take(7, 1, 0) == b"later on the same channel"
        for number in (1, 2):
            assert [right.take(0, number, 0) for _ in range(2)] == [b"%d" % number] * 2
        sent = threading.Event()

        def send_third() -> None:
            left.put(0, 3, b"3", [1, 1], num_slots=2)
            sent.set()

        thread = threading.Thread(target=send_third)
        thread.start()
        for number in (1, 2):  # the other reader is a message behind
            right.acknowledge(0, number, 0)
        assert not sent.wait(0.2)
        right.acknowledge(0, 1, 0)
        assert sent.wait(SECONDS)
        thread.join()
        assert right.take(0, 3, 0) == b"3"
        close_all([left, right])


def test_tasks_follow_one_another_on_the_same_channels() -> None:
    """Whoever says goodbye first: nothing of one task is found in the next."""
    with connected(3) as ends:
        for task in range(40):
            couriers = couriers_of(ends)
            for rank, mail_channels in enumerate(couriers):
                others = [other for other in range(3) if other != rank]
                mail_channels.put(0, 1, b"%d %d" % (task, rank), others, num_slots=1)
            for rank, mail_channels in enumerate(couriers):
                for other in range(3):
                    if other != rank and (task + rank) % 2:  # some are never taken
                        assert mail_channels.take(0, 1, other) == b"%d %d" % (task, other)
                        mail_channels.acknowledge(0, 1, other)
            close_all(couriers)
            ends = [{rank: end.renewed() for rank, end in own.items()} for own in ends]


def test_a_host_that_is_gone_is_named() -> None:
    with connected(2) as ends:
        (left,) = couriers_of(ends[:1])
        ends[1][0].close()
        with pytest.raises(HostError, match=r"Host 1 \(node1\) no longer takes part"):
            left.take(0, 1, 1)
        left.abandon()


def test_whoever_closes_hears_what_became_of_the_rest() -> None:
    """Host 1 dies: what was to go to host 2 has not gone, so closing is no good end."""
    with connected(3) as ends:
        left = MailChannels(ends[0], NAMES, be_patient, 60.0)
        for end in ends[1].values():
            end.close()
        with pytest.raises(HostError, match=r"Host 1 \(node1\) no longer takes part"):
            left.close()
        left.abandon()


def test_a_thread_that_fails_is_heard_by_whoever_waits() -> None:
    with connected(2) as ends:
        mail_channels = MailChannels(ends[0], NAMES, be_patient, 60.0)
        send(ends[1][0], _HEADER.pack(0, 0, 1, 1, 1 << 60))  # more than any memory holds
        with pytest.raises(HostError, match="announced a message of"):
            mail_channels.take(0, 1, 1)
        mail_channels.abandon()


def test_what_is_abandoned_while_frames_come_in_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    before = num_descriptors()
    for _ in range(30):
        with connected(5) as ends:
            mail_channels = MailChannels(ends[0], dict.fromkeys(ends[0], "Host"), be_patient, 60.0)
            for each in ends[1:]:
                send(each[0], bytes(5))
            mail_channels.abandon()
    assert not failed
    assert num_descriptors() == before


def test_what_is_abandoned_leaves_no_thread() -> None:
    before = threading.active_count()
    with connected(2) as ends:
        couriers = couriers_of(ends)
        couriers[0].put(0, 1, bytes(1 << 24), [1], num_slots=1)
        for mail_channels in couriers:
            mail_channels.abandon()
            mail_channels.abandon()
        assert threading.active_count() <= before  # a thread of an earlier test may have ended


def test_whoever_waits_looks_around() -> None:
    class GivenUpError(Exception):
        pass

    def give_up(waited_seconds: float) -> None:
        if waited_seconds > 0.1:
            raise GivenUpError

    with connected(2) as ends:
        mail_channels = MailChannels(ends[0], NAMES, give_up, 60.0)
        began = time.monotonic()
        with pytest.raises(GivenUpError):
            mail_channels.take(0, 1, 1)
        assert time.monotonic() - began < SECONDS
        mail_channels.abandon()
