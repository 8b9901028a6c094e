"""Hosts are lost and come again, and the training has the bits of one host that nothing befell.

The long form is ``bench/soak.py``, whose faults these are.
"""

import os
import random
import signal
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import host_faults
import pytest

from lockstep.errors import OptionError
from lockstep.train.lost_hosts import check_restarts_on
from tests import warm
from tests.thorough import core_of

ROWS = [
    (strategy, fault, host)
    for strategy in host_faults.STRATEGIES
    for fault in host_faults.faults_of(strategy)
    for host in range(2)
]
# Their launchers start as users start them; the others are forks of warm interpreters.
FRESH = [("replicas on 2 hosts", "host", 0), ("Keras on 2 hosts", "host", 1)]

expected = cache(host_faults.expected)


def fork(kind: str, command: list[str], out: int) -> warm.Process:
    environment = {**os.environ, **warm.VARIABLES}
    order = warm.Order(words=command[1:], environment=environment, directory=os.getcwd())
    return warm.start(kind, order, out, out)


def how_to_start(strategy: str) -> host_faults.Start:
    return partial(fork, "keras" if strategy.startswith("Keras") else "torch")


@pytest.mark.parametrize(
    ("strategy", "fault", "host"),
    core_of(ROWS, [("replicas on 2 hosts", "host", 0), ("stages on 2 hosts", "stop", 1)]),
)
def test_a_run_outlives_the_loss_of_a_host(strategy: str, fault: str, host: int) -> None:
    is_fresh = (strategy, fault, host) in FRESH
    start = host_faults.start_fresh if is_fresh else how_to_start(strategy)
    found, seconds = host_faults.outlived(strategy, fault, [host], random.Random(1), start)
    assert found == expected(strategy, host_faults.num_epochs(1))
    ((noticed, resumed),) = seconds
    assert noticed < 3  # of one that is stopped: before it goes on, or never
    # At the 95th percentile it is 10 (bench/), and several processes import Keras on two cores.
    assert resumed < (120 if strategy.startswith("Keras") else 30)


@pytest.mark.thorough
def test_a_host_that_was_replaced_changes_nothing_when_it_wakes(tmp_path: Path) -> None:
    strategy, epochs = "replicas on 2 hosts", 20
    run = host_faults.Run(strategy, tmp_path / "run", epochs, how_to_start(strategy))
    host = run.hosts[1]
    launcher, stopped = host.launcher, host.pids()
    try:
        run.wait_for(lambda: len(run.moments()) > 10)
        stopped = host.pids()
        host.send(signal.SIGSTOP, stopped)
        run.wait_for(lambda: run.hosts[0].said(b" Restart ") > 0)
        host.start()
        before = len(run.moments())
        run.wait_for(lambda: len(run.moments()) > before)
        host.send(signal.SIGCONT, stopped)
        assert run.result() == expected(strategy, epochs)
    finally:
        host.send(signal.SIGKILL, [launcher.pid])  # and so its script
        launcher.wait(host_faults.WAIT_SECONDS)
        run.end()


@pytest.mark.parametrize(("launcher", "has_checkpoint"), [("torchrun", True), ("TF_CONFIG", False)])
def test_restarts_after_which_nobody_could_go_on_are_refused(
    launcher: str, has_checkpoint: bool
) -> None:
    place = SimpleNamespace(launcher=launcher, num_processes=2)
    hosts: Any = SimpleNamespace(
        has_followers=launcher == "torchrun", place=place, is_one_process=False
    )
    check_restarts_on(hosts, 0, has_checkpoint=has_checkpoint, reach="all hosts")
    with pytest.raises(OptionError, match="need a checkpoint, and one process"):
        check_restarts_on(hosts, 1, has_checkpoint=has_checkpoint, reach="all hosts")
    hosts.is_one_process = True
    check_restarts_on(hosts, 1, has_checkpoint=has_checkpoint, reach="all hosts")
