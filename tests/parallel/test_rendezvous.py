"""Hosts find each other; whoever does not come, or does not fit, is named on all of them."""

import contextlib
import errno
import itertools
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest

from lockstep.channel.polling import Stopwatch
from lockstep.cluster.place import Address, Place
from lockstep.errors import HostError
from lockstep.launch import notices
from lockstep.launch.rendezvous import host_rendezvous, rendezvous_server
from lockstep.launch.rendezvous.control_group import ControlGroup, HostInfo
from lockstep.launch.rendezvous.framed_channel import Frame, FramedChannel
from lockstep.launch.rendezvous.host_rendezvous import RendezvousClient, meet
from lockstep.launch.rendezvous.pair_channels import open_channels
from lockstep.launch.rendezvous.rendezvous_server import Deadline, RendezvousServer
from lockstep.launch.security.secret import Secret
from lockstep.launch.sockets import resolve
from tests.control_groups import (
    SECONDS,
    SECRET,
    address,
    enter,
    form,
    free_port,
    info,
    is_connected,
    listening_ports,
    num_descriptors,
    on_all,
    place,
    together,
)


def close(results: Iterable[Any]) -> None:
    for result in results:
        assert isinstance(result, ControlGroup), result
        result.close()


def messages(results: Iterable[Any]) -> list[str]:
    listed = list(results)
    assert all(type(result) is HostError for result in listed), listed
    return [str(result) for result in listed]


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once a host has handed in its info to host 0."""
    event = threading.Event()
    genuine = RendezvousServer._admit

    def enter_and_tell(self: RendezvousServer, channel: FramedChannel, frame: Frame) -> None:
        genuine(self, channel, frame)
        event.set()

    monkeypatch.setattr(RendezvousServer, "_admit", enter_and_tell)
    return event


class Watch(Stopwatch):
    """Says that time is up once something is so, and not before."""

    def __init__(self, is_up: Callable[[], bool]) -> None:
        super().__init__()
        self._is_up = is_up

    def tick(self) -> float:
        self.seconds = math.inf if self._is_up() else 0.0
        return self.seconds


def deadline(is_up: Callable[[], bool]) -> Deadline:
    """That of a host which waits until something is so."""

    def give_up(waited_seconds: float) -> None:
        assert time.monotonic() - began < SECONDS

    began = time.monotonic()
    return Deadline(watch=Watch(is_up), timeout_seconds=SECONDS, look_around=give_up)


@pytest.mark.parametrize("num_hosts", [1, 2, 5])
def test_everybody_gets_all_cards(num_hosts: int) -> None:
    groups = form(num_hosts)
    for host, group in enumerate(groups):
        assert (group.host, group.num_hosts) == (host, num_hosts)
        assert group.infos == [info(other) for other in range(num_hosts)]
        assert group.name_of(num_hosts - 1) == f"Host {num_hosts - 1} (node{num_hosts - 1})"
    close(groups)


def test_one_host_needs_neither_secret_nor_socket() -> None:
    num_open = num_descriptors()
    group = meet(place(0, 1), None, info(0), timeout_seconds=0.0)
    assert num_descriptors() == num_open
    assert group.exchange(b"x") == group.gather(b"x") == [b"x"]
    assert group.broadcast(b"x") == b"x"
    group.look_around()
    assert open_channels(group, {}, 1.0) == {}
    group.close()


def test_nothing_listens_afterwards_and_no_descriptor_is_left() -> None:
    num_open, listening = num_descriptors(), listening_ports()
    where = address()
    groups = together(*(partial(enter, host, 3, where) for host in range(3)))
    assert listening_ports() <= listening
    assert num_descriptors() == num_open + 4  # two channels, both ends here
    close(groups)
    assert num_descriptors() == num_open


def test_host_0_listens_at_its_address_only() -> None:
    where = address("127.0.0.2")
    answers: list[int] = []

    def look_around(waited_seconds: float) -> None:
        for name in ("127.0.0.1", where.name):
            with socket.socket() as sock:
                answers.append(sock.connect_ex((name, where.port)))
        assert where.port in listening_ports()
        if len(answers) > 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        meet(place(0, 2, where), SECRET, info(0), timeout_seconds=SECONDS, look_around=look_around)
    assert set(answers[::2]) == {errno.ECONNREFUSED}
    assert set(answers[1::2]) == {0}


def test_the_others_may_come_first() -> None:
    where = address()

    def late() -> ControlGroup:
        time.sleep(0.7)
        return enter(0, 3, where)

    close(together(late, *(partial(enter, host, 3, where) for host in (1, 2))))


def test_a_name_may_become_known_later(monkeypatch: pytest.MonkeyPatch) -> None:
    where = Address(name="host-0.example", port=free_port())
    known_from = time.monotonic() + 0.5

    def resolve_late(name: Address) -> Any:
        if time.monotonic() < known_from:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(Address(name="127.0.0.1", port=name.port))

    monkeypatch.setattr(rendezvous_server, "resolve", resolve_late)
    monkeypatch.setattr(host_rendezvous, "resolve", resolve_late)
    close(together(*(partial(enter, host, 2, where) for host in range(2))))


def test_the_first_candidate_that_is_free_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when others listen at the candidates before it, and say nothing or nonsense."""
    monkeypatch.setattr(host_rendezvous, "_CALL_SECONDS", 0.5)
    with contextlib.ExitStack() as stack:
        silent, rude = (stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in "12")
        rude.settimeout(SECONDS)

        def be_rude() -> None:
            sock, _ = rude.accept()
            with sock:
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\nServer: longer than a greeting\r\n\r\n")

        thread = threading.Thread(target=be_rude)
        thread.start()
        ports = [server.getsockname()[1] for server in (rude, silent)]
        where = [*(Address(name="127.0.0.1", port=port) for port in ports), address()]
        close(together(*(partial(enter, host, 2, *where) for host in range(2))))
        thread.join(SECONDS)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (Address(name="192.0.2.1", port=4000), "192.0.2.1:4000: Cannot assign requested address"),
        (Address(name="0.0.0.0", port=4000), "0.0.0.0:4000: it means all interfaces"),
        (Address(name="::", port=4000), r"\[::\]:4000: it means all interfaces"),
    ],
)
def test_addresses_at_which_host_0_can_never_listen(where: Address, message: str) -> None:
    with pytest.raises(HostError, match=message):
        enter(0, 2, where)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts say what they wait for after a tenth of a second."""
    monkeypatch.setattr(notices, "FIRST_NOTICE_SECONDS", 0.1)


@pytest.mark.usefixtures("soon")
def test_an_address_that_stays_taken(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = Address(name="127.0.0.1", port=server.getsockname()[1])
        with pytest.raises(HostError, match=f"able to listen.*{where}: Address already in use"):
            enter(0, 2, where, timeout=0.3)
    assert capfd.readouterr().err == (
        f"Host 0 cannot listen at the rendezvous: {where}: Address already in use. It tries again "
        "for 0.3 s; if this stays so, name another rendezvous.\n"
    )


@pytest.mark.thorough
def test_missing_hosts_are_named_on_all_that_came(capfd: pytest.CaptureFixture[str]) -> None:
    where = address()
    first, second = together(
        partial(enter, 0, 5, where, timeout=6.0), partial(enter, 2, 5, where, timeout=SECONDS)
    )
    for message in messages([first, second]):
        assert f"All 5 hosts must connect to host 0 at {where} within 6.0 s." in message
        assert "no connection from hosts 1, 3, 4" in message
        assert "only this machine can reach" in message
    told = f"Waiting at {where} for 3 of 5 hosts: hosts 1, 3, 4.\n"
    assert capfd.readouterr().err == 2 * told  # by both


def test_a_host_that_was_let_in_names_the_missing_ones_itself() -> None:
    where = address()
    host_0 = RendezvousServer(
        place(0, 3, where), SECRET, info(0), deadline(lambda: host_0.left != "")
    )
    host_2 = RendezvousClient(
        place(2, 3, where), SECRET, info(2), deadline(lambda: host_2.missing == [1])
    )
    first, second = together(host_0.run, host_2.join)
    assert "no connection from host 1, on host 2" in str(second)
    assert "no connection from hosts 1, 2; Host 2 (node2, 127.0.0.1) joined and left again" in str(
        first
    )


def enter_fewer(
    host: int,
    num_hosts: int,
    where: Address,
    min_hosts: int,
    timeout: float,
    patience: float = math.inf,
) -> ControlGroup:
    """Meet as one of hosts that may go on without the others."""
    own = place(host, num_hosts, where, min_hosts=min_hosts)
    return meet(own, SECRET, info(host), timeout_seconds=timeout, patience_seconds=patience)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("timeout", "patience"), [(3.0, math.inf), (SECONDS, 3.0)], ids=["timeout", "patience"]
)
def test_hosts_that_have_come_go_on_without_the_others(
    timeout: float, patience: float, capfd: pytest.CaptureFixture[str]
) -> None:
    where, hosts = address(), (0, 2, 3)
    # Host 0 says when time is up: by themselves the others would give up before.
    own = partial(enter_fewer, 0, 5, where, 3, timeout, patience)
    others = [partial(enter_fewer, host, 5, where, 3, 2.5) for host in hosts[1:]]
    groups = together(own, *others)
    for number, group in enumerate(groups):
        assert isinstance(group, ControlGroup), group
        assert (group.host, group.num_hosts) == (number, 3)
        assert group.infos == [info(host) for host in hosts]
    answers = on_all(groups, lambda group: group.exchange(b"%d" % group.host))
    assert answers == [[b"0", b"1", b"2"]] * 3
    groups[2].fail("tired")
    with pytest.raises(HostError, match=r"Host 2 \(node3\) failed: tired"):
        groups[0].exchange(b"")
    close(groups)
    told = capfd.readouterr().err
    assert "3 of 5 hosts start: Host 0 (node0), Host 2 (node2), Host 3 (node3). No conn" in told
    assert "from hosts 1, 4 in 3.0 s.\n" in told


def test_a_host_that_goes_while_the_group_is_closed_is_lost_to_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    genuine = FramedChannel.send

    def go_away(self: FramedChannel, kind: bytes, *rest: Any) -> None:
        if kind == rendezvous_server.INFOS and self.peer.host == 1:
            self._channel.socket.shutdown(socket.SHUT_RDWR)
            raise HostError.of_loss(f"{self.peer} no longer answers.")
        genuine(self, kind, *rest)

    monkeypatch.setattr(FramedChannel, "send", go_away)
    where = address()
    seconds = {1: 2.0}  # it calls until then, in vain
    own, gone, other = together(
        *(partial(enter, host, 3, where, timeout=seconds.get(host, SECONDS)) for host in range(3))
    )
    assert isinstance(gone, HostError)
    monkeypatch.undo()
    for error in together(*(partial(group.exchange, b"") for group in (own, other))):
        assert isinstance(error, HostError), error
        assert error.is_loss, error
    own.close()
    other.close()


def test_host_0_goes_on_alone() -> None:
    group = enter_fewer(0, 2, address(), 1, 0.5)
    assert (group.host, group.infos) == (0, [info(0)])
    assert group.exchange(b"x") == [b"x"]
    group.close()


def test_all_that_come_in_time_are_taken() -> None:
    where = address()
    groups = together(*(partial(enter_fewer, host, 3, where, 1, SECONDS) for host in range(3)))
    assert [group.num_hosts for group in groups] == [3, 3, 3]
    close(groups)


def test_fewer_than_must_be_are_an_error_that_names_who_is_missing() -> None:
    where = address()
    results = together(*(partial(enter_fewer, host, 5, where, 3, 2.0) for host in (0, 2)))
    for message in messages(results):
        assert f"At least 3 of 5 hosts must connect to host 0 at {where} within 2.0 s." in message
        assert "no connection from hosts 1, 3, 4" in message


def test_a_host_that_comes_too_late_is_told_what_to_do() -> None:
    with pytest.raises(HostError, match=r"Host 1 must reach host 0.*Connection refused.*without"):
        enter_fewer(1, 3, address(), 2, 0.5)


@pytest.mark.usefixtures("soon")
def test_no_host_0(capfd: pytest.CaptureFixture[str]) -> None:
    where = address()
    with pytest.raises(HostError, match=f"Host 1 must reach host 0.*{where}: Connection refused"):
        enter(1, 2, where, timeout=0.5)
    assert capfd.readouterr().err == f"Waiting for host 0 at {where}: Connection refused.\n"


def test_another_secret_or_job_is_no_way_in() -> None:
    where = address()
    secret = Secret(b"what somebody made up", "a hat")
    mine, theirs = be_refused(where, place(1, 2, where), secret)
    assert "1 connections were refused, the last: 127.0.0.1: it has another secret" in str(mine)
    assert str(theirs).startswith(
        f"Host 0 and host 1 must have the same secret. Received: {where}: it has another secret "
        "than this host, whose secret is from a hat."
    )
    for text in (str(mine), str(theirs)):
        assert "made up" not in text
        assert "nobody else" not in text
    wrong_job = be_refused(where, place(1, 2, where, job="another"), SECRET)
    for text in messages(wrong_job):
        assert "it belongs to another job, with the same secret" in text


def be_refused(where: Address, own: Place, secret: Secret) -> list[Any]:
    """What host 0 and another say that wait until the other was turned away."""

    def is_refused() -> bool:
        return "another" in caller.answers.get(str(where), "")

    def join() -> ControlGroup:
        try:
            return caller.join()
        finally:
            has_left.set()

    has_left = threading.Event()
    caller = RendezvousClient(own, secret, info(1), deadline(is_refused))
    host_0 = RendezvousServer(place(0, 2, where), SECRET, info(0), deadline(has_left.is_set))
    return together(host_0.run, join)


def test_facts_that_differ_are_named_on_all_hosts(entered: threading.Event) -> None:
    where = address()
    unlike = HostInfo(facts={"Lockstep": "2", "torch": "2.11.0"}, about={"name": "old"})
    own = HostInfo(facts={"Lockstep": "2", "torch": "2.13.0", "Python": "3.11"}, about={})
    like = HostInfo(facts=own.facts, about={})
    results = together(
        partial(meet, place(0, 3, where), SECRET, own, timeout_seconds=SECONDS),
        partial(meet, place(1, 3, where), SECRET, like, timeout_seconds=SECONDS),
        partial(meet_later, entered, place(2, 3, where), unlike),
    )
    for message in messages(results):
        assert "torch is 2.13.0 on host 0 and 2.11.0 on host 2" in message
        assert "Python is 3.11 on host 0 and unknown on host 2" in message
        assert "Lockstep is" not in message
        assert "Host 2 (old) at 127.0.0.1" in message


def test_all_must_be_told_how_many_go_on(entered: threading.Event) -> None:
    where = address()
    results = together(
        partial(enter_fewer, 0, 3, where, 2, SECONDS),
        partial(enter_fewer, 1, 3, where, 2, SECONDS),
        partial(meet_later, entered, place(2, 3, where), info(2)),
    )
    for message in messages(results):
        assert "same number of hosts. Received: 2 to 3 on host 0, 3 on Host 2 (node2)" in message


def meet_later(entered: threading.Event, own: Place, own_info: HostInfo) -> ControlGroup:
    """As the last: host 0 dismisses all, and who came then would not hear of it."""
    assert entered.wait(SECONDS)
    return meet(own, SECRET, own_info, timeout_seconds=SECONDS)


@pytest.mark.parametrize(
    ("own", "num_hosts", "message"),
    [
        (1, 3, "one process may lead host 1. Received: Host 1 (node1, 127.0.0.1) and Host 1"),
        (2, 4, "the same number of hosts. Received: 3 on host 0, 4 on Host 2 (node2)"),
        (3, 3, "must have numbers from 1 to 2. Received: Host 3 (node3) at 127.0.0.1"),
    ],
)
def test_numbers_that_cannot_be(
    own: int, num_hosts: int, message: str, entered: threading.Event
) -> None:
    where = address()
    results = together(
        partial(enter, 0, 3, where),
        partial(enter, 1, 3, where),
        partial(meet_later, entered, place(own, num_hosts, where), info(own)),
    )
    assert all(message in text for text in messages(results)), results


def test_a_host_that_dies_before_all_are_there_may_come_again(entered: threading.Event) -> None:
    where = address()
    script = (
        "from tests.control_groups import Address, enter\n"
        f"enter(1, 3, Address(name='127.0.0.1', port={where.port}))"
    )
    came_again = threading.Event()

    def come_twice() -> ControlGroup:
        path = {"PYTHONPATH": os.pathsep.join(sys.path)}
        with subprocess.Popen([sys.executable, "-c", script], env=os.environ | path) as process:
            while not is_connected(where.port):
                assert process.poll() is None
                time.sleep(0.02)
            assert entered.wait(SECONDS)
            process.kill()
        came_again.set()
        return enter(1, 3, where)

    def come_last() -> ControlGroup:
        assert came_again.wait(2 * SECONDS)
        return enter(2, 3, where)

    patient = partial(enter, 0, 3, where, timeout=2 * SECONDS)  # an interpreter starts meanwhile
    close(together(patient, come_twice, come_last))


@pytest.mark.thorough
@pytest.mark.parametrize("host", [0, 1])
def test_whoever_waits_can_give_up(host: int) -> None:
    num_open, listening = num_descriptors(), listening_ports()
    waited: list[float] = []

    def look_around(waited_seconds: float) -> None:
        waited.append(waited_seconds)
        if len(waited) > 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        meet(
            place(host, 2, address()),
            SECRET,
            info(host),
            timeout_seconds=SECONDS,
            look_around=look_around,
        )
    assert all(after >= before for before, after in itertools.pairwise(waited))
    assert listening_ports() <= listening
    assert num_descriptors() == num_open


def test_when_host_0_gives_up_the_others_learn_it(entered: threading.Event) -> None:
    where = address()

    def look_around(waited_seconds: float) -> None:
        if entered.is_set():
            raise KeyboardInterrupt

    own = partial(meet, place(0, 3, where), SECRET, info(0), timeout_seconds=SECONDS)
    results = together(partial(own, look_around=look_around), partial(enter, 1, 3, where))
    assert isinstance(results[0], KeyboardInterrupt)
    assert str(results[1]) == "Host 0 (node0) gave up: KeyboardInterrupt()."
