"""``lockstep run``: as ``python SCRIPT`` would, by itself or as one of several hosts."""

import json
import re
import signal
import sys
from pathlib import Path

import pytest

from lockstep.cli.main import main
from lockstep.cluster.devices import usable_cores
from tests.faults.processes import running
from tests.launching import (
    LOCKSTEP,
    call,
    write,
)

SHOW = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__,
    "directory": os.getcwd(),
    "main": sys.modules["__main__"].__dict__ is globals(),
    "lockstep": {key: value for key, value in os.environ.items() if key.startswith("LOCKSTEP_")
                 and key != "LOCKSTEP_TEST_MARK"},
}))
"""


# --- as python would ------------------------------------------------------------------------------

SCRIPTS = {
    "nothing special": "print('done')",
    "a status": "import sys\nsys.exit(3)",
    "a text": "import sys\nsys.exit('stopped')",
    "an error": "def f():\n    1 / 0\n\nf()",
    "an error that has a cause": (
        "try:\n    int('x')\nexcept ValueError as error:\n    raise RuntimeError('no') from error"
    ),
    "an error of Lockstep's": "import lockstep\nraise lockstep.LockstepError('mine')",
    "no Python": "x = (\n",
    "a hook of its own": (
        "import sys\nsys.excepthook = lambda *_: print('hooked')\nraise KeyError('x')"
    ),
    "a class that is pickled": (
        "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A)"
    ),
    "a process of its own": (
        "import multiprocessing as mp\n"
        "def f(): print('child', __name__)\n"
        "if __name__ == '__main__':\n"
        "    process = mp.get_context('spawn').Process(target=f)\n"
        "    process.start(); process.join(); print(process.exitcode)"
    ),
    "something at its end": "import atexit\natexit.register(lambda: print('end'))\nprint('now')",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_as_python_runs_it(name: str, tmp_path: Path) -> None:
    write(tmp_path / "script.py", SCRIPTS[name])
    expected = call([sys.executable, "script.py"], tmp_path)
    found = call([*LOCKSTEP, "run", "script.py"], tmp_path)
    assert (found.returncode, found.stdout, found.stderr) == (
        expected.returncode,
        expected.stdout,
        expected.stderr,
    )


def test_a_script_finds_its_arguments_and_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path / "code" / "script.py", SHOW)
    words = ["code/script.py", "a", "--epochs", "3", "-m", "b c"]
    expected = json.loads(call([sys.executable, *words], tmp_path).stdout)
    for between in ([], ["--"]):
        arguments = [words[0], *between, *words[1:]]
        assert json.loads(call([*LOCKSTEP, "run", *arguments], tmp_path).stdout) == expected


@pytest.mark.parametrize("status", [0, 4])
def test_a_module_runs_as_python_runs_it(status: int, tmp_path: Path) -> None:
    write(tmp_path / "code" / "__init__.py", "")
    write(tmp_path / "code" / "job.py", f"{SHOW}\nsys.exit({status})")
    words = ["-m", "code.job", "--rate", "1"]
    expected = call([sys.executable, *words], tmp_path)
    found = call([*LOCKSTEP, "run", *words], tmp_path)
    assert (found.returncode, found.stdout) == (expected.returncode, expected.stdout)
    assert found.returncode == status


def test_a_module_that_is_not_there(tmp_path: Path) -> None:
    found = call([*LOCKSTEP, "run", "-m", "no_such_module"], tmp_path)
    assert found.returncode == 1
    assert found.stderr.splitlines()[-1].endswith("No module named no_such_module")


def test_ctrl_c_is_shown_from_the_script_on(tmp_path: Path) -> None:
    source = "import time\nprint('ready', flush=True)\nwhile True: time.sleep(1)\n"
    path = str(tmp_path / "script.py")
    with running(source, directory=tmp_path, command=["-m", "lockstep", "run", path]) as script:
        script.wait_for_line("ready")
        script.process.send_signal(signal.SIGINT)
        status, _, err = script.finish()
    assert status == 130
    assert re.search(r'^Traceback.*\n  File ".*script.py", line [23]', err)
    assert err.endswith("KeyboardInterrupt\n")


# --- as one of several hosts ----------------------------------------------------------------------

PLACE = """
import os
from lockstep.cluster.environment import find_place
place = find_place(os.environ)
print(place and (place.host, place.num_hosts, str(place.rendezvous[0]), place.devices))
if place and place.min_hosts:
    print("at least", place.min_hosts)
"""


@pytest.mark.parametrize("order", ["before", "after"])
def test_options_say_which_host_this_is(order: str, tmp_path: Path) -> None:
    write(tmp_path / "script.py", PLACE)
    write(tmp_path / "key", "k" * 32).chmod(0o600)
    options = ["--hosts", "2", "--host-index=1", "--rendezvous", "[::1]:29400", "--devices", "3"]
    options += ["--secret-file", "key"]
    words = [*options, "script.py"] if order == "before" else ["script.py", *options]
    shown = "(1, 2, '[::1]:29400', 3)\n"
    assert call([*LOCKSTEP, "run", *words], tmp_path).stdout == shown
    words = ["--min-hosts", "1", *words] if order == "before" else [*words, "--min-hosts=1"]
    assert call([*LOCKSTEP, "run", *words], tmp_path).stdout == f"{shown}at least 1\n"


def test_all_hosts_of_a_job_can_be_started_here(tmp_path: Path) -> None:
    """They share a secret, and each has its part of the cores."""
    write(tmp_path / "script.py", f"{PLACE}print(place.job, os.environ['LOCKSTEP_SECRET'])")
    found = call([*LOCKSTEP, "run", "--hosts", "2", "--local", "script.py"], tmp_path)
    assert (found.returncode, found.stderr) == (0, "")
    lines = sorted(found.stdout.splitlines())
    where_1, job_1 = (line for line in lines if line.startswith("[host 1]"))
    where, job = (line for line in lines if not line.startswith("[host 1]"))
    devices = max(usable_cores() // 2, 1)
    assert re.fullmatch(rf"\(0, 2, '127\.0\.0\.1:\d+', {devices}\)", where)
    assert where_1 == f"[host 1] {where.replace('0', '1', 1)}"
    assert job_1 == f"[host 1] {job}"


def test_by_itself_it_says_nothing_of_hosts(tmp_path: Path) -> None:
    write(tmp_path / "script.py", PLACE)
    assert call([*LOCKSTEP, "run", "script.py"], tmp_path).stdout == "None\n"
    # Under another launcher the place is that launcher's.
    launched = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "9",
    }
    shown = call([*LOCKSTEP, "run", "script.py", "--devices", "2"], tmp_path, **launched).stdout
    assert shown == "(1, 2, 'a:10', 2)\n"
    shown = call([*LOCKSTEP, "run", "--hosts", "1", "script.py"], tmp_path, **launched).stdout
    assert shown == "None\n"


def test_a_strategy_has_the_devices_that_the_command_says(tmp_path: Path) -> None:
    source = "import lockstep\nprint(lockstep.MirroredStrategy(**{}).num_replicas_in_sync)\n"
    write(tmp_path / "script.py", source)
    for devices in ("1", "3"):
        done = call([*LOCKSTEP, "run", "script.py", "--devices", devices], tmp_path)
        assert (done.stdout, done.stderr) == (f"{devices}\n", "")
    done = call([sys.executable, "script.py"], tmp_path, LOCKSTEP_DEVICES="none")
    assert "LOCKSTEP_DEVICES must be a number of at least 1" in done.stderr
    write(tmp_path / "script.py", source.replace("**{}", "devices=2"))
    assert call([*LOCKSTEP, "run", "script.py", "--devices", "1"], tmp_path).stdout == "2\n"


MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    "no script": ([], ["There must be a SCRIPT"]),
    "no such script": (["nowhere.py"], ["SCRIPT must be a file. Received: nowhere.py"]),
    "a folder without a program": (["."], ["SCRIPT must be a file. Received: ."]),
    "numbers": (
        ["--devices", "0", "--hosts", "0", "--host-index", "-1", "{file}"],
        ["--devices must be at least 1", "--hosts must be at least 1", "Received: --host-index -1"],
    ),
    "half of several hosts": (
        ["--hosts", "2", "{file}"],
        ["--hosts 2 without --host-index", "--hosts 2 without --rendezvous"],
    ),
    "an index too large": (
        ["--hosts", "2", "--host-index", "2", "--rendezvous", "a:1", "{file}"],
        ["--host-index must be from 0 to 1. Received: --host-index 2"],
    ),
    "an index of nothing": (
        ["--host-index", "0", "{file}"],
        ["--host-index has no effect without --hosts"],
    ),
    "fewer than one host": (
        ["--min-hosts", "0", "--hosts", "2", "--host-index=0", "--rendezvous", "a:1", "{file}"],
        ["--min-hosts must be from 1 to 2. Received: --min-hosts 0"],
    ),
    "at least more than all hosts": (
        ["--min-hosts", "3", "--hosts", "2", "--host-index=0", "--rendezvous", "a:1", "{file}"],
        ["--min-hosts must be from 1 to 2. Received: --min-hosts 3"],
    ),
    "fewer hosts of one": (
        ["--min-hosts", "1", "{file}"],
        ["--min-hosts has no effect without --hosts"],
    ),
    "no address": (
        ["--rendezvous", "::1:80", "{file}"],
        ["--rendezvous must be host:port, with an IPv6 address in brackets. Received: '::1:80'"],
    ),
    "no secret file": (["--secret-file", "nowhere", "{file}"], ["nowhere: No such file"]),
    "a secret that others can read": (
        ["--secret-file", "{file}", "{file}"],
        ["accessible to other users. Run `chmod 600"],
    ),
    "no secret": (
        ["--hosts", "2", "--host-index", "0", "--rendezvous", "10.0.0.1:1", "{file}"],
        ["The hosts of a job must share a secret"],
    ),
    "all hosts here, but one by hand": (
        [
            *("--hosts", "2", "--local", "--host-index", "0", "--min-hosts", "1"),
            *("--rendezvous", "a:1", "--secret-file", "{file}", "{file}"),
        ],
        [
            f"{name} has no effect with --local"
            for name in ("--host-index", "--min-hosts", "--rendezvous", "--secret-file")
        ],
    ),
    "all hosts here, but how many": (
        ["--local", "{file}"],
        ["--local has no effect without --hosts. Received: --local. Leave"],
    ),
    "options of --ssh": (
        ["--port", "1", "--ssh-command", "x", "--python", "p", "--directory", "d", "{file}"],
        [
            f"{name} has no effect without --ssh"
            for name in ("--port", "--ssh-command", "--python", "--directory")
        ],
    ),
    "options of one host": (
        [
            *("--ssh", "h", "--hosts", "2", "--host-index", "0", "--min-hosts", "1"),
            *("--secret-file", "{file}", "{file}"),
        ],
        [f"{name} has no effect with --ssh" for name in ("--hosts", "--host-index", "--min-hosts")]
        + ["--secret-file has no effect with --ssh"],
    ),
    "hosts of processes": (
        ["--processes", "2", "--hosts", "2", "--host-index", "0", "--rendezvous", "a:1", "{file}"],
        [
            f"{name} has no effect with --processes"
            for name in ("--hosts", "--host-index", "--rendezvous")
        ],
    ),
    "hosts over ssh, and here": (["--ssh", "h", "--local", "{file}"], ["no effect with --ssh"]),
    "two ports": (
        ["--ssh", "h", "--rendezvous", "a:1", "--port", "2", "{file}"],
        ["--port has no effect with --rendezvous"],
    ),
    "no port": (
        ["--ssh", "h", "--port", "65536", "{file}"],
        ["--port must be from 1 to 65535. Received: --port 65536"],
    ),
    "no host file": (["--ssh", "nowhere", "{file}"], ["The host file must be a text file"]),
    "whose option is it": (
        ["{file}", "data.csv", "--devices=2"],
        ["must be before the script's own arguments. Received: --devices=2"],
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told(
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable in ("LOCKSTEP_SECRET", "LOCKSTEP_SECRET_FILE"):
        monkeypatch.delenv(variable, raising=False)
    words, messages = MISTAKES[name]
    file = write(tmp_path / "script.py", "raise AssertionError")
    file.chmod(0o644)
    assert main(["run", *(word.format(file=file) for word in words)]) == 2
    told = capsys.readouterr().err
    assert [message for message in messages if message not in told] == [], told
    assert len(told.splitlines()) == (1 if len(messages) == 1 else len(messages) + 1)


@pytest.mark.exhaustive
def test_a_wrong_value_after_the_script_shows_no_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "script.py", "--devices", "two"])
    told = capsys.readouterr().err
    assert told.startswith("lockstep run: error: argument --devices: invalid int value: 'two'")
    assert told.endswith("\nlockstep run --help shows its use.\n")


def test_what_follows_two_dashes_is_the_script_s(tmp_path: Path) -> None:
    write(tmp_path / "script.py", SHOW)
    words = ["--devices", "2", "script.py", "--", "--devices", "7", "--"]
    shown = json.loads(call([*LOCKSTEP, "run", *words], tmp_path).stdout)
    assert shown["argv"] == ["script.py", "--devices", "7", "--"]
    assert shown["lockstep"] == {"LOCKSTEP_DEVICES": "2"}
