"""``lockstep run --restarts``: a script that dies is started again, and dies with its launcher.

What becomes of a training is in ``test_lost_hosts.py``.
"""

import os
import signal
from pathlib import Path

import pytest

from lockstep.cli.main import main
from tests.faults.processes import is_alive, running, wait_until

# Notes each start, and then does what its argument says for that one.
SCRIPT = """
import os, signal, sys, time
from pathlib import Path

starts = Path(__file__).with_name("starts")
with starts.open("a") as file:
    file.write(f"{os.getpid()}\\n")
number = len(starts.read_text().splitlines())
print(f"START {number}", flush=True)
what = dict(enumerate(sys.argv[1].split(","), 1)).get(number, "0")
if what == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
while what == "wait":
    time.sleep(1)  # Python handles a signal that comes right before a sleep only after it
sys.exit(int(what))
"""


def ended(folder: Path, what: str, restarts: int) -> tuple[int, int, str]:
    """Exit status, number of starts, and what was said of errors."""
    (folder / "starts").unlink(missing_ok=True)
    words = ["-m", "lockstep", "run", "--restarts", str(restarts), str(folder / "script.py"), what]
    with running(SCRIPT, directory=folder, command=words) as script:
        status, _, err = script.finish(60)
    return status, len(pids(folder)), err


def pids(folder: Path) -> list[int]:
    """Of the starts of the script."""
    return [int(line) for line in (folder / "starts").read_text().splitlines()]


def test_a_script_that_dies_is_started_again(tmp_path: Path) -> None:
    status, starts, err = ended(tmp_path, "kill,1,0", 5)
    assert (status, starts) == (0, 3)
    assert "killed by SIGKILL" in err
    assert "exited with status 1; restart 2 of 5" in err
    status, starts, err = ended(tmp_path, "kill,kill,kill", 1)
    assert (status, starts) == (128 + signal.SIGKILL, 2)
    assert "all 1 restarts are used up" in err


@pytest.mark.parametrize("status", [0, 2, 130, 143])
def test_what_was_wanted_or_would_be_the_same_again_is_final(status: int, tmp_path: Path) -> None:
    assert ended(tmp_path, str(status), 3) == (status, 1, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_whoever_ends_it_ends_the_script(number: int, tmp_path: Path) -> None:
    words = ["-m", "lockstep", "run", "--restarts", "3", str(tmp_path / "script.py"), "wait"]
    with running(SCRIPT, directory=tmp_path, command=words) as script:
        script.wait_for_line("START 1")
        script.process.send_signal(number)
        status, _, _ = script.finish(60)
    assert status == 128 + number
    assert len(pids(tmp_path)) == 1


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_supervisor_that_dies_leaves_no_orphan(is_stopped: bool, tmp_path: Path) -> None:
    words = ["-m", "lockstep", "run", "--restarts", "3", str(tmp_path / "script.py"), "wait"]
    with running(SCRIPT, directory=tmp_path, command=words) as script:
        script.wait_for_line("START 1")
        (pid,) = pids(tmp_path)
        if is_stopped:
            os.kill(pid, signal.SIGSTOP)
        script.process.kill()
        wait_until(lambda: not is_alive(pid), 10)
        script.finish(60)


def test_a_number_that_cannot_be_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script.py").write_text("")
    assert main(["run", "--restarts", "-1", str(tmp_path / "script.py")]) == 2
    assert "--restarts must be at least 0" in capsys.readouterr().err
