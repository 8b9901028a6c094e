"""Hosts are lost for good, and the others go on without them, if told to, to the same bits.

Hosts that come again are in ``test_lost_hosts.py``; how they meet is in ``test_rendezvous.py``.
"""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import host_faults
import pytest

from tests.faults.host_starts import expected, how_to_start

pytestmark = pytest.mark.thorough

EPOCHS = 8
GO_ON = b" hosts start: "


@contextmanager
def under_way(
    folder: Path, strategy: str, num_hosts: int, min_hosts: int, epochs: int = EPOCHS
) -> Iterator[host_faults.Run]:
    """A run of which some steps are made."""
    run = host_faults.Run(
        *(strategy, folder / "run", epochs),
        start=how_to_start(strategy),
        num_hosts=num_hosts,
        min_hosts=min_hosts,
    )
    every = [*run.hosts]
    try:
        steps_made(run, 7)  # and a checkpoint
        yield run
    finally:
        run.end()
        for host in every:  # those that are lost, too
            host.send(signal.SIGKILL, [host.launcher.pid])
            host.launcher.wait(host_faults.WAIT_SECONDS)


def steps_made(run: host_faults.Run, number: int) -> None:
    """Wait for so many steps more."""
    before = len(run.moments())
    run.wait_for(lambda: len(run.moments()) >= before + number)
    assert not run.is_over(), run._story()


def wait_to_go_on(run: host_faults.Run) -> None:
    """Wait until fewer hosts train."""
    before = run.hosts[0].said(GO_ON)
    run.wait_for(lambda: run.hosts[0].said(GO_ON) > before)
    steps_made(run, 2)


@pytest.mark.parametrize(
    ("strategy", "num_hosts", "lost"),
    [
        (host_faults.SHARES, 3, [1, 1]),
        pytest.param("stages on 2 hosts", 2, [1], marks=pytest.mark.exhaustive),
        pytest.param("Keras on 2 hosts", 2, [1], marks=pytest.mark.exhaustive),
    ],
    ids=["three-two-one", "stages", "keras"],
)
def test_hosts_that_are_left_go_on_to_the_same_bits(
    strategy: str, num_hosts: int, lost: Sequence[int], tmp_path: Path
) -> None:
    with under_way(tmp_path, strategy, num_hosts, min_hosts=1) as run:
        for index in lost:
            run.lose(index)
            wait_to_go_on(run)
        assert run.hosts[0].said(b"No connection from host 1 in 5.0 s") == 1
        assert run.result() == expected(strategy, EPOCHS)


@pytest.mark.exhaustive
def test_the_last_host_outlives_the_loss_of_a_helper_as_one_host_does(tmp_path: Path) -> None:
    with under_way(tmp_path, host_faults.HELPED, 2, min_hosts=1) as run:
        run.lose(1)
        wait_to_go_on(run)
        (host,) = run.hosts
        host.send(signal.SIGKILL, host.named(r"lockstep:\d+")[:1])
        run.wait_for(lambda: host.said(b": resuming "))
        assert run.result() == expected(host_faults.HELPED, EPOCHS)
        assert host.said(b": waiting for all hosts") == 1, "for the one that was lost"


@pytest.mark.exhaustive
def test_a_host_that_comes_late_joins_the_others_when_they_meet_again(tmp_path: Path) -> None:
    with under_way(tmp_path, host_faults.SHARES, 3, min_hosts=2, epochs=40) as run:
        late = run.lose(1)
        wait_to_go_on(run)
        late.start()
        run.wait_for(lambda: late.named("python"))
        steps_made(run, 2)  # it disturbs nobody
        # A script that is started again waits for all.
        run.hosts[0].send(signal.SIGKILL, run.hosts[0].pids()[1:2])
        run.hosts.insert(1, late)
        assert run.result() == expected(host_faults.SHARES, 40)
        assert run.hosts[0].said(GO_ON) == 1


@pytest.mark.exhaustive
def test_replicas_that_train_apart_go_on_with_their_average(tmp_path: Path) -> None:
    with under_way(tmp_path, "averages on 2 hosts", 2, min_hosts=1) as run:
        run.lose(1)
        wait_to_go_on(run)
        run.wait_for(lambda: run.hosts[0].said(b"RESULT"))


@pytest.mark.thorough
def test_what_fewer_hosts_cannot_do_is_one_error(tmp_path: Path) -> None:
    with under_way(tmp_path, "compressed on 2 hosts", 2, min_hosts=1) as run:
        run.lose(1)
        run.wait_for(lambda: run.hosts[0].said(b"; restart 1 of"))
        assert run.hosts[0].said(b" with 1 host. Leave it out") == 1
