"""Whatever ends the script ends its helpers, and nothing is left of them.

Most of these scripts lead a team that trains nothing: without torch they start in a moment.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults.processes import JOB, TIMEOUT_SECONDS, num_kills, running, wait_until
from tests.launchers import finished
from tests.launching import CALM, STRICT
from tests.thorough import core_of

END_SECONDS = 15.0  # on a busy machine; else a moment

WORK = """
import os, re, signal, time

def wait(context, body, descriptors):
    context.send(b"working")
    time.sleep(1000)

def hold(context, body, descriptors):
    context.send(b"working")
    sum(range(10**12))  # in C, with the GIL

def stop(context, body, descriptors):
    context.send(b"working")
    os.kill(os.getpid(), signal.SIGSTOP)

def answer(context, body, descriptors):
    return b""
"""

TEAM = """
import atexit, ctypes, os, signal, sys, threading, time
import work
from lockstep.launch.workers.pool import take_team

team = take_team(3, None)
team.call(work.{function}, b"", position=lambda rank: "here", timeout_seconds=60)
team.gather(60) if "{function}" != "answer" else team.finish(60)
print("working", *team.pids(), flush=True)
{ending}
"""

ENDINGS = {
    "return": ("", 0),
    "exception": ("raise ValueError('as asked')", 1),
    "sys.exit": ("sys.exit(3)", 3),
    "os._exit": ("os._exit(4)", 4),
    "segfault": ("ctypes.string_at(0)", -signal.SIGSEGV),
    "abort": ("os.abort()", -signal.SIGABRT),
    "exec": ("os.execv('/bin/true', ['true'])", 0),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    "SIGHUP": ("os.kill(os.getpid(), signal.SIGHUP)", -signal.SIGHUP),
}


CELLS = core_of(
    [(function, ending) for function in ("wait", "hold", "stop", "answer") for ending in ENDINGS],
    lambda function, ending: (
        (function == "wait" and ending in ("return", "exception", "os._exit", "SIGTERM"))
        or (function in ("wait", "hold") and ending == "SIGKILL")
    ),
)


@pytest.fixture
def shared_files() -> set[str]:
    return set(os.listdir("/dev/shm"))


def check_shared_files(before: set[str]) -> None:
    """None are left; those of tests in other processes come and go."""

    def left() -> set[str]:
        return set(os.listdir("/dev/shm")) - before

    wait_until(lambda: not left(), END_SECONDS, lambda: f"left: {left()}")


@pytest.mark.parametrize(("function", "ending"), CELLS)
def test_helpers_end_with_the_script(
    ending: str, function: str, tmp_path: Path, shared_files: set[str]
) -> None:
    act, expected = ENDINGS[ending]
    (tmp_path / "work.py").write_text(WORK)
    with running(TEAM.format(function=function, ending=act), directory=tmp_path) as script:
        pids = [int(pid) for pid in script.wait_for_line("working").split()]
        status, _, err = script.finish()
        wait_until(lambda: not script.others(), END_SECONDS, lambda: f"left: {script.others()}")
    assert status == expected, err
    assert len(pids) == 3
    assert ("as asked" in err) if ending == "exception" else (err == ""), err
    check_shared_files(shared_files)


@pytest.mark.parametrize("number", range(num_kills(6)))
def test_the_script_is_killed_at_any_moment(number: int, tmp_path: Path) -> None:
    """From before the first helper starts to long after: the first 0.4 s of a team's life."""
    kill_the_team(number, tmp_path)


def kill_the_team(seed: int, directory: Path) -> float:
    (directory / "work.py").write_text(WORK)
    source = "print('begun', flush=True)\n" + TEAM.format(function="wait", ending="time.sleep(60)")
    return kill_the_script(source, directory, random.Random(seed).uniform(0.0, 0.4))


def kill_the_script(source: str, directory: Path, delay_seconds: float) -> float:
    """Returns the seconds from the kill until nothing is left."""
    with running(source, directory=directory) as script:
        script.wait_for_line("begun")
        time.sleep(delay_seconds)
        began = time.monotonic()
        script.process.kill()
        script.process.wait(TIMEOUT_SECONDS)
        wait_until(lambda: not script.others(), END_SECONDS, lambda: f"left: {script.others()}")
        return time.monotonic() - began


FIT = (
    JOB
    + """
trainer = make_trainer(3)
print("begun", flush=True)
train(trainer, epochs=10**6)
"""
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(num_kills(2)))
def test_the_script_is_killed_while_it_trains(
    number: int, tmp_path: Path, shared_files: set[str]
) -> None:
    kill_the_script(FIT, tmp_path, random.Random(number).uniform(0.0, 4.0))
    check_shared_files(shared_files)


@pytest.mark.thorough
def test_forks_of_the_script_leave_the_helpers_alone(tmp_path: Path) -> None:
    """Neither a fork's exit nor its own training is any of theirs; its memory is its own.

    In the end there is a trainer in a cycle, one in a module, and one that was closed; nobody
    complains.
    """
    source = (
        JOB
        + """
import gc, types
trainer = make_trainer()
train(trainer)
first, before = pids(trainer), trainer.model.layer.weight.detach().clone()

def fork(act):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        act()
        sys.exit(0)  # the usual way: finalizers run
    assert os.waitpid(pid, 0)[1] == 0

def forget():
    global trainer
    del trainer
    gc.collect()

def retrain():
    train(trainer)
    assert pids(trainer) != first

with torch.no_grad():
    fork(lambda: trainer.model.layer.weight.zero_())
for act in (lambda: None, forget, lambda: trainer.close(), retrain):
    fork(act)
print("untouched", torch.equal(before, trainer.model.layer.weight))
train(trainer)
print("kept", pids(trainer) == first)

closed = make_trainer(3)
train(closed)
closed.close()
trainer.itself = trainer
sys.modules["elsewhere"] = types.ModuleType("elsewhere")
sys.modules["elsewhere"].trainer = make_trainer(3)
train(sys.modules["elsewhere"].trainer)
del trainer, closed
"""
    )
    (tmp_path / "script.py").write_text(source)
    said = finished([*STRICT, "script.py"], tmp_path)
    assert said == (0, "untouched True\nkept True\n", "")


@pytest.mark.exhaustive
def test_a_script_that_ends_says_nothing(tmp_path: Path) -> None:
    """Though the trainer and its memory live until the interpreter has taken itself apart."""
    script = tmp_path / "script.py"
    script.write_text(f"{JOB}\ntrainer = make_trainer()\ntrain(trainer)\n")
    done = subprocess.run(
        [sys.executable, *CALM, script],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
