"""Teams: calls, kept and fresh helpers, and starts that fail."""

import gc
import os
import pickle
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from lockstep.errors import WorkerError
from lockstep.launch.workers import fork_server as template_module
from lockstep.launch.workers.fork_server import ForkedHelper, ForkServer
from lockstep.launch.workers.link import Link, Message
from lockstep.launch.workers.pool import take_team, warm_server
from lockstep.launch.workers.team import Team
from tests.control_groups import num_descriptors
from tests.faults.processes import is_alive, wait_until
from tests.parallel import calls
from tests.thorough import core_of


def call(team: Team, function: calls.Part, body: bytes = b"", timeout_seconds: float = 60) -> None:
    team.call(function, body, position=lambda rank: f"at {rank}", timeout_seconds=timeout_seconds)


def ignore_data(team: Team, seconds: bytes, timeout_seconds: float = 60) -> None:
    """A call in which rank 1 does not read; returns when all have come to it."""
    call(team, calls.ignore_data, seconds, timeout_seconds)
    team.gather(60)


@pytest.fixture
def team() -> Iterator[Team]:
    team = calls.start_team(3)
    yield team
    team.close()


def test_calls_in_a_row(team: Team) -> None:
    for number in range(20):
        call(team, calls.echo, b"%d" % number)
        assert [payload for payload, _ in team.gather(60)] == [b"%d" % number] * 2
        team.finish(60)
    assert team.answers()


def test_a_failure_is_seen_behind_data(team: Team) -> None:
    """Rank 0 has not asked for the data yet, and must not wait for its timeout."""
    call(team, calls.talk_and_fail)
    with pytest.raises(WorkerError, match=r"Rank 1 failed \(at 1\): ValueError: after the data"):
        wait_until(lambda: team.look_around() is not None, 30)  # type: ignore[func-returns-value]


def test_the_failure_of_a_rank_that_is_not_awaited_is_kept_back(team: Team) -> None:
    call(team, calls.talk_and_fail)
    for _ in range(20):
        team.look_around(lambda rank: rank != 1)
        time.sleep(0.01)
    assert len(team.gather(60)) == 2
    with pytest.raises(WorkerError, match="Rank 1 failed"):
        team.finish(60)


def test_a_gather_sees_the_failure_of_another(team: Team) -> None:
    call(team, calls.talk_and_fail)
    team.gather(60)
    began = time.monotonic()
    with pytest.raises(WorkerError, match="Rank 1 failed"):
        team.gather(60)
    assert time.monotonic() - began < 30


def test_more_data_than_a_socket_holds_for_a_rank_that_does_not_read(team: Team) -> None:
    ignore_data(team, b"0.3")
    for _ in range(3):
        team.broadcast(b"x" * 5_000_000)
    team.finish(60)


def test_data_for_a_rank_that_never_reads(team: Team) -> None:
    ignore_data(team, b"60", timeout_seconds=0.5)
    with pytest.raises(WorkerError, match="ignore_data"):
        team.broadcast(b"x" * 5_000_000)


def test_output_is_flushed_after_a_call(team: Team, capfd: pytest.CaptureFixture[str]) -> None:
    fresh = calls.start_team(2)  # kept ones were started with another standard output
    call(fresh, calls.print_and_return, b"without an end of line")
    fresh.finish(60)
    fresh.close()
    assert capfd.readouterr().out == "without an end of line"
    assert team.is_alive


def test_idle_helpers_are_asked_before_they_are_used(team: Team) -> None:
    assert team.answers()
    os.kill(team.pids()[0], signal.SIGSTOP)
    began = time.monotonic()
    assert (team.is_alive, team.answers()) == (True, False)
    assert time.monotonic() - began < 10
    team.close()
    assert (team.is_alive, team.answers()) == (False, False)


def num_naps(pid: int) -> int:
    """How often a process has gone to sleep so far."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("voluntary_ctxt_switches:")[2].split()[0])


@pytest.mark.thorough
def test_idle_helpers_sleep(team: Team) -> None:
    """A hundred of them would take a core if each looked around 50 times a second."""
    assert team.answers()
    time.sleep(2.5)
    before = [num_naps(pid) for pid in team.pids()]
    time.sleep(1.0)
    assert all(num_naps(pid) - naps < 10 for pid, naps in zip(team.pids(), before, strict=True))
    assert team.answers()


@pytest.mark.parametrize(
    ("program", "expected"),
    core_of(
        [
            ("/nonexistent/python", r"could not be started. Received: .*No such file"),
            ("/", r"could not be started. Received: .*Permission denied"),
            # The ranks' template is gone: which of them is looked at first after that is chance.
            ("/bin/false", r"Rank [12]'s process could not start: it exited with status 1"),
            ("broken", r"(?s)could not start: it exited with status 3.*standard error:\nsorry"),
            ("silent", r"(?s)could not start: it is not ready after 1 s"),
        ],
        lambda program, _: program == "broken",
    ),
)
def test_interpreters_that_do_not_start(
    program: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = {"broken": "echo sorry >&2; exit 3", "silent": "exec sleep 100"}
    timeout_seconds = 1.0 if program == "silent" else 60.0
    if program in scripts:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{scripts[program]}\n")
        path.chmod(0o755)
        program = str(path)
    monkeypatch.setattr(sys, "executable", program)
    gc.collect()  # what other tests have left behind
    before = num_descriptors()
    with pytest.raises(WorkerError, match=expected):
        start_and_end(partial(ForkServer, None, ()), timeout_seconds)
    assert num_descriptors() == before


def start_and_end(make_template: Callable[[], ForkServer], timeout_seconds: float = 60.0) -> None:
    team = Team(
        2, lambda rank: ForkedHelper(make_template(), rank), start_timeout_seconds=timeout_seconds
    )
    try:
        team.wait_until_ready()
    finally:
        team.close()


def test_an_import_that_fails_shows_its_traceback() -> None:
    with pytest.raises(WorkerError, match="No module named 'no_such_module'"):
        start_and_end(partial(ForkServer, None, ("no_such_module",)))


def test_a_template_that_is_stopped_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "_END_TIMEOUT_SECONDS", 1.0)
    template = ForkServer(None, ())
    team = Team(1, partial(ForkedHelper, template))
    pids = team.pids()
    template._process.send_signal(signal.SIGSTOP)
    team.close()
    assert not template.is_alive
    wait_until(lambda: not is_alive(pids[0]), 15)


def test_a_template_is_made_anew_when_what_libraries_read_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = warm_server(1, ())
    assert warm_server(1, ()) is first
    monkeypatch.setenv("SOME_OTHER_VARIABLE", "1")
    assert warm_server(1, ()) is first
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    second = warm_server(1, ())
    assert second is not first
    second.close()
    monkeypatch.undo()
    third = warm_server(1, ())
    assert third is not second
    assert third.is_alive


@pytest.mark.thorough
def test_variables_reach_helpers_of_a_template_that_is_older(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    warm_server(1, ())
    monkeypatch.setenv("SOME_OTHER_VARIABLE", "its value")
    team = take_team(1, 1)
    call(team, calls.print_variable, b"SOME_OTHER_VARIABLE")
    team.finish(60)
    team.close()
    assert capfd.readouterr().out == "its value\n"


def test_a_fork_that_fails_is_reported(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In the template's own code, here in this process."""

    def refuse() -> int:
        raise BlockingIOError("no more processes")

    link, _ = ends = Link.pair()
    reports, writer = os.pipe()
    passed = os.dup(0)
    fork_server = template_module._ServerLoop(link, writer)
    monkeypatch.setattr(os, "fork", refuse)
    fork_server._fork(Message(template_module.FORK, pickle.dumps((7, 1, [], {})), (passed,)))
    assert struct.unpack("<qi", os.read(reports, 100)) == (7, 1)
    assert "no more processes" in capfd.readouterr().err
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(passed)
    for end in (*ends, fork_server._wakeup, fork_server._woken):
        end.close()
    os.close(reports)
    os.close(writer)


@pytest.mark.thorough
def test_without_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS: each helper is an interpreter of its own."""
    monkeypatch.setattr(template_module, "FORKS", False)
    before = num_descriptors()
    team = Team(2, lambda rank: ForkedHelper(ForkServer(1, ()), rank))
    pids = team.pids()
    assert len(set(pids)) == 2
    for body in (b"one", b"two"):
        call(team, calls.echo, body)
        assert [payload for payload, _ in team.gather(60)] == [body] * 2
        team.finish(60)
    assert team.answers()
    ignore_data(team, b"60", timeout_seconds=0.5)
    with pytest.raises(WorkerError, match="ignore_data"):
        team.broadcast(b"x" * 5_000_000)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"Rank 2 .*killed by SIGKILL"):
        team.finish(60)
    team.close()
    wait_until(lambda: not any(is_alive(pid) for pid in pids), 15)
    del team
    assert num_descriptors() <= before


@pytest.mark.exhaustive
def test_a_template_imports_once_for_all_later_helpers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be imported there does it no harm."""
    (tmp_path / "imported_once.py").write_text(
        "with open(__file__ + '.log', 'a') as log:\n    log.write('x')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    template = ForkServer(None, ())
    try:
        start_and_end(lambda: template)
        template.load(["imported_once", "no_such_module"])
        template.load(["imported_once"])
        team = Team(2, partial(ForkedHelper, template))
        call(team, calls.tell_modules, b"imported_once")
        assert [payload for payload, _ in team.gather(60)] == [b"True"] * 2
        team.finish(60)
        team.close()
    finally:
        template.close()
    assert (tmp_path / "imported_once.py.log").read_text() == "x"
