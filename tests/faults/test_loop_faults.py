"""Loops of one's own in which something goes wrong on some of the replicas."""

import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.launchers import BEGINNING, environ
from tests.launching import clean_environment, free_port
from tests.netns import HostProcess
from tests.thorough import core_of

pytestmark = pytest.mark.thorough

# Longest for anything that must show at once, on a machine that others use, too.
SECONDS = 60.0

LOOP = f"""
{BEGINNING}
lockstep.init(timeout_seconds=SECONDS)
rank = lockstep.rank()
model = nn.Linear(4, 2).double()
optimizer = lockstep.CrossReplicaOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
x = torch.arange(24.0, dtype=torch.float64).view(6, 4) / 10

def step(weight=1, rows=slice(None)):
    model(x[rows]).square().mean().backward()
    optimizer.step(weight=weight)

def told(error, make):
    try:
        make()
    except lockstep.LockstepError as found:
        tell([type(found).__name__, str(found)])
    else:
        tell("nothing")
"""

NOT_COME = "Replica 1 did not reach step 1 of a CrossReplicaOptimizer, at which replica 0 waits."
ENDED = "before step 1 of a CrossReplicaOptimizer."


@contextmanager
def replicas(
    tmp_path: Path, text: str, count: int = 2, seconds: float = 30
) -> Iterator[list[HostProcess]]:
    """Processes as torchrun starts them."""
    script = tmp_path / "loop.py"
    script.write_text(LOOP.replace("SECONDS", str(seconds)) + text)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    sizes = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    with ExitStack() as stack:
        processes = []
        for rank in map(str, range(count)):
            own = {**warm.VARIABLES, **shared, **sizes, "RANK": rank, "LOCAL_RANK": rank}
            environment = {**clean_environment(), **environ(own)}
            process = HostProcess(
                [sys.executable, str(script)], environment, tmp_path, like="torch"
            )
            stack.callback(process.close)
            stack.callback(process.end)
            processes.append(process)
        yield processes


def all_told(processes: Sequence[HostProcess]) -> list[list[Any]]:
    return [[json.loads(line) for line in each.check(SECONDS).splitlines()] for each in processes]


def test_a_step_on_some_replicas_only_is_named_when_time_is_up(tmp_path: Path) -> None:
    text = """
step()
if rank == 0:
    told("late", step)
else:
    time.sleep(3)
"""
    with replicas(tmp_path, text, seconds=1) as processes:
        ((found,), _) = all_told(processes)
    assert found[0] == "WorkerError"
    assert found[1].startswith(NOT_COME)
    assert "`join`" in found[1]


def test_a_replica_that_ends_early_does_not_hang_the_rest(tmp_path: Path) -> None:
    text = """
step()
if rank == 0:
    told("ended", step)
"""
    with replicas(tmp_path, text) as processes:
        ((found,), _) = all_told(processes)
    assert found[1].startswith(f"Replica 1 has ended {ENDED}")


def test_the_first_replica_may_be_the_one_that_ends_early(tmp_path: Path) -> None:
    text = """
step()
if rank == 1:
    told("ended", step)
"""
    with replicas(tmp_path, text) as processes:
        (_, (found,)) = all_told(processes)
    assert found[1].startswith(f"Replica 0 has ended {ENDED}")


@pytest.mark.parametrize("killed", core_of(range(3), (1,)))
def test_a_killed_replica_is_named(tmp_path: Path, killed: int) -> None:
    text = f"""
step()
print("stepped", flush=True)
if rank == {killed}:
    time.sleep(100)
told("killed", step)
"""
    with replicas(tmp_path, text, count=3) as processes:
        for each in processes:
            each.wait_for_line("stepped")
        processes[killed].popen.send_signal(signal.SIGKILL)
        outs = [each.finish(SECONDS) for number, each in enumerate(processes) if number != killed]
    for status, out, err in outs:
        assert status == 0, err
        assert f"eplica {killed} has ended {ENDED}" in out


@pytest.mark.parametrize("stopped", core_of(range(3), (0,), ()))
def test_a_stopped_replica_is_named(tmp_path: Path, stopped: int) -> None:
    text = f"""
from lockstep.launch.workers import process_state
process_state.STOPPED_SECONDS = 0.5
step()
print("stepped", flush=True)
if rank == {stopped}:
    time.sleep(2)
told("stopped", step)
"""
    with replicas(tmp_path, text, count=3) as processes:
        for each in processes:
            each.wait_for_line("stepped")
        processes[stopped].popen.send_signal(signal.SIGSTOP)
        outs = [each.finish(SECONDS) for number, each in enumerate(processes) if number != stopped]
        processes[stopped].popen.send_signal(signal.SIGCONT)
        outs.append(processes[stopped].finish(SECONDS))
    who = "ank 0 of this host" if stopped == 0 else f"ank {stopped}"
    pid = processes[stopped].pid
    for status, out, err in outs[:-1]:
        assert status == 0, err
        assert f"{who} (process {pid}) is stopped" in out
    assert "WorkerError" in outs[-1][1]  # it has lost the others, and changes nothing


def test_replicas_that_have_joined_take_part_without_samples(tmp_path: Path) -> None:
    text = """
def train(make_steps):
    for rows in make_steps:
        step(len(x[rows]), rows)

# What each has, and then what one device has at each step.
own = [[slice(0, 2), slice(2, 4), slice(4, 6)], [slice(2, 3)]][rank]
before = {name: value.clone() for name, value in model.state_dict().items()}
train(own)
optimizer.join()
reference = nn.Linear(4, 2).double()
reference.load_state_dict(before)
plain = torch.optim.SGD(reference.parameters(), lr=0.1)
for rows in ([0, 1, 2], [2, 3], [4, 5]):
    plain.zero_grad()
    reference(x[rows]).square().mean().backward()
    plain.step()
pairs = zip(model.parameters(), reference.parameters())
tell([float((own - wanted).detach().abs().max()) for own, wanted in pairs])
"""
    with replicas(tmp_path, text) as processes:
        for (found,) in all_told(processes):
            assert isinstance(found, list)
            assert max(found) <= 1e-12


def test_what_replicas_must_not_do_is_an_error_on_each(tmp_path: Path) -> None:
    text = """
told("mixed", lambda: step(1 if rank else None))
step()
with torch.no_grad():
    model.weight.mul_(0.5)
told("changed", step)
other = nn.Linear(4, 2 + rank).double()
told("unlike", lambda: lockstep.CrossReplicaOptimizer(torch.optim.SGD(other.parameters(), lr=0.1)))
told("shapes", lambda: lockstep.all_mean(torch.ones(1 + rank)))
"""
    with replicas(tmp_path, text) as processes:
        for mixed, changed, unlike, shapes in all_told(processes):
            assert "All replicas must give `step` a weight, or none" in mixed[1]
            assert "'weight' changed between two steps" in changed[1]
            assert 'engine="gloo"' in changed[1]
            assert "these differ in the model's parameters" in unlike[1]
            assert "these differ in the shape of all_mean's value" in shapes[1]
