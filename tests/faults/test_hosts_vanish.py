"""A host vanishes, hangs, fails or leaves: the others name it in time, and nothing is left over.

Hosts are network namespaces; what happens is that a cable is pulled, or a process killed or
stopped, in the midst of training.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.processes import wait_until
from tests.launchers import PORT, by_tf_config
from tests.netns import HostProcess, Hosts
from tests.thorough import core_of

MakeHosts = Callable[[int], Hosts]

TALE = [str(Path(__file__).with_name("host_tale.py"))]
# The strategy's timeout: where it is what ends the waiting, and where it must not be.
PATIENCE, LONG_PATIENCE = 5.0, 60.0
# To say why, to end helpers, and for a machine that does other things as well.
MARGIN = 20.0
FOR_EVER = "100000"  # epochs


def begin(
    hosts: Hosts,
    how: str,
    *,
    devices: int = 2,
    epochs: str = FOR_EVER,
    patience: float = LONG_PATIENCE,
    is_awaited: bool = True,
    engine: str | None = None,
) -> list[HostProcess]:
    """The tale on two hosts, once training is under way."""
    how = how if engine is None else f"{how} over {engine}"
    script = [*TALE, how, str(patience), epochs]
    processes = [by_tf_config(hosts, host, script, (devices, devices)) for host in range(2)]
    if is_awaited:
        processes[0].wait_for_line("TRAINING")
    return processes


def failure(process: HostProcess, seconds: float = MARGIN) -> list[str]:
    """The error's class, text and notes; by default it must come before any timeout."""
    told: list[str] = json.loads(process.wait_for_line("FAILED", seconds))
    return told


def state(process: HostProcess) -> Any:
    return json.loads(process.wait_for_line("STATE"))


def assert_nothing_is_left(hosts: Hosts, *indices: int) -> None:
    wait_until(lambda: not any(map(hosts.pids, indices)), 15, lambda: "processes are left")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("devices", "engine"), core_of([(1, None), (2, None), (2, "gloo")], [(2, None)], [])
)
def test_a_host_whose_cable_is_pulled_is_named(
    make_hosts: MakeHosts, devices: int, engine: str | None
) -> None:
    hosts = make_hosts(2)
    processes = begin(hosts, "link", devices=devices, patience=PATIENCE, engine=engine)
    hosts.set_link(1, up=False)
    kind, text, notes = failure(processes[0], PATIENCE + MARGIN)
    assert kind == "HostError"
    assert "Host 1" in text
    assert "The weights" in notes
    kind, text, _ = failure(processes[1])
    assert kind == "HostError"
    assert "Host 0" in text
    for process in processes:
        process.check()
    assert_nothing_is_left(hosts, 0, 1)


@pytest.mark.parametrize("engine", core_of([None, "gloo"], [None]))
def test_a_script_that_is_killed_is_named(make_hosts: MakeHosts, engine: str | None) -> None:
    hosts = make_hosts(2)
    processes = begin(hosts, "kill", engine=engine)
    os.kill(processes[1].pid, signal.SIGKILL)
    kind, text, notes = failure(processes[0])
    assert (kind, "Host 1" in text, "The weights" in notes) == ("HostError", True, True), text
    processes[0].check()
    assert_nothing_is_left(hosts, 0, 1)


@pytest.mark.thorough
@pytest.mark.parametrize("engine", [None, "gloo"])
def test_a_helper_that_is_killed_is_named_on_all_hosts(
    make_hosts: MakeHosts, engine: str | None
) -> None:
    hosts = make_hosts(2)
    processes = begin(hosts, "kill helper", engine=engine)
    names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in hosts.pids(1)}
    (helper,) = [pid for pid, name in names.items() if name == "lockstep:3"]
    os.kill(helper, signal.SIGKILL)
    kind, text, _ = failure(processes[1])
    assert kind == "WorkerError"
    assert f"Rank 3 (process {helper})" in text
    kind, text, _ = failure(processes[0])
    assert kind == "HostError"
    assert "Host 1" in text
    assert f"Rank 3 (process {helper})" in text
    for process in processes:
        process.check()
    assert_nothing_is_left(hosts, 0, 1)


@pytest.mark.thorough
@pytest.mark.parametrize("engine", core_of([None, "gloo"], ["gloo"], []))
def test_a_host_that_is_stopped_is_named_and_ends_when_it_goes_on(
    make_hosts: MakeHosts, engine: str | None
) -> None:
    hosts = make_hosts(2)
    processes = begin(hosts, "stop", patience=PATIENCE, engine=engine)
    os.kill(processes[1].pid, signal.SIGSTOP)
    kind, text, _ = failure(processes[0], PATIENCE + MARGIN)
    assert (kind, "Host 1" in text) == ("HostError", True), text
    processes[0].check()
    os.kill(processes[1].pid, signal.SIGCONT)
    kind, text, _ = failure(processes[1])
    assert (kind, "must reach the same" in text) == ("HostError", True), text
    processes[1].check()
    assert_nothing_is_left(hosts, 0, 1)


@pytest.mark.thorough
@pytest.mark.parametrize("engine", core_of([None, "gloo"], [None], []))
def test_a_host_that_computes_for_long_is_awaited_and_one_that_is_stopped_is_not(
    make_hosts: MakeHosts, engine: str | None
) -> None:
    hosts = make_hosts(2)
    processes = begin(hosts, "compute", devices=1, engine=engine)
    processes[1].wait_for_line("COMPUTED")
    os.kill(processes[1].pid, signal.SIGSTOP)
    kind, text, notes = failure(processes[0])
    assert (kind, "Host 1" in text, "is stopped" in text) == ("HostError", True, True), text
    assert "The weights" in notes
    processes[0].check()
    os.kill(processes[1].pid, signal.SIGCONT)
    kind, text, _ = failure(processes[1])
    assert (kind, "is stopped" in text) == ("HostError", True), text
    processes[1].check()
    assert_nothing_is_left(hosts, 0, 1)


@pytest.mark.thorough
def test_an_error_on_one_host_is_told_on_all_and_they_can_train_again(
    make_hosts: MakeHosts,
) -> None:
    hosts = make_hosts(2)
    processes = begin(hosts, "error", is_awaited=False)
    kind, text, _ = failure(processes[1], 60)
    assert (kind, text) == ("ArithmeticError", "a bad day on host 1")
    kind, text, notes = failure(processes[0])
    assert (kind, text) == ("ArithmeticError", "a bad day on host 1")
    assert "Host 1" in notes
    assert "ArithmeticError: a bad day on host 1" in notes
    again = [process.wait_for_line("AGAIN") for process in processes]
    assert again[0] == again[1]
    for process in processes:
        process.check()
    assert_nothing_is_left(hosts, 0, 1)


@pytest.mark.parametrize("host", core_of([0, 1], [1]))
def test_ctrl_c_on_one_host_ends_all_with_the_same_step(make_hosts: MakeHosts, host: int) -> None:
    hosts = make_hosts(2)
    processes = begin(hosts, "SIGINT")
    os.kill(processes[host].pid, signal.SIGINT)
    kind, _, _ = failure(processes[host])
    assert kind == "KeyboardInterrupt"
    kind, text, _ = failure(processes[1 - host])
    assert (kind, f"Host {host}" in text) == ("HostError", True), text
    assert "KeyboardInterrupt" in text
    assert state(processes[0]) == state(processes[1])
    for process in processes:
        process.check()
    assert_nothing_is_left(hosts, 0, 1)


@pytest.mark.exhaustive
def test_a_host_that_does_not_come_is_named(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(2)
    processes = begin(hosts, "absent", is_awaited=False, patience=PATIENCE)
    processes[1].wait_for_line("HERE")
    kind, text, _ = failure(processes[0], PATIENCE + MARGIN)
    assert kind == "HostError"
    assert "no connection from host 1" in text


@pytest.mark.thorough
def test_a_script_that_has_ended_is_named(make_hosts: MakeHosts) -> None:
    """Host 1 calls fit once, host 0 twice."""
    hosts = make_hosts(2)
    processes = begin(hosts, "leaves", is_awaited=False, epochs="1")
    kind, text, _ = failure(processes[0], 60)
    assert kind == "HostError"
    assert "Host 1" in text
    for process in processes:
        process.check()


# --- attacks --------------------------------------------------------------------------------------

NUM_ATTACKS = 10_000

# Connects, says something meaningless, and hangs up; tells how often it was let in. Arguments: how
# often, then addresses and ports to take turns with.
ATTACK = """
import itertools, random, socket, sys
count, *where = sys.argv[1:]
targets = itertools.cycle(list(zip(where[::2], map(int, where[1::2]))))
generator = random.Random(5)
accepted = 0
print("BEGUN", flush=True)
for _ in range(int(count)):
    try:
        with socket.create_connection(next(targets), timeout=5) as end:
            accepted += 1
            end.sendall(generator.randbytes(generator.choice((1, 16, 64, 3000))))
    except OSError:
        pass
print("ACCEPTED", accepted)
"""

_ESTABLISHED, _LISTENING = "01", "0A"


def ports(hosts: Hosts, host: int, state: str) -> set[int]:
    """A host's own TCP ports in this state."""
    found = set()
    for name in ("tcp", "tcp6"):
        for line in hosts.read(host, f"/proc/net/{name}").splitlines()[1:]:
            words = line.split()
            if words[3] == state:
                found.add(int(words[1].rpartition(":")[2], 16))
    return found


def attack(hosts: Hosts, count: int, targets: list[tuple[str, int]]) -> HostProcess:
    words = [str(word) for target in targets for word in target]
    return hosts.run(2, [sys.executable, "-c", ATTACK, str(count), *words])


def ended(*processes: HostProcess) -> list[Any]:
    """What scripts have come to that have trained to a good end."""
    states = [state(process) for process in processes]
    for process in processes:
        process.check()
    return states


@pytest.mark.thorough
def test_attacks_do_no_harm(make_hosts: MakeHosts, tmp_path: Path) -> None:
    """First at the rendezvous, while one host waits for the other, then at all that is open.

    Afterwards, as many epochs in peace must come to the same.
    """
    hosts = make_hosts(3)
    over = tmp_path / "over"
    script = [*TALE, "attacked", str(LONG_PATIENCE), FOR_EVER, str(over)]
    first = by_tf_config(hosts, 0, script, (2, 2))
    wait_until(lambda: PORT in ports(hosts, 0, _LISTENING), 60)
    early = attack(hosts, NUM_ATTACKS, [(hosts.address(0), PORT)])
    early.wait_for_line("BEGUN")
    second = by_tf_config(hosts, 1, script, (2, 2))
    first.wait_for_line("TRAINING")
    assert not ports(hosts, 0, _LISTENING) | ports(hosts, 1, _LISTENING)
    targets = [
        (hosts.address(host), port)
        for host in (0, 1)
        for port in sorted(ports(hosts, host, _ESTABLISHED))
    ]
    assert (hosts.address(0), PORT) in targets
    # The star, heartbeats, and a channel per rank, whose ends on host 0 have one port.
    assert len(targets) == 7
    late = attack(hosts, NUM_ATTACKS, targets)
    assert late.wait_for_line("ACCEPTED") == "0"
    assert int(early.wait_for_line("ACCEPTED")) > 0
    assert "EPOCHS" not in first.out, "training was over before the attacks were"
    over.touch()
    attacked = ended(first, second)
    (epochs,) = {process.wait_for_line("EPOCHS") for process in (first, second)}
    assert ended(*begin(hosts, "calm", epochs=epochs)) == attacked
    assert attacked[0] == attacked[1]
