"""``lockstep run --ssh``: the script on all hosts of a file.

There is no ssh server here. A stand-in for ``ssh`` takes the same arguments, has the command line
split by a shell as a server has, and keeps the same streams open; what is tested is all that stands
on both sides of it.
"""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.launch.launchers.launch_spec import LaunchSpec
from lockstep.launch.script import Script
from tests.faults.processes import MARK, marked, running, wait_until
from tests.launching import (
    LOCKSTEP,
    MEET,
    TIMEOUT_SECONDS,
    call,
    clean_environment,
    write,
    write_program,
)

# Takes ssh's options and runs the command line, as this user's shell would at the other end.
FAKE_SSH = """\
#!/bin/sh
trap '' INT  # what is in the background may ignore Ctrl-C, and hands that on
echo "$@" >> "$FAKE_SSH_LOG"
while true; do
    case "$1" in
        -o | -p) shift 2 ;;
        -*) shift ;;
        *) break ;;
    esac
done
case "$1" in *unreachable) echo "ssh: no route to $1" >&2; exit 255 ;; esac
shift
exec sh -c "$*"
"""

PLACE = """
import os
from lockstep.cluster.environment import find_place
place = find_place(os.environ)
print(place and (place.host, place.num_hosts, str(place.rendezvous[0]), place.devices))
"""


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options that have the stand-in for ssh used; its commands are written to ``ssh.log``."""
    path = write_program(tmp_path / "fake-ssh", FAKE_SSH)
    write(tmp_path / "ssh.log", "")
    monkeypatch.setenv("FAKE_SSH_LOG", str(tmp_path / "ssh.log"))
    write(tmp_path / "hosts", "# two of them\n127.0.0.1\nada@second devices=3  # and more\n")
    return ["--ssh", "hosts", "--ssh-command", f"{path} -p 22"]


def test_all_hosts_of_a_file_run_the_script_and_can_meet(tmp_path: Path, ssh: list[str]) -> None:
    write(tmp_path / "script.py", MEET)
    done = call([*LOCKSTEP, "run", *ssh, "script.py", "a b", "--c"], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [
        "0 2 None host 1 ['a b', '--c']",
        "[second] 1 2 3 host 0 ['a b', '--c']",
    ]
    commands = (tmp_path / "ssh.log").read_text().splitlines()
    assert len(commands) == 3  # one asks for a port
    assert all(command.startswith("-p 22 -T -o BatchMode=yes ") for command in commands)
    assert sum(" ada@second " in command for command in commands) == 1


def test_hosts_share_a_fresh_secret_that_no_command_shows(tmp_path: Path, ssh: list[str]) -> None:
    source = """
import contextlib, os, pathlib
secret = os.environ["LOCKSTEP_SECRET"]
shown = []
for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    with contextlib.suppress(OSError):  # it has ended by now
        if secret.encode() in path.read_bytes():
            shown.append(path)
print(secret, shown, "LOCKSTEP_SECRET_FILE" in os.environ, os.environ["LOCKSTEP_JOB"])
"""
    write(tmp_path / "script.py", source)
    words = ["run", *ssh, "--port", "29400", "script.py"]
    found = []
    for _ in range(2):
        done = call([*LOCKSTEP, *words], tmp_path, LOCKSTEP_SECRET_FILE="elsewhere")
        lines = {line.removeprefix("[second] ") for line in done.stdout.splitlines()}
        assert len(lines) == 1, done
        secret, shown, has_file, job = lines.pop().split()
        assert (shown, has_file) == ("[]", "False")
        assert secret not in (tmp_path / "ssh.log").read_text()
        found += [secret, job]
    assert len(set(found)) == 4


@pytest.mark.thorough
def test_a_given_rendezvous_and_devices_are_told(tmp_path: Path, ssh: list[str]) -> None:
    write(tmp_path / "script.py", PLACE)
    words = ["run", *ssh, "--rendezvous", "10.0.0.9:29400", "--devices", "2", "script.py"]
    done = call([*LOCKSTEP, *words], tmp_path)
    assert sorted(done.stdout.splitlines()) == [
        "(0, 2, '10.0.0.9:29400', 2)",
        "[second] (1, 2, '10.0.0.9:29400', 3)",
    ]


@pytest.mark.thorough
def test_interpreter_and_directory_can_be_others(tmp_path: Path, ssh: list[str]) -> None:
    write(tmp_path / "code" / "script.py", "import os, sys\nprint(os.getcwd(), sys.executable)")
    text = f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'
    other = write_program(tmp_path / "python with blanks", text)
    words = [*ssh, "--directory", str(tmp_path / "code"), "--python", str(other), "script.py"]
    done = call([*LOCKSTEP, "run", *words], tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"[second] {tmp_path / 'code'} " in done.stdout
    assert "'" + str(other) + "' -m lockstep.launch" in (tmp_path / "ssh.log").read_text()


@pytest.mark.parametrize("failing", [0, 1])
def test_the_first_failure_ends_all_others(failing: int, tmp_path: Path, ssh: list[str]) -> None:
    source = f"""
import os, sys, time
if os.environ["LOCKSTEP_HOST_INDEX"] == "{failing}":
    print("failing", file=sys.stderr)
    sys.exit(5)
time.sleep(120)
"""
    write(tmp_path / "script.py", source)
    began = time.monotonic()
    done = call([*LOCKSTEP, "run", *ssh, "script.py"], tmp_path, **{MARK: "first-failure"})
    assert done.returncode == 5
    assert time.monotonic() - began < 30
    name, prefix = [("127.0.0.1", ""), ("second", "[second] ")][failing]
    assert done.stderr == (
        f"{prefix}failing\nlockstep: {name} failed with exit status 5; ending the others.\n"
    )
    wait_until(lambda: not marked("first-failure"), 15)


@pytest.mark.thorough
def test_a_script_that_dies_of_a_signal_fails(tmp_path: Path, ssh: list[str]) -> None:
    write(tmp_path / "script.py", "import os\nos.kill(os.getpid(), 9)")
    assert call([*LOCKSTEP, "run", *ssh, "script.py"], tmp_path).returncode == 128 + 9


@pytest.mark.thorough
def test_hosts_that_cannot_be_reached_are_named(tmp_path: Path, ssh: list[str]) -> None:
    write(tmp_path / "script.py", "import time\ntime.sleep(60)")
    write(tmp_path / "hosts", "unreachable\nother\n")
    done = call([*LOCKSTEP, "run", *ssh, "script.py"], tmp_path)
    assert done.returncode == 2
    assert "ssh must reach unreachable without a password" in done.stderr
    assert "no route to unreachable (exit status 255)" in done.stderr
    write(tmp_path / "hosts", "127.0.0.1\nunreachable\n")
    done = call([*LOCKSTEP, "run", *ssh, "script.py"], tmp_path)
    assert done.returncode == 255
    assert "[unreachable] ssh: no route to unreachable" in done.stderr
    write(tmp_path / "hosts", "192.0.2.1\n")  # an address of no host
    done = call([*LOCKSTEP, "run", *ssh, "script.py"], tmp_path)
    assert done.returncode == 2
    assert "192.0.2.1 is not an address of this host" in done.stderr
    words = ["--ssh", "hosts", "--ssh-command", "nossh", "script.py"]
    done = call([*LOCKSTEP, "run", *words], tmp_path)
    assert done.returncode == 2
    assert "No such file or directory: 'nossh'" in done.stderr


def test_a_directory_that_is_not_there_is_told(tmp_path: Path, ssh: list[str]) -> None:
    write(tmp_path / "script.py", "")
    done = call([*LOCKSTEP, "run", *ssh, "--directory", "/nowhere", "script.py"], tmp_path)
    assert done.returncode == 126
    assert "lockstep: the script could not be started: [Errno 2]" in done.stderr


WAIT = """
import os, signal, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
if "--stubborn" in sys.argv:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
try:
    print("ready", os.environ["LOCKSTEP_HOST_INDEX"], flush=True)
    while True:
        time.sleep(1)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    raise SystemExit(7)
"""


def command_over_ssh(ssh: list[str], *arguments: str) -> list[str]:
    """Arguments of an interpreter."""
    return ["-m", "lockstep", "run", *ssh, "script.py", *arguments]


def test_ctrl_c_reaches_the_script_on_every_host(tmp_path: Path, ssh: list[str]) -> None:
    with running(WAIT, directory=tmp_path, command=command_over_ssh(ssh)) as script:
        ready = {script.wait_for_line("") for _ in range(2)}
        assert ready == {"ready 0", "[second] ready 1"}
        script.process.send_signal(signal.SIGINT)
        status, out, _ = script.finish()
        assert status == 130
        assert {"interrupted", "[second] interrupted"} <= set(out.splitlines())
        wait_until(lambda: not script.others(), 15, lambda: f"left: {script.others()}")


@pytest.mark.thorough
def test_the_second_ctrl_c_ends_all(tmp_path: Path, ssh: list[str]) -> None:
    command = command_over_ssh(ssh, "--stubborn")
    with running(WAIT, directory=tmp_path, command=command) as script:
        for _ in range(2):
            script.wait_for_line("")
        script.process.send_signal(signal.SIGINT)
        time.sleep(2.0)  # or the kernel makes one signal of both
        assert script.process.poll() is None
        script.process.send_signal(signal.SIGINT)
        assert script.finish()[0] == 130
        wait_until(lambda: not script.others(), 15, lambda: f"left: {script.others()}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_where_the_command_is_killed(
    number: int, tmp_path: Path, ssh: list[str]
) -> None:
    with running(WAIT, directory=tmp_path, command=command_over_ssh(ssh)) as script:
        for _ in range(2):
            script.wait_for_line("")
        script.process.send_signal(number)
        wait_until(lambda: not script.others(), 15, lambda: f"left: {script.others()}")


@pytest.mark.thorough
def test_host_0_writes_to_the_terminal(tmp_path: Path, ssh: list[str]) -> None:
    source = """
import os, sys
print(sys.stdout.isatty(), sys.stderr.isatty(), sys.stdin.isatty())
if sys.stdout.isatty():
    print(os.get_terminal_size(1), os.environ["TERM"])
"""
    write(tmp_path / "script.py", source)
    screen, far_end = pty.openpty()
    process = subprocess.Popen(
        [*LOCKSTEP, "run", *ssh, "--port", "29400", "script.py"],
        cwd=tmp_path,
        env=clean_environment() | {"TERM": "xterm", "COLUMNS": "77", "LINES": "11"},
        stdin=subprocess.DEVNULL,
        stdout=far_end,
        stderr=far_end,
    )
    os.close(far_end)
    shown = b""
    while select.select([screen], [], [], TIMEOUT_SECONDS)[0]:
        try:
            shown += os.read(screen, 1024)
        except OSError:  # all that wrote to it have gone
            break
    os.close(screen)
    assert process.wait(TIMEOUT_SECONDS) == 0
    assert sorted(shown.decode().split("\r\n")) == [
        "",
        "True True False",
        "[second] False False False",
        "os.terminal_size(columns=77, lines=11) xterm",
    ]


def test_orders_show_no_secret() -> None:
    spec = LaunchSpec(script=Script(target="a.py"), directory="/", variables={}, secret="s3cret")
    assert "s3cret" not in repr(spec) + str(spec) + repr([spec])
    assert b"s3cret" in spec.line()


@pytest.mark.thorough
def test_orders_that_do_not_come_start_nothing(tmp_path: Path) -> None:
    for text in ("", '{"script"'):
        done = subprocess.run(
            [sys.executable, "-m", "lockstep.launch.launchers.remote_agent"],
            input=text,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
        assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
