"""A link carries messages whole or not at all, of any size, with their descriptors."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.channel.polling import Stopwatch, is_readable
from lockstep.launch.workers.link import Link, Message
from tests.control_groups import num_descriptors
from tests.thorough import core_of

SECONDS = 20.0


@pytest.fixture
def links() -> Iterator[tuple[Link, Link]]:
    left, right = Link.pair()
    yield left, right
    left.close()
    right.close()


def give_up(waited_seconds: float) -> None:
    if waited_seconds > SECONDS:
        raise TimeoutError


def send_from_thread(link: Link, messages: list[Message]) -> threading.Thread:
    def send() -> None:
        for message in messages:
            link.send(message, give_up)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_messages_of_all_sizes_come_in_order(links: tuple[Link, Link]) -> None:
    left, right = links
    sizes = [0, 1, 12, 13, 14, 100_000, 0, 5_000_000, 3, 70_000_000]
    sent = [Message(b"D", os.urandom(16)[:1] * size) for size in sizes]
    thread = send_from_thread(left, sent)
    received = [right.receive(give_up) for _ in sizes]
    thread.join(SECONDS)
    assert received == sent


def test_descriptors_stay_with_their_messages(links: tuple[Link, Link], tmp_path: Path) -> None:
    left, right = links
    paths = [tmp_path / str(number) for number in range(30)]
    files = [os.open(path, os.O_CREAT | os.O_RDWR) for path in paths]
    groups = [files[:16], [], files[16:17], files[17:30]]
    sent = [
        Message(b"D", b"x" * (200_000 * number), tuple(group))
        for number, group in enumerate(groups)
    ]
    thread = send_from_thread(left, sent)
    for message, group in zip(sent, groups, strict=True):
        received = right.receive(give_up)
        assert received.payload == message.payload
        assert len(received.descriptors) == len(group)
        for own, theirs in zip(group, received.descriptors, strict=True):
            assert os.path.samestat(os.fstat(own), os.fstat(theirs))
            assert not os.get_inheritable(theirs)
            os.close(theirs)
    thread.join(SECONDS)
    for descriptor in files:
        os.close(descriptor)


def test_taking_does_not_wait(links: tuple[Link, Link]) -> None:
    left, right = links
    assert right.take() == []
    for number in range(3):
        left.send(Message(b"D", bytes([number])))
    assert right.take_one() == Message(b"D", b"\0")
    assert right.take() == [Message(b"D", b"\1"), Message(b"D", b"\2")]
    assert right.take() == []
    left.close()
    with pytest.raises(EOFError):
        right.take()


def test_a_closed_end_delivers_what_was_sent_whole(links: tuple[Link, Link]) -> None:
    left, right = links
    left.send(Message(b"D", b"whole"))
    left.close()
    assert right.take() == [Message(b"D", b"whole")]
    with pytest.raises(EOFError):
        right.receive(give_up)


@pytest.mark.parametrize("cut", core_of([1, 9, 10, 13], [9]))
def test_the_end_within_a_message(cut: int, tmp_path: Path) -> None:
    """Its descriptors must not stay open."""
    left, right = socket.socketpair()
    whole, carrier = Link.pair()
    descriptor = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    whole.send(Message(b"D", b"payload", (descriptor,)))
    num_open = num_descriptors()
    data = carrier._socket.recv(100)  # the bytes of a message; its descriptor is dropped
    socket.send_fds(left, [data[:cut]], [descriptor])
    left.close()
    link = Link(right)
    assert is_readable([link], SECONDS)
    with pytest.raises(EOFError):
        link.receive(give_up)
    link.close()
    assert num_descriptors() == num_open - 2  # left and right
    for end in (whole, carrier):
        end.close()
    os.close(descriptor)


def test_sending_to_a_closed_end() -> None:
    left, right = Link.pair()
    right.close()
    with pytest.raises(OSError, match="Broken pipe"):
        left.send(Message(b"D", b"x"))
    left.close()


@pytest.mark.parametrize("way", ["send", "receive"])
def test_patience_ends(way: str, links: tuple[Link, Link]) -> None:
    left, _ = links

    def look_around(waited_seconds: float) -> None:
        waited.append(waited_seconds)
        if waited_seconds > 0.3:
            raise TimeoutError

    waited: list[float] = []
    huge = Message(b"D", b"x" * 10_000_000)
    with pytest.raises(TimeoutError):
        left.send(huge, look_around) if way == "send" else left.receive(look_around)
    if way == "send":  # the other end would take it for the rest
        with pytest.raises(BrokenPipeError):
            left.send(Message(b"F"))
    assert waited == sorted(waited)
    assert len(waited) > 2  # a nap in which the machine stalls counts 0.1 s at most


def test_a_stopwatch_does_not_count_what_passed_while_nobody_looked() -> None:
    watch = Stopwatch()
    time.sleep(0.3)
    assert 0.05 < watch.tick() < 0.15
    time.sleep(0.03)
    assert 0.08 < watch.tick() < 0.25


def test_ends_are_never_standard_streams(links: tuple[Link, Link]) -> None:
    assert min(link.fileno() for link in links) > 2
