"""A channel carries frames whole, and says with a host's name why it carries no more."""

import ctypes
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from lockstep.channel.records import Sealer
from lockstep.channel.sealed_channel import Channel
from lockstep.errors import HostError
from lockstep.launch import sockets
from lockstep.launch.rendezvous import framed_channel
from lockstep.launch.rendezvous.framed_channel import ERROR, Frame, FramedChannel, RemotePeer
from lockstep.launch.sockets import is_unanswered, tune
from tests.channels import sealed, send
from tests.control_groups import SECONDS, together

LEFT, RIGHT = RemotePeer(host=0, name="left"), RemotePeer(host=1, name="right")
_ATTACH_FILTER = 26  # SO_ATTACH_FILTER


def give_up(waited_seconds: float) -> None:
    if waited_seconds > SECONDS:
        raise TimeoutError


def connected() -> tuple[Channel, Channel]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        right, _ = server.accept()
        return sealed(tune(left), tune(right))


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    left, right = connected()
    yield left, right
    left.close()
    right.close()


@pytest.fixture
def channels(ends: tuple[Channel, Channel]) -> tuple[FramedChannel, FramedChannel]:
    return FramedChannel(ends[0], RIGHT), FramedChannel(ends[1], LEFT)


def wait_for_error(end: FramedChannel) -> str:
    """What looking at a channel ends with, which takes no frame."""
    started = time.monotonic()
    while time.monotonic() - started < SECONDS:
        try:
            end.check()
        except HostError as error:
            return str(error)
        time.sleep(0.01)
    raise TimeoutError


def test_frames_of_all_sizes_come_in_order(channels: tuple[FramedChannel, FramedChannel]) -> None:
    left, right = channels
    sizes = [0, 1, 8, 9, 65_536, 65_537, 0, 5_000_000, 3, 70_000_000]
    sent = [Frame(bytes([65 + number]), os.urandom(size)) for number, size in enumerate(sizes)]

    def send_all() -> None:
        for frame in sent:
            left.send(*frame, give_up)

    failure, received = together(send_all, lambda: [right.receive(give_up) for _ in sizes])
    assert failure is None
    assert received == sent


def test_both_may_send_at_once_what_the_kernel_does_not_hold(
    channels: tuple[FramedChannel, FramedChannel],
) -> None:
    payload = bytes(30_000_000)

    def talk(end: FramedChannel) -> bytes:
        end.send(b"A", payload, give_up)  # which reads meanwhile what the other sends
        return end.receive(give_up).payload

    assert together(*(partial(talk, end) for end in channels)) == [payload, payload]


def test_taking_does_not_wait_and_looking_takes_nothing(
    channels: tuple[FramedChannel, FramedChannel],
) -> None:
    left, right = channels
    assert right.take_one() is None
    for number in range(3):
        left.send(b"A", bytes([number]))
    for _ in range(3):
        right.check()
    assert [right.receive(give_up).payload for _ in range(3)] == [b"\0", b"\1", b"\2"]
    assert right.take_one() is None


def test_reading_ahead_has_an_end(
    channels: tuple[FramedChannel, FramedChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a host that is busy holds a bounded part of what others send meanwhile."""
    monkeypatch.setattr(framed_channel, "_READ_AHEAD_BYTES", 1_000_000)
    left, right = channels
    frames = [bytes([number]) * 600_000 for number in range(50)]

    def send_all() -> None:
        for payload in frames:
            left.send(b"A", payload, give_up)

    thread = threading.Thread(target=send_all)
    thread.start()
    deadline = time.monotonic() + SECONDS
    while right._num_waiting_bytes < 1_000_000:
        right.check()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    for _ in range(20):
        time.sleep(0.005)
        right.check()
    assert right._num_waiting_bytes == 1_200_000
    assert [right.receive(give_up).payload for _ in frames] == frames
    thread.join(SECONDS)


def test_an_end_without_goodbye_is_an_error_at_once(
    channels: tuple[FramedChannel, FramedChannel], ends: tuple[Channel, Channel]
) -> None:
    left, right = channels
    left.send(b"A", b"whole")
    ends[0].close()
    message = "Host 0 (left) no longer answers: it has closed the connection."
    assert wait_for_error(right) == message
    for call in (right.check, right.take_one, right.receive):
        with pytest.raises(HostError) as caught:
            call()
        assert str(caught.value) == message
    assert not right.has_report


@pytest.mark.parametrize("cut", [1, 4, 5, 33])
def test_the_end_within_a_frame(cut: int) -> None:
    left, right = connected()
    frame = b"A" + struct.pack("!Q", 5) + b"whole"
    left.socket.send(b"".join(Sealer(left.keys.sending).seal(frame))[:cut])
    left.close()
    end = FramedChannel(right, LEFT)
    with pytest.raises(HostError, match="closed the connection"):
        end.receive(give_up)
    end.close()


def test_a_reset_connection(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    left.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    left.close()
    with pytest.raises(HostError, match=r"Host 0 \(left\) no longer answers: Connection reset"):
        FramedChannel(right, LEFT).receive(give_up)
    end = FramedChannel(right, LEFT)
    with pytest.raises(HostError, match=r"Host 0 \(left\) no longer answers"):
        end.send(b"A", b"x")


def test_after_a_goodbye_frames_are_still_there(
    channels: tuple[FramedChannel, FramedChannel],
) -> None:
    left, right = channels
    left.send(b"A", b"last")
    left.close()
    time.sleep(0.05)
    right.check()
    assert right.receive(give_up) == (b"A", b"last")
    right.check()
    with pytest.raises(HostError, match=r"Host 0 \(left\) has left"):
        right.receive(give_up)
    with pytest.raises(HostError, match="closed on this side"):
        left.check()


def test_an_error_is_heard_before_what_was_sent_earlier(
    channels: tuple[FramedChannel, FramedChannel],
) -> None:
    left, right = channels
    right.send(b"A", bytes(100_000))  # which the other never reads: closing resets the connection
    left.send(b"A", b"earlier")
    time.sleep(0.05)
    left.fail("Host 0 failed: " + "ü" * 100_000)
    message = wait_for_error(right)
    assert message.startswith("Host 0 failed: üüü")
    assert len(message) < 1 << 16
    assert right.has_report
    with pytest.raises(HostError, match="Host 0 failed: ü"):
        right.send(b"A", bytes(10_000_000), give_up)


def test_an_error_explains_a_connection_that_was_closed(
    channels: tuple[FramedChannel, FramedChannel],
) -> None:
    """Also to one who only sends."""
    left, right = channels
    left.fail("Host 0 failed: no space left")

    def send_on() -> None:
        for _ in range(100):
            right.send(b"A", bytes(1_000_000), give_up)

    with pytest.raises(HostError, match="Host 0 failed: no space left"):
        send_on()


def test_what_was_given_up_goes_out_before_what_comes_next(
    channels: tuple[FramedChannel, FramedChannel],
) -> None:
    left, right = channels
    huge = os.urandom(30_000_000)

    def impatient(waited_seconds: float) -> None:
        if waited_seconds > 0.1:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        left.send(b"A", huge, impatient)
    failure, frames = together(
        partial(left.send, b"B", b"next", give_up), lambda: [right.receive(give_up) for _ in "12"]
    )
    assert failure is None
    assert frames == [(b"A", huge), (b"B", b"next")]


def test_no_goodbye_in_the_midst_of_a_frame(channels: tuple[FramedChannel, FramedChannel]) -> None:
    left, right = channels

    def impatient(waited_seconds: float) -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        left.send(b"A", bytes(30_000_000), impatient)
    left.close()
    with pytest.raises(HostError, match="no longer answers"):
        right.receive(give_up)


@pytest.mark.parametrize("way", ["send", "receive"])
def test_patience_ends(way: str, channels: tuple[FramedChannel, FramedChannel]) -> None:
    left, _ = channels
    waited: list[float] = []

    def look_around(waited_seconds: float) -> None:
        waited.append(waited_seconds)
        if waited_seconds > 0.3:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        left.send(b"A", bytes(30_000_000), look_around) if way == "send" else left.receive(
            look_around
        )
    assert waited == sorted(waited)
    assert len(waited) > 2  # a nap in which the machine stalls counts 0.1 s at most


@pytest.mark.parametrize(("kind", "num_bytes"), [(b"A", 1001), (ERROR, 1 << 17), (b"A", 1 << 63)])
def test_lengths_that_cannot_be_are_not_believed(
    kind: bytes, num_bytes: int, ends: tuple[Channel, Channel]
) -> None:
    left, right = ends
    send(left, kind + struct.pack("!Q", num_bytes))
    end = FramedChannel(right, LEFT, most_bytes=1000)
    with pytest.raises(
        HostError, match=r"Host 0 \(left\) sent a message that is too large\. Received: "
    ):
        end.receive(give_up)


def test_what_is_too_long_is_not_sent(ends: tuple[Channel, Channel]) -> None:
    with pytest.raises(HostError, match=r"A message to Host 1 \(right\) is too large"):
        FramedChannel(ends[0], RIGHT, most_bytes=1000).send(b"A", bytes(1001))


def drop_all(sock: socket.socket) -> None:
    """Let nothing that comes for a socket reach it any more, as if its host had vanished."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # return 0 bytes
    option = struct.pack("HxxxxxxP", 1, ctypes.addressof(program))
    sock.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, option)


@pytest.mark.thorough
def test_an_idle_host_that_vanishes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "_IDLE_SECONDS", 1)
    monkeypatch.setattr(sockets, "_PROBE_SECONDS", 1)
    started = time.monotonic()
    left, right = connected()
    drop_all(left.socket)
    message = wait_for_error(FramedChannel(right, LEFT))
    assert message == "Host 0 (left) no longer answers: Connection timed out."
    assert 2 < time.monotonic() - started < SECONDS
    left.close()
    right.close()


def test_a_host_that_vanishes_while_it_is_sent_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "VANISHED_SECONDS", 1)
    left, right = connected()
    drop_all(left.socket)
    end = FramedChannel(right, LEFT)
    end.send(b"A", b"into the void")
    message = wait_for_error(end)
    assert message.startswith("Host 0 (left) no longer answers: nothing has come back for")
    left.close()
    right.close()


@pytest.mark.thorough
def test_a_host_that_does_not_read_has_not_vanished(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be computing, or writing a checkpoint; its kernel answers."""
    monkeypatch.setattr(sockets, "VANISHED_SECONDS", 1)
    left, right = connected()
    end = FramedChannel(right, LEFT)

    def impatient(waited_seconds: float) -> None:
        assert not is_unanswered(right.socket)
        if waited_seconds > 3:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        end.send(b"A", bytes(30_000_000), impatient)
    left.close()
    right.close()


def test_a_fork_of_the_script_keeps_no_connection_alive() -> None:
    """DataLoader workers are forks; the other host must see when their parent is gone."""
    script = """if True:
        import os, socket, sys
        from lockstep.launch.sockets import connect
        sock = connect(socket.AF_INET, ("127.0.0.1", int(sys.argv[1])), 10.0, lambda waited: None)
        read, write = os.pipe()
        if not os.fork():
            os.write(write, b"x")
            os.read(0, 1)  # longer than its parent
            os._exit(0)
        os.read(read, 1)
        os._exit(0)
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(SECONDS)
        port = str(server.getsockname()[1])
        path = {"PYTHONPATH": os.pathsep.join(sys.path)}
        with subprocess.Popen(
            [sys.executable, "-c", script, port], stdin=subprocess.PIPE, env=os.environ | path
        ) as process:
            with server.accept()[0] as sock:
                assert process.wait(SECONDS) == 0
                sock.settimeout(SECONDS)
                assert sock.recv(1) == b""
            process.communicate(b"x", SECONDS)
