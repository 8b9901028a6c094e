"""``lockstep launch slurm``: the batch file as sbatch reads it, and run with a stand-in for srun.

The stand-in starts a task for each node on this host, with the variables that srun sets.
"""

import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.cli.main import main
from tests.faults.processes import wait_until
from tests.launching import (
    LOCKSTEP,
    MEET,
    TIMEOUT_SECONDS,
    call,
    clean_environment,
    write,
    write_program,
)

# Options of sbatch that the files may use, and what it takes for them (sbatch's manual).
KNOWN_OPTIONS = {
    "job-name": r"\S+",
    "nodes": r"[1-9]\d*(-\d+)?",
    "ntasks-per-node": r"[1-9]\d*",
    "cpus-per-task": r"[1-9]\d*",
    "time": r"(\d+-)?\d+(:\d\d?){0,2}",
    "partition": r"\S+",
    "account": r"\S+",
    "mem": r"\d+[KMGT]?",
    "exclusive": None,
}

FAKE_SRUN = f"""#!{sys.executable}
import os, re, subprocess, sys
own, command = [], sys.argv[1:]
while command[0].startswith("--"):
    own.append(command.pop(0))
assert sorted(own) == ["--cpus-per-task=3", "--export=ALL", "--kill-on-bad-exit=1",
                       "--ntasks-per-node=1"], own
nodes = int(os.environ["SLURM_JOB_NUM_NODES"])
tasks = [subprocess.Popen(command, env=os.environ | {{
    "SLURM_STEP_ID": "0", "SLURM_PROCID": str(node), "SLURM_NODEID": str(node),
    "SLURM_LOCALID": "0", "SLURM_NTASKS": str(nodes), "SLURM_CPUS_PER_TASK": "3",
    "SLURM_STEP_TASKS_PER_NODE": f"1(x{{nodes}})" if nodes > 1 else "1",
    "SLURM_STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"],
}}) for node in range(nodes)]
sys.exit(max(task.wait() for task in tasks))
"""


def batch_options(text: str) -> dict[str, str | None]:
    """As sbatch reads them: up to the first line that is no comment."""
    found = {}
    lines = text.splitlines()
    assert lines[0].startswith("#!")
    for line in lines[1:]:
        if line and not line.startswith("#"):
            break
        if line.startswith("#SBATCH "):
            match = re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(\S.*))?", line)
            assert match, line
            assert match[1] in KNOWN_OPTIONS, line
            pattern = KNOWN_OPTIONS[match[1]]
            assert (pattern is None) == (match[2] is None), line
            assert pattern is None or re.fullmatch(pattern, match[2]), line
            found[match[1]] = match[2]
    assert text.count("#SBATCH") == len(found)
    return found


def submit(folder: Path, text: str) -> "subprocess.Popen[str]":
    """Run the file as Slurm runs it on a job's first node."""
    options = batch_options(text)
    write_program(folder / "bin" / "srun", FAKE_SRUN)
    variables = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(random.SystemRandom().randrange(1, 1 << 30)),
        "SLURM_JOB_NUM_NODES": str(options["nodes"]),
        "SLURM_JOB_NODELIST": f"127.0.0.[1-{options['nodes']}]",
        # What Slurm also sets for the script itself, which is not one of the hosts.
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
    }
    path = write_program(folder / "slurm_script", text)  # Slurm runs a copy
    return subprocess.Popen(
        [str(path)],
        cwd=folder,
        env=clean_environment() | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_batch(folder: Path, text: str) -> tuple[int, str, str]:
    process = submit(folder, text)
    try:
        out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        process.kill()
    return process.returncode, out, err


def write_batch(folder: Path, *words: str) -> str:
    done = call([*LOCKSTEP, "launch", "slurm", *words], folder)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def secrets_left(folder: Path) -> list[Path]:
    return list(folder.glob(".lockstep-secret*"))


def test_the_file_says_what_sbatch_needs(tmp_path: Path) -> None:
    words = ["--hosts", "2", "--devices", "3", "--time", "1-12:00:00", "--partition", "long"]
    words += ["--account", "physics", "--sbatch=--mem=32G", "--sbatch=--exclusive"]
    assert batch_options(write_batch(tmp_path, *words, "code/my train.py", "--rate", "1")) == {
        "job-name": "my-train",
        "nodes": "2",
        "ntasks-per-node": "1",
        "cpus-per-task": "3",
        "time": "1-12:00:00",
        "partition": "long",
        "account": "physics",
        "mem": "32G",
        "exclusive": None,
    }


def test_the_reader_of_these_tests_refuses_what_sbatch_refuses() -> None:
    for line in ("--nodes", "--nodes=two", "--nods=2", "--exclusive=", "-N 2"):
        with pytest.raises(AssertionError):
            batch_options(f"#!/bin/bash\n#SBATCH {line}\n")
    with pytest.raises(AssertionError):
        batch_options("#!/bin/bash\nset -e\n#SBATCH --nodes=2\n")


@pytest.mark.parametrize("hosts", [2, 3])
def test_the_hosts_of_a_job_can_meet(hosts: int, tmp_path: Path) -> None:
    write(tmp_path / "train.py", MEET)
    words = ["train.py", "--hosts", str(hosts), "--devices", "3", "--", "it's", "$HOME", "--hosts"]
    status, out, err = run_batch(tmp_path, write_batch(tmp_path, *words))
    arguments = ["it's", "$HOME", "--hosts"]
    others = " ".join(f"host {host}" for host in range(1, hosts))
    assert (status, err) == (0, "")
    assert sorted(out.splitlines()) == [
        f"0 {hosts} 3 {others} {arguments}",
        *(f"{host} {hosts} 3 host 0 {arguments}" for host in range(1, hosts)),
    ]
    assert secrets_left(tmp_path) == []


def test_a_failure_is_the_job_s(tmp_path: Path) -> None:
    write(tmp_path / "train.py", "import sys\nsys.exit(4)")
    text = write_batch(tmp_path, "--hosts=2", "--devices=3", "-m", "train")
    assert run_batch(tmp_path, text)[0] == 4
    assert secrets_left(tmp_path) == []


# Goes on until a file is there.
UNTIL_TOLD = """
import os, time
print("ready", flush=True)
deadline = time.monotonic() + 120
while not os.path.exists("go"):
    assert time.monotonic() < deadline
    time.sleep(0.05)
"""


def test_a_job_that_is_cancelled_leaves_no_secret(tmp_path: Path) -> None:
    write(tmp_path / "train.py", UNTIL_TOLD)
    text = write_batch(tmp_path, "--hosts=1", "--devices=3", "train.py")
    process = submit(tmp_path, text)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert len(secrets_left(tmp_path)) == 1
        process.send_signal(signal.SIGTERM)
        (tmp_path / "go").touch()  # the shell hears of a signal once its command has ended
        process.communicate(timeout=TIMEOUT_SECONDS)
        assert process.returncode != 0
        wait_until(lambda: not secrets_left(tmp_path), 15)
    finally:
        process.kill()


def test_it_is_written_to_a_file(tmp_path: Path) -> None:
    words = ["train.py", "--hosts=2", "--devices=3", "--python", "py 3", "--name", "n"]
    assert write_batch(tmp_path, *words, "-o", "job.sbatch") == ""
    text = (tmp_path / "job.sbatch").read_text()
    assert text == write_batch(tmp_path, *words)
    assert "    'py 3' train.py\n" in text
    assert batch_options(text)["job-name"] == "n"


MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    "no script": (["--hosts=2", "--devices=2"], ["There must be a SCRIPT"]),
    "no numbers": (
        ["--devices", "0", "train.py"],
        [
            "--hosts must be a number of at least 1. Received: nothing",
            "--devices must be a number of at least 1. Received: 0",
        ],
    ),
    "values that sbatch would not take": (
        [
            *("--hosts=1", "--devices=1", "--time=soon", "--partition=a b", "--account="),
            *("--name", "a\n#SBATCH --exclusive", "--sbatch=mem=1", "--sbatch=--mem=1\nrm x"),
            "a.py",
        ],
        [
            "--time must have sbatch's format. Received: 'soon'",
            "--partition must have sbatch's format. Received: 'a b'",
            "--account must have sbatch's format. Received: ''",
            "--name must have sbatch's format.",
            "--sbatch must have sbatch's format. Received: 'mem=1'",
            r"Received: '--mem=1\nrm x'",
        ],
    ),
    "no place to write": (
        ["--hosts=1", "--devices=1", "-o", "/nowhere/job", "a.py"],
        ["--output must be a writable file. Received: No such file or directory: '/nowhere/job'"],
    ),
    "whose option is it": (
        ["--hosts=1", "--devices=1", "a.py", "x", "--time", "3"],
        ["Received: --time"],
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, messages = MISTAKES[name]
    assert main(["launch", "slurm", *words]) == 2
    shown = capsys.readouterr()
    assert [message for message in messages if message not in shown.err] == [], shown.err
    assert shown.out == ""
