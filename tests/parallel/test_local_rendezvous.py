"""Meetings of a host's processes: who is let in, who is not, and what is said of it."""

import os
import random
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

from lockstep.cluster.place import Address, Place
from lockstep.errors import WorkerError
from lockstep.launch.rendezvous import local_rendezvous
from lockstep.launch.rendezvous.local_rendezvous import meet_followers, meet_leader
from lockstep.launch.security import handshake
from lockstep.launch.workers.process_state import PeerProcess, user_of
from tests.control_groups import num_descriptors
from tests.faults.processes import wait_until

pytestmark = pytest.mark.thorough

SECRET = b"a secret of this job"
SECONDS = 30.0
GREETING_BYTES = 72


@pytest.fixture
def place() -> Place:
    return Place(launcher="srun", job=uuid.uuid4().hex, host=3, num_hosts=4, rendezvous=())


def follower(place: Place, number: int) -> Place:
    return Place(
        launcher="srun",
        job=place.job,
        host=place.host,
        num_hosts=4,
        process=number,
        rendezvous=place.rendezvous,
    )


@contextmanager
def threads() -> Iterator[Callable[..., "Future[Any]"]]:
    """A function that calls another in a thread, all of which end with the block."""
    before = threading.active_count()
    with ThreadPoolExecutor(8) as pool:
        yield pool.submit
    assert threading.active_count() <= before  # a thread of an earlier test may have ended


def lead(place: Place, num_followers: int, seconds: float = SECONDS) -> list[PeerProcess]:
    return meet_followers(place, SECRET, num_followers=num_followers, timeout_seconds=seconds)


def follow(
    place: Place, number: int, secret: bytes | None = SECRET, seconds: float = SECONDS
) -> PeerProcess:
    return meet_leader(follower(place, number), secret, timeout_seconds=seconds)


def check_and_close(peers: list[PeerProcess]) -> None:
    for peer in peers:
        assert peer.pid == os.getpid()
        peer.close()


@contextmanager
def connected(place: Place) -> Iterator[socket.socket]:
    """A connection of one who knows the name, as soon as somebody listens."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(SECONDS)

        def connects() -> bool:
            with suppress(ConnectionRefusedError):
                sock.connect(local_rendezvous._name_of(place))
                return True
            return False

        wait_until(connects, SECONDS)
        yield sock


@pytest.mark.parametrize("secret", [SECRET, None])
def test_processes_come_in_any_order(place: Place, secret: bytes | None) -> None:
    before = num_descriptors()
    with threads() as call:
        coming = []
        for number in (3, 1, 2):
            coming.append(
                call(meet_leader, follower(place, number), secret, timeout_seconds=SECONDS)
            )
            time.sleep(0.05)
        followers = meet_followers(place, secret, num_followers=3, timeout_seconds=SECONDS)
        leaders = dict(zip((3, 1, 2), [each.result() for each in coming], strict=True))
    for number, peer in enumerate(followers, 1):
        peer.sock.send(bytes([number]))
        assert leaders[number].sock.recv(9) == bytes([number])
    check_and_close([*followers, *leaders.values()])
    assert num_descriptors() == before


def test_strangers_disturb_nobody(place: Place) -> None:
    """They come first, and say nothing, garbage, half a hello, or one that was heard before."""
    dice = random.Random(7)
    with threads() as call:
        leading = call(lead, place, 2)
        with connected(place) as silent, connected(place) as slow, connected(place) as hasty:
            slow.send(b"x" * 30)
            hasty.close()
            first = call(follow, place, 1).result(5)  # though the others are still there
            for _ in range(200):
                with connected(place) as stranger:
                    stranger.send(handshake._MAGIC + dice.randbytes(64))
                    assert len(stranger.recv(100)) == GREETING_BYTES
                    stranger.send(dice.randbytes(64 + dice.randrange(3)))
                    refusal = handshake._REFUSALS[handshake.OTHER_SECRET]
                    assert stranger.recv(100) == refusal
                    with suppress(ConnectionResetError):  # where it has said more than is read
                        assert stranger.recv(100) == b""
            second = call(follow, place, 2)
            check_and_close([*leading.result(SECONDS), first, second.result(SECONDS)])
            assert silent.recv(100) == b""


def test_a_silent_crowd_is_sent_away(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_rendezvous, "_HANDSHAKE_SECONDS", 0.3)
    with threads() as call, ExitStack() as crowd:
        leading = call(lead, place, 1)
        silent = [
            crowd.enter_context(connected(place)) for _ in range(handshake._MOST_PENDING + 20)
        ]
        check_and_close([call(follow, place, 1).result(SECONDS), *leading.result(SECONDS)])
        for sock in silent[: handshake._MOST_PENDING]:
            assert sock.recv(100) == b""


def test_what_was_overheard_is_good_for_one_connection_only(place: Place) -> None:
    heard: list[bytes] = []

    class Overheard(socket.socket):
        def send(self, data: Any, flags: int = 0) -> int:
            heard.append(bytes(data))
            return super().send(data, flags)

    with threads() as call, pytest.MonkeyPatch.context() as patch:
        leading = call(lead, place, 2)
        patch.setattr(socket, "socket", Overheard)
        first = call(follow, place, 1).result(SECONDS)
        patch.undo()
        greeting = heard[0]  # the follower's; what the leader sent is there as well
        (proofs,) = (data for data in heard if len(data) == 64)
        with connected(place) as replayer:
            replayer.send(greeting)
            replayer.recv(GREETING_BYTES)
            replayer.send(proofs)
            assert replayer.recv(100) == handshake._REFUSALS[handshake.OTHER_SECRET]
        check_and_close([first, call(follow, place, 2).result(SECONDS), *leading.result(SECONDS)])


def test_another_secret_is_refused_at_once(place: Place) -> None:
    with threads() as call:
        leading = call(lead, place, 1, 2.0)
        for secret in (b"another secret", None):
            with pytest.raises(WorkerError, match="has another secret than this process") as caught:
                follow(place, 1, secret)
            assert SECRET.decode() not in str(caught.value)
        expected = r"2 were refused, the last: process .*: it has another secret than this host"
        with pytest.raises(WorkerError, match=expected):
            leading.result()


@pytest.mark.parametrize("number", [1, 7])
def test_a_number_that_is_not_awaited(place: Place, number: int) -> None:
    with threads() as call:
        leading = call(lead, place, 2)
        first = call(follow, place, 1).result(SECONDS)
        expected = f"process {os.getpid()}: it expects no process {number}, or another one"
        with pytest.raises(WorkerError, match=expected):
            follow(place, number)
        second = call(follow, place, 2).result(SECONDS)
        check_and_close([first, second, *leading.result(SECONDS)])


def test_a_follower_that_was_there_may_come_again(place: Place) -> None:
    with threads() as call:
        leading = call(lead, place, 2)
        call(follow, place, 1).result(SECONDS).close()
        first, second = (
            call(follow, place, 1).result(SECONDS),
            call(follow, place, 2).result(SECONDS),
        )
        followers = leading.result(SECONDS)
        followers[0].sock.send(b"1")
        assert first.sock.recv(9) == b"1"
        check_and_close([first, second, *followers])


@pytest.mark.exhaustive
def test_who_is_late_is_named(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    with threads() as call:
        leading = call(lead, place, 4, 6.0)
        present = call(follow, place, 3).result(SECONDS)
        expected = r"3 of .* by srun, did not .* within 6 s: process 1, 2, 4\. Received: 1 of"
        with pytest.raises(WorkerError, match=expected):
            leading.result()
        assert present.sock.recv(1) == b""
        present.close()
    told = "Waiting for 3 of 5 processes of this host, started by srun: process 1, 2, 4.\n"
    assert capfd.readouterr().err == told


def test_a_leader_that_does_not_come(place: Place) -> None:
    began = time.monotonic()
    expected = (
        r"Process 2 of .* by srun, has waited 0 s for process 0.* Received: no process listens\."
    )
    with pytest.raises(WorkerError, match=expected):
        follow(place, 2, seconds=0.3)
    assert time.monotonic() - began < SECONDS


def test_a_leader_that_does_not_answer(place: Place) -> None:
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(local_rendezvous._name_of(place))
        stopped.listen()
        with pytest.raises(WorkerError, match="did not finish the handshake in time"):
            follow(place, 1, seconds=0.3)


def test_a_leader_that_speaks_otherwise(place: Place) -> None:
    with threads() as call, socket.socket(socket.AF_UNIX) as newer:
        newer.bind(local_rendezvous._name_of(place))
        newer.listen()
        coming = call(follow, place, 1)
        accepted, _ = newer.accept()
        with accepted:
            accepted.send(b"LOCKSTP9" + bytes(64))
            with pytest.raises(WorkerError, match="does not speak Lockstep's protocol"):
                coming.result(SECONDS)


def test_a_leader_without_the_secret(place: Place) -> None:
    """It sends the follower's own proof back as if it was its own."""
    with threads() as call, socket.socket(socket.AF_UNIX) as impostor:
        impostor.bind(local_rendezvous._name_of(place))
        impostor.listen()
        coming = call(follow, place, 1)
        accepted, _ = impostor.accept()
        with accepted:
            accepted.send(accepted.recv(GREETING_BYTES))
            accepted.send(accepted.recv(64)[32:])
            with pytest.raises(WorkerError, match="cannot prove that it knows the secret"):
                coming.result(SECONDS)


def test_a_name_that_is_taken(place: Place) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(local_rendezvous._name_of(place))
        with pytest.raises(WorkerError, match=r"must be free\. Received: job .* on host 3"):
            lead(place, 1, 0.3)
        with threads() as call:
            leading = call(lead, place, 1)
            time.sleep(0.1)
            other.close()
            check_and_close([call(follow, place, 1).result(SECONDS), *leading.result(SECONDS)])


def test_jobs_hosts_and_rendezvous_have_names_of_their_own(place: Place) -> None:
    others = [
        Place(launcher="srun", job="other", host=3, num_hosts=4, rendezvous=()),
        Place(launcher="srun", job=place.job, host=2, num_hosts=4, rendezvous=()),
        Place(
            launcher="srun", job=place.job, host=3, num_hosts=4, rendezvous=(Address("h", 29501),)
        ),
    ]
    names = {local_rendezvous._name_of(each) for each in (place, follower(place, 1), *others)}
    assert len(names) == 4
    assert place.job.encode() not in b"".join(names)


@pytest.mark.thorough
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a process as another user")
def test_another_user_is_turned_away(place: Place) -> None:
    code = (
        "import os, socket, sys\n"
        "os.seteuid(65534)\n"
        "sock = socket.socket(socket.AF_UNIX)\n"
        "sock.connect(bytes.fromhex(sys.argv[1]))\n"
        "print(sock.recv(100))"
    )
    with threads() as call:
        leading = call(lead, place, 1, 3.0)
        with connected(place):
            pass  # now somebody listens
        name = local_rendezvous._name_of(place).hex()
        said = subprocess.run(
            [sys.executable, "-I", "-c", code, name],
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert (said.stdout, said.stderr) == ("b''\n", "")
        with pytest.raises(WorkerError, match=r"refused, .*: it runs as another user"):
            leading.result()


def test_a_peer_that_has_ended() -> None:
    """Its end is seen, though it is nobody's child here and its socket is still open."""
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")  # a name that the kernel gives
        listener.listen()
        code = (
            "import socket, sys\n"
            "sock = socket.socket(socket.AF_UNIX)\n"
            "sock.connect(bytes.fromhex(sys.argv[1]))\n"
            "sys.stdin.read()"
        )
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", code, listener.getsockname().hex()],
            stdin=subprocess.PIPE,
        )
        accepted, _ = listener.accept()
        peer = PeerProcess(accepted)
        assert (peer.pid, user_of(accepted)) == (process.pid, os.geteuid())
        assert (peer.has_ended(), peer.is_ending()) == (False, False)
        process.communicate(timeout=SECONDS)
        assert (peer.has_ended(), peer.is_ending()) == (True, True)
        peer.close()
