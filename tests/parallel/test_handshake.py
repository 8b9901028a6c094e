"""Only who knows the secret, and calls for what is expected, gets in; the others do no harm."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from lockstep.channel.sealed_channel import Channel
from lockstep.launch.rendezvous import rendezvous_server
from lockstep.launch.rendezvous.control_group import ControlGroup
from lockstep.launch.security import handshake
from lockstep.launch.security.handshake import Admission, Gate, HandshakeError, call, purpose_of
from lockstep.launch.security.secret import Secret
from lockstep.launch.sockets import listen
from tests import channels
from tests.control_groups import SECONDS, SECRET, address, enter, num_descriptors, together

PURPOSE = purpose_of("rendezvous", "job")
OTHER_SECRET = Secret(b"what somebody made up, at length")
NUM_ATTACKS = 10_000
GREETING_BYTES, PROOFS_BYTES = 72, 64

Where = tuple[str, int]


def wait(waited_seconds: float) -> None:
    assert waited_seconds < SECONDS


def dial(where: Where, secret: Secret = SECRET, purpose: bytes = PURPOSE) -> Channel:
    return call(socket.AF_INET, where, secret, purpose, seconds=SECONDS, look_around=wait)


@contextlib.contextmanager
def gate(*purposes: bytes, once: bool = False, seconds: float = SECONDS) -> Iterator[Gate]:
    opened = Gate(
        listen(socket.AF_INET, ("127.0.0.1", 0)), SECRET, purposes, once=once, seconds=seconds
    )
    try:
        yield opened
    finally:
        opened.close()


def admit(opened: Gate, num_admissions: int, num_refused: int = 0) -> list[Admission]:
    """Keep a gate until so many have come, and so many were sent away."""
    admissions: list[Admission] = []
    end = time.monotonic() + SECONDS
    while len(admissions) < num_admissions or opened.num_refused < num_refused:
        admissions += opened.admit(0.02)
        assert time.monotonic() < end, (admissions, opened.num_refused, opened.last_refusal)
    return admissions


def refuse(secret: Secret, purpose: bytes) -> str:
    """What a gate for PURPOSE says of a caller, who must say the same of it."""
    with gate(PURPOSE) as opened:
        _, caller = together(
            partial(admit, opened, 0, 1), partial(dial, opened.address, secret, purpose)
        )
        assert isinstance(caller, HandshakeError), caller
        assert opened.last_refusal == f"127.0.0.1: {caller}"
        return str(caller)


def test_both_sides_get_the_same_connection() -> None:
    with gate(b"another", PURPOSE) as opened:
        admissions, caller = together(partial(admit, opened, 1), partial(dial, opened.address))
        (admission,) = admissions
        assert admission.purpose == PURPOSE
        for left, right in ((admission.channel, caller), (caller, admission.channel)):
            channels.send(left, b"hello")
            assert channels.receive(right) == b"hello"
            assert not os.get_inheritable(left.fileno())
            assert not left.socket.getblocking()
            assert left.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert left.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        admission.channel.close()
        caller.close()


def test_what_comes_right_after_the_handshake_is_not_lost() -> None:
    def talk_on(where: Where) -> Channel:
        channel = dial(where)
        channels.send(channel, b"first words")
        return channel

    with gate(PURPOSE) as opened:
        admissions, caller = together(partial(admit, opened, 1), partial(talk_on, opened.address))
        assert channels.receive(admissions[0].channel) == b"first words"
        admissions[0].channel.close()
        caller.close()


def test_other_secrets_and_purposes_are_refused() -> None:
    assert refuse(OTHER_SECRET, PURPOSE) == handshake.OTHER_SECRET
    assert refuse(OTHER_SECRET, b"") == handshake.OTHER_SECRET
    assert refuse(SECRET, purpose_of("rendezvous", "another job")) == handshake.OTHER_JOB
    assert refuse(SECRET, purpose_of("rendezvousjob")) == handshake.OTHER_JOB
    assert refuse(SECRET, b"") == handshake.OTHER_JOB


def test_purposes_are_told_apart() -> None:
    parts = [
        ("a", "bc"),
        ("ab", "c"),
        ("abc",),
        ("a", "b", "c"),
        ("abc", ""),
        ("", "abc"),
        (1, 2),
        (12,),
    ]
    assert len({purpose_of(*each) for each in parts}) == len(parts)


def test_a_purpose_that_is_good_for_once() -> None:
    with gate(PURPOSE, once=True) as opened:
        admissions, caller = together(partial(admit, opened, 1), partial(dial, opened.address))
        assert opened.purposes == set()
        _, second = together(partial(admit, opened, 0, 1), partial(dial, opened.address))
        assert isinstance(second, HandshakeError)
        admissions[0].channel.close()
        caller.close()


def test_an_impostor_is_found_out_by_the_caller() -> None:
    """Who listens at the rendezvous without the secret learns nothing that a gate would take."""
    with socket.create_server(("127.0.0.1", 0)) as server, gate(PURPOSE) as opened:
        server.settimeout(SECONDS)

        def pretend() -> bytes:
            sock, _ = server.accept()
            with sock:
                greeting = sock.recv(GREETING_BYTES)
                sock.sendall(greeting)  # the caller's own, sent back
                proofs = sock.recv(PROOFS_BYTES)
                sock.sendall(proofs[32:])
                assert sock.recv(1) == b""
            return greeting + proofs

        learned, caller = together(pretend, partial(dial, server.getsockname()))
        assert str(caller) == "it cannot prove that it knows the secret"
        with socket.create_connection(opened.address, SECONDS) as sock:
            sock.sendall(learned)
            admit(opened, 0, 1)
        assert "another secret" in opened.last_refusal


@pytest.mark.thorough
def test_one_who_is_slow_keeps_nobody_waiting_and_has_to_go() -> None:
    with contextlib.ExitStack() as stack, gate(PURPOSE, seconds=5.0) as opened:
        silent = stack.enter_context(socket.create_connection(opened.address, SECONDS))
        slow = stack.enter_context(socket.create_connection(opened.address, SECONDS))
        stop = threading.Event()

        def trickle() -> None:
            with contextlib.suppress(OSError):  # once it is thrown out
                while not stop.wait(0.1):
                    slow.send(b"L")

        started = time.monotonic()
        thread = threading.Thread(target=trickle)
        thread.start()
        admissions, caller = together(partial(admit, opened, 1), partial(dial, opened.address))
        assert time.monotonic() - started < 4
        assert opened.num_refused == 0
        admit(opened, 0, 2)
        assert 4 < time.monotonic() - started < SECONDS
        assert "in time" in opened.last_refusal
        assert silent.recv(1) == b""
        stop.set()
        thread.join(SECONDS)
        admissions[0].channel.close()
        caller.close()


def test_a_crowd_makes_room_for_one_of_ours() -> None:
    num_idle = 2 * handshake._MOST_PENDING
    with contextlib.ExitStack() as stack, gate(PURPOSE) as opened:
        for _ in range(num_idle):
            stack.enter_context(socket.create_connection(opened.address, SECONDS))
        admissions, caller = together(partial(admit, opened, 1), partial(dial, opened.address))
        assert opened.num_refused >= num_idle - handshake._MOST_PENDING
        admissions[0].channel.close()
        caller.close()


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-OpenSSH_9.6\r\n" * 3])
def test_calling_one_who_is_none_of_ours(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(SECONDS)

        def serve() -> None:
            with server.accept()[0] as sock:
                sock.sendall(answer)
                sock.recv(GREETING_BYTES)

        _, caller = together(serve, partial(dial, server.getsockname()))
        assert isinstance(caller, HandshakeError | ConnectionError)
        assert ("protocol" if answer else "closed") in str(caller)


def test_calling_nobody_and_one_who_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = server.getsockname()
        with pytest.raises(HandshakeError, match="in time"):
            call(socket.AF_INET, where, SECRET, PURPOSE, seconds=0.2, look_around=wait)
    with pytest.raises(ConnectionRefusedError):
        dial(where)


# Attacks. Each takes a fresh connection, and returns whatever it was told.


def receive(sock: socket.socket) -> bytes:
    """All that comes until the connection is closed."""
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := sock.recv(4096):
            parts.append(part)
    return b"".join(parts)


def receive_greeting(sock: socket.socket) -> bytes:
    """Nothing if it is closed instead."""
    with contextlib.suppress(ConnectionError):
        return sock.recv(GREETING_BYTES, socket.MSG_WAITALL)
    return b""


def send(sock: socket.socket, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # it may be closed before all of it is sent
        sock.sendall(data)


def talk(sock: socket.socket, secret: Secret, purpose: bytes, spoil: int | None = None) -> bytes:
    """The caller's side by the book, with whatever secret and purpose, and perhaps a wrong bit."""
    steps = handshake._call_exchange(secret, purpose)
    greeting, _ = next(steps)
    send(sock, greeting)
    theirs = receive_greeting(sock)
    if not theirs:
        return b""
    steps.send(theirs[:8])
    proof = bytearray(steps.send(theirs[8:])[0])
    if spoil is not None:
        proof[spoil // 8 % PROOFS_BYTES] ^= 1 << spoil % 8
    send(sock, bytes(proof))
    return theirs + receive(sock)


def guess(sock: socket.socket, number: int) -> bytes:
    return talk(sock, Secret(b"a guess %d" % number), PURPOSE)


def misdirect(sock: socket.socket, number: int) -> bytes:
    return talk(sock, SECRET, purpose_of("channel", bytes(16), 0, 1, number))


def spoil(sock: socket.socket, number: int) -> bytes:
    return talk(sock, SECRET, PURPOSE, spoil=number)


def babble(sock: socket.socket, number: int) -> bytes:
    send(sock, os.urandom(GREETING_BYTES + PROOFS_BYTES))
    return receive(sock)


def babble_politely(sock: socket.socket, number: int) -> bytes:
    send(sock, handshake._MAGIC + os.urandom(64 + PROOFS_BYTES))
    return receive(sock)


def break_off(sock: socket.socket, number: int) -> bytes:
    send(sock, (handshake._MAGIC + os.urandom(64 + PROOFS_BYTES - 1))[: number % 135])
    sock.shutdown(socket.SHUT_WR)
    return receive(sock)


def reflect(sock: socket.socket, number: int) -> bytes:
    send(sock, handshake._greeting(X25519PrivateKey.generate()))
    theirs = receive_greeting(sock)
    send(sock, 2 * theirs[-32:])
    return theirs + receive(sock)


def overflow(sock: socket.socket, number: int) -> bytes:
    send(sock, handshake._MAGIC + os.urandom(100_000))
    return receive(sock)


def replay(recorded: bytes) -> Callable[[socket.socket, int], bytes]:
    def send_again(sock: socket.socket, number: int) -> bytes:
        send(sock, recorded)
        return receive(sock)

    return send_again


def record_one() -> bytes:
    """What a caller of ours sends in a handshake that succeeds, and a little after it."""
    with gate(PURPOSE) as opened, socket.create_server(("127.0.0.1", 0)) as tap:
        tap.settimeout(SECONDS)
        recorded = bytearray()

        def listen_in() -> None:
            caller, _ = tap.accept()
            with caller, socket.create_connection(opened.address, SECONDS) as behind:
                for num_bytes, answered in ((GREETING_BYTES, GREETING_BYTES), (PROOFS_BYTES, 32)):
                    part = caller.recv(num_bytes, socket.MSG_WAITALL)
                    recorded.extend(part)
                    behind.sendall(part)
                    caller.sendall(behind.recv(answered, socket.MSG_WAITALL))

        admissions, caller, heard = together(
            partial(admit, opened, 1), partial(dial, tap.getsockname()), listen_in
        )
        assert heard is None
        admissions[0].channel.close()
        caller.close()
    assert len(recorded) == GREETING_BYTES + PROOFS_BYTES
    return bytes(recorded)


def attack(
    where: Where, attacks: Sequence[Callable[[socket.socket, int], bytes]], numbers: range
) -> int:
    """Attack once for each number; how many attacks got a greeting and a refusal at most."""
    num_refused = 0
    for number in numbers:
        with socket.create_connection(where, SECONDS) as sock:
            answer = attacks[number % len(attacks)](sock, number)
        num_refused += answer[GREETING_BYTES:] in (b"", *handshake._REFUSALS.values())
    return num_refused


@pytest.mark.exhaustive
def test_ten_thousand_attacks_on_a_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host 0 and 1 wait for host 2; what comes instead is refused; then host 2 comes."""
    gates: list[Gate] = []

    class WatchedGate(Gate):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)  # type: ignore[arg-type]
            gates.append(self)

    monkeypatch.setattr(rendezvous_server, "Gate", WatchedGate)
    attacks = [
        guess,
        misdirect,
        spoil,
        babble,
        babble_politely,
        break_off,
        reflect,
        overflow,
        replay(record_one()),
        replay(record_one() + bytes(1000)),
    ]
    num_open = num_descriptors()
    where = address()
    target = (where.name, where.port)
    has_refused_all = threading.Event()

    def besiege() -> list[int]:
        while not gates:
            time.sleep(0.01)
        with contextlib.ExitStack() as stack:
            # And some who say nothing: more than are let in at a time.
            for _ in range(300):
                stack.enter_context(socket.create_connection(target, SECONDS))
            parts = [range(first, NUM_ATTACKS, 8) for first in range(8)]
            counts = together(*(partial(attack, target, attacks, part) for part in parts))
            has_refused_all.set()
            with contextlib.suppress(ConnectionError):  # until nobody listens any more
                attack(target, attacks, range(10**9))
        return counts

    def come_last() -> ControlGroup:
        assert has_refused_all.wait(2 * SECONDS)
        return enter(2, 3, where, timeout=SECONDS)

    results = together(
        partial(enter, 0, 3, where, timeout=2 * SECONDS),
        partial(enter, 1, 3, where, timeout=2 * SECONDS),
        come_last,
        besiege,
    )
    groups, counts = results[:3], results[3]
    assert all(isinstance(group, ControlGroup) for group in groups), results
    assert sum(counts) == NUM_ATTACKS
    assert gates[0].num_refused >= NUM_ATTACKS
    assert [each.about["name"] for each in groups[0].infos] == ["node0", "node1", "node2"]
    payloads = [b"from %d" % host for host in range(3)]
    exchanged = together(*(partial(group.exchange, b"from %d" % group.host) for group in groups))
    assert exchanged == [payloads] * 3
    for group in groups:
        group.close()
    assert num_descriptors() == num_open
