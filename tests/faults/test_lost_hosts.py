"""Hosts are lost and come again, and the training has the bits of one host that nothing befell.

The long form is ``bench/soak.py``, whose faults these are.
"""

import random
import shutil
import signal
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import host_faults
import pytest

from lockstep.checkpoint.reading import read_newest
from lockstep.errors import OptionError
from lockstep.train.fault_tolerance.lost_hosts import check_host_restarts
from tests.faults import host_copies
from tests.faults.host_copies import TORN
from tests.faults.host_starts import expected, how_to_start
from tests.thorough import core_of

ROWS = [
    (strategy, fault)
    for strategy in host_faults.STRATEGIES
    for fault in host_faults.faults_of(strategy)
    if fault == "host" or not strategy.startswith("Keras")
]
# Its launchers start as users start them; the others are forks of warm interpreters.
FRESH = [("replicas on 2 hosts", "host")]

# An epoch takes some seconds, and there is one checkpoint, before the first step.
LONG_EPOCH, EPOCHS = 300, 1
COPIED_SECONDS = 2.5  # in which a copy was taken, and has come to the other host
SOON_SECONDS = 15.0  # on a busy machine; else a moment
COPYING = str(Path(host_copies.__file__))


@pytest.mark.parametrize(
    ("strategy", "fault"),
    core_of(ROWS, [("replicas on 2 hosts", "host")], []),
)
def test_a_run_outlives_the_loss_of_each_host(strategy: str, fault: str) -> None:
    is_fresh = (strategy, fault) in FRESH
    start = host_faults.start_fresh if is_fresh else how_to_start(strategy)
    victims = [0] if strategy.startswith("Keras") else [0, 1]  # its libraries take long to import
    found, seconds = host_faults.outlived(strategy, fault, victims, random.Random(1), start)
    assert found == expected(strategy, host_faults.num_epochs(len(victims)))
    assert len(seconds) == len(victims)
    for noticed, _ in seconds:
        assert noticed < SOON_SECONDS  # of one that is stopped: before it goes on, or never


@pytest.mark.exhaustive
def test_a_run_outlives_the_loss_of_parts_of_hosts_one_after_another(tmp_path: Path) -> None:
    """What befalls a whole host is above, and below."""
    strategy, faults = "replicas on 2 hosts", ("launcher", "stop the script")
    epochs, chance = host_faults.num_epochs(len(faults)), random.Random(1)
    run = host_faults.Run(strategy, tmp_path / "run", epochs, start=how_to_start(strategy))
    try:
        for index, fault in enumerate(faults):
            counted = host_faults.harm(run, fault, index % 2, chance)
            assert counted is not None
            assert counted[0] < SOON_SECONDS
        assert run.result() == expected(strategy, epochs)
    finally:
        run.end()


def began_anew_at(run: host_faults.Run) -> int:
    """The first step that was made after the one loss that there was."""
    numbers = run.numbers()
    (again,) = (now for last, now in pairwise(numbers) if now <= last)
    return again


def has_trained_for(run: host_faults.Run, seconds: float) -> bool:
    moments = run.moments()
    return bool(moments) and moments[-1] - moments[0] > seconds


def step_on_disk(folder: Path) -> int:
    """Of the newest checkpoint there; 0 if there is none."""
    found = read_newest(folder)
    return 0 if found is None else found.manifest.summary.step


def copying_run(strategy: str, folder: Path) -> host_faults.Run:
    start = how_to_start(strategy)
    return host_faults.Run(strategy, folder, EPOCHS, "epoch", LONG_EPOCH, COPYING, start)


def whole_epochs(strategy: str) -> object:
    return expected(strategy, EPOCHS, "epoch", LONG_EPOCH)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("strategy", "host", "is_empty"),
    core_of(
        [
            *(("replicas on 2 hosts", 0, True), ("replicas on 2 hosts", 0, False)),
            *(("replicas on 2 hosts", 1, False), ("stages on 2 hosts", 0, True)),
            *(("Keras on 2 hosts", 0, True), ("Keras on 2 hosts", 1, False)),
        ],
        [("stages on 2 hosts", 0, True)],
        [],
    ),
)
def test_between_two_checkpoints_the_memory_of_the_other_host_is_gone_on_from(
    strategy: str, host: int, is_empty: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run = copying_run(strategy, folder)
    try:
        run.wait_for(lambda: has_trained_for(run, COPIED_SECONDS))
        victim = run.hosts[host]
        victim.send(signal.SIGKILL, victim.pids())
        victim.launcher.wait(host_faults.WAIT_SECONDS)
        on_disk = read_newest(folder / "run")
        assert on_disk is not None
        assert on_disk.manifest.summary.step == 0
        if is_empty:
            shutil.rmtree(folder / "run")
        before = len(run.moments())
        victim.start()
        run.wait_for(lambda: len(run.moments()) > before)
        run.wait_for(lambda: 0 < step_on_disk(folder / "run") < LONG_EPOCH)  # it was in memory
        assert run.result() == whole_epochs(strategy)
        assert 1 < began_anew_at(run) <= LONG_EPOCH
    finally:
        run.end()


@pytest.mark.exhaustive
def test_of_a_copy_that_breaks_off_the_one_before_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TORN, "")
    folder = tmp_path / "run"
    run = copying_run("replicas on 2 hosts", folder)
    try:
        assert run.result() == whole_epochs("replicas on 2 hosts")
        assert (folder / "torn").exists()
        assert 1 < began_anew_at(run) <= LONG_EPOCH
    finally:
        run.end()


@pytest.mark.thorough
def test_a_host_that_was_replaced_changes_nothing_when_it_wakes(tmp_path: Path) -> None:
    strategy, epochs = "replicas on 2 hosts", 20
    run = host_faults.Run(strategy, tmp_path / "run", epochs, start=how_to_start(strategy))
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
    check_host_restarts(hosts, 0, has_checkpoint=has_checkpoint, reach="all hosts")
    with pytest.raises(OptionError, match="need a checkpoint, and one process"):
        check_host_restarts(hosts, 1, has_checkpoint=has_checkpoint, reach="all hosts")
    hosts.is_one_process = True
    check_host_restarts(hosts, 1, has_checkpoint=has_checkpoint, reach="all hosts")
