"""Hosts are lost for good, and the others go on without them, if told to, to the same bits.

Hosts that come again are in ``test_lost_hosts.py``; how they meet is in ``test_rendezvous.py``.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import host_faults
import pytest

EPOCHS = 8
GO_ON = b" hosts go on: "


@contextmanager
def under_way(
    folder: Path, strategy: str, num_hosts: int, min_hosts: int
) -> Iterator[host_faults.Run]:
    """A run of which some steps are made."""
    run = host_faults.Run(strategy, folder / "run", EPOCHS, num_hosts, min_hosts)
    every = [*run.hosts]
    try:
        steps_made(run, 7)  # and a checkpoint
        yield run
    finally:
        run.end()
        for host in every:  # those that are lost, too
            host.launcher.kill()
            host.launcher.wait()


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
        (host_faults.SHARES, 2, [1]),
        (host_faults.SHARES, 3, [1]),
        pytest.param(host_faults.SHARES, 3, [1, 1], marks=pytest.mark.thorough),
        ("Keras on 2 hosts", 2, [1]),
    ],
    ids=["two-one", "three-two", "three-two-one", "keras"],
)
def test_hosts_that_are_left_go_on_to_the_same_bits(
    strategy: str, num_hosts: int, lost: Sequence[int], tmp_path: Path
) -> None:
    with under_way(tmp_path, strategy, num_hosts, min_hosts=1) as run:
        for index in lost:
            run.lose(index)
            wait_to_go_on(run)
        assert run.hosts[0].said(b"Nothing has come from host 1 in 15.0 s") == 1
        assert run.result() == host_faults.expected(strategy, EPOCHS)
