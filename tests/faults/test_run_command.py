"""``lockstep run``: as ``python SCRIPT`` would, and on several hosts by ssh.

There is no ssh server here. A stand-in for ``ssh`` takes the same arguments, has the command line
split by a shell as a server has, and keeps the same streams open; what is tested is all that stands
on both sides of it.
"""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.cli.main import main
from lockstep.launch.orders import Orders
from lockstep.launch.script import Script
from tests.faults.processes import MARK, marked, running, wait_until

LOCKSTEP = [sys.executable, "-m", "lockstep"]
TIMEOUT_SECONDS = 60.0

# Takes ssh's options and runs the command line, as this user's shell would at the other end.
FAKE_SSH = """\
#!/bin/sh
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


def call(
    arguments: list[str], folder: Path, **variables: str
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        arguments,
        cwd=folder,
        env=clean_environment() | variables,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )


def clean_environment() -> dict[str, str]:
    """As when nobody has launched these tests as one of many."""
    return {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")}


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


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
    source = "import time\nprint('ready', flush=True)\ntime.sleep(60)\n"
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
"""


@pytest.mark.parametrize("order", ["before", "after"])
def test_options_say_which_host_this_is(order: str, tmp_path: Path) -> None:
    write(tmp_path / "script.py", PLACE)
    write(tmp_path / "key", "k" * 32)
    options = ["--hosts", "2", "--host-index=1", "--rendezvous", "[::1]:29400", "--devices", "3"]
    options += ["--secret-file", "key"]
    words = [*options, "script.py"] if order == "before" else ["script.py", *options]
    assert call([*LOCKSTEP, "run", *words], tmp_path).stdout == "(1, 2, '[::1]:29400', 3)\n"


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
        ["--host-index means nothing without --hosts"],
    ),
    "no address": (
        ["--rendezvous", "::1:80", "{file}"],
        ["--rendezvous must be host:port, with an IPv6 address in brackets. Received: '::1:80'"],
    ),
    "no secret": (["--secret-file", "nowhere", "{file}"], ["--secret-file must be a file"]),
    "options of --ssh": (
        ["--port", "1", "--ssh-command", "x", "--python", "p", "--directory", "d", "{file}"],
        [
            f"{name} means nothing without --ssh"
            for name in ("--port", "--ssh-command", "--python", "--directory")
        ],
    ),
    "options of one host": (
        ["--ssh", "h", "--hosts", "2", "--host-index", "0", "--secret-file", "{file}", "{file}"],
        [f"{name} means nothing with --ssh" for name in ("--hosts", "--host-index")]
        + ["--secret-file means nothing with --ssh"],
    ),
    "two ports": (
        ["--ssh", "h", "--rendezvous", "a:1", "--port", "2", "{file}"],
        ["--port means nothing with --rendezvous"],
    ),
    "no port": (
        ["--ssh", "h", "--port", "65536", "{file}"],
        ["--port must be from 1 to 65535. Received: --port 65536"],
    ),
    "no host file": (["--ssh", "nowhere", "{file}"], ["The host file must be a text file"]),
    "whose option is it": (
        ["{file}", "data.csv", "--devices=2"],
        ["must stand before the script's own arguments. Received: --devices=2"],
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, messages = MISTAKES[name]
    file = write(tmp_path / "script.py", "raise AssertionError")
    assert main(["run", *(word.format(file=file) for word in words)]) == 2
    told = capsys.readouterr().err
    assert [message for message in messages if message not in told] == [], told
    assert len(told.splitlines()) == (1 if len(messages) == 1 else len(messages) + 1)


def test_what_follows_two_dashes_is_the_script_s(tmp_path: Path) -> None:
    write(tmp_path / "script.py", SHOW)
    words = ["--devices", "2", "script.py", "--", "--devices", "7", "--"]
    shown = json.loads(call([*LOCKSTEP, "run", *words], tmp_path).stdout)
    assert shown["argv"] == ["script.py", "--devices", "7", "--"]
    assert shown["lockstep"] == {"LOCKSTEP_DEVICES": "2"}


# --- on all hosts, by ssh -------------------------------------------------------------------------


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options that have the stand-in for ssh used; its commands are written to ``ssh.log``."""
    path = write(tmp_path / "fake-ssh", FAKE_SSH)
    path.chmod(0o755)
    write(tmp_path / "ssh.log", "")
    monkeypatch.setenv("FAKE_SSH_LOG", str(tmp_path / "ssh.log"))
    write(tmp_path / "hosts", "# two of them\n127.0.0.1\nada@second devices=3  # and more\n")
    return ["--ssh", "hosts", "--ssh-command", f"{path} -p 22"]


# The hosts meet where they are told, over a socket of their own.
MEET = """
import os, socket, sys
from lockstep.cluster.environment import find_place
place = find_place(os.environ)
address = place.rendezvous[0]
if place.leads and place.host == 0:
    with socket.create_server((address.name, address.port)) as server:
        server.settimeout(30)
        peer, _ = server.accept()
        with peer:
            told = peer.recv(100).decode()
else:
    import time
    for attempt in range(1000):
        try:
            with socket.create_connection((address.name, address.port), 30) as peer:
                peer.sendall(b"hello")
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    told = "nothing"
print(place.host, place.num_hosts, place.devices, told, len(os.environ["LOCKSTEP_SECRET"]),
      os.getcwd() == sys.path[0], sys.argv[1:])
"""


def test_all_hosts_of_a_file_run_the_script_and_can_meet(tmp_path: Path, ssh: list[str]) -> None:
    write(tmp_path / "script.py", MEET)
    done = call([*LOCKSTEP, "run", *ssh, "script.py", "a b", "--c"], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [
        "0 2 None hello 64 True ['a b', '--c']",
        "[second] 1 2 3 nothing 64 True ['a b', '--c']",
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


def test_a_given_rendezvous_and_devices_are_told(tmp_path: Path, ssh: list[str]) -> None:
    write(tmp_path / "script.py", PLACE)
    words = ["run", *ssh, "--rendezvous", "10.0.0.9:29400", "--devices", "2", "script.py"]
    done = call([*LOCKSTEP, *words], tmp_path)
    assert sorted(done.stdout.splitlines()) == [
        "(0, 2, '10.0.0.9:29400', 2)",
        "[second] (1, 2, '10.0.0.9:29400', 3)",
    ]


def test_interpreter_and_directory_can_be_others(tmp_path: Path, ssh: list[str]) -> None:
    write(tmp_path / "code" / "script.py", "import os, sys\nprint(os.getcwd(), sys.executable)")
    other = write(tmp_path / "python with blanks", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    other.chmod(0o755)
    words = [*ssh, "--directory", str(tmp_path / "code"), "--python", str(other), "script.py"]
    done = call([*LOCKSTEP, "run", *words], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith(str(tmp_path / "code"))
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
        f"{prefix}failing\nlockstep: {name} failed with exit status 5, the others are ended.\n"
    )
    wait_until(lambda: not marked("first-failure"), 5)


def test_a_script_that_dies_of_a_signal_fails(tmp_path: Path, ssh: list[str]) -> None:
    write(tmp_path / "script.py", "import os\nos.kill(os.getpid(), 9)")
    assert call([*LOCKSTEP, "run", *ssh, "script.py"], tmp_path).returncode == 128 + 9


def test_hosts_that_cannot_be_reached_are_named(tmp_path: Path, ssh: list[str]) -> None:
    write(tmp_path / "script.py", "import time\ntime.sleep(60)")
    write(tmp_path / "hosts", "unreachable\nother\n")
    done = call([*LOCKSTEP, "run", *ssh, "script.py"], tmp_path)
    assert done.returncode == 2
    assert "unreachable must be reached without a password" in done.stderr
    assert "no route to unreachable (exit status 255)" in done.stderr
    write(tmp_path / "hosts", "127.0.0.1\nunreachable\n")
    done = call([*LOCKSTEP, "run", *ssh, "script.py"], tmp_path)
    assert done.returncode == 255
    assert "[unreachable] ssh: no route to unreachable" in done.stderr
    write(tmp_path / "hosts", "192.0.2.1\n")  # an address of no host
    done = call([*LOCKSTEP, "run", *ssh, "script.py"], tmp_path)
    assert done.returncode == 2
    assert "192.0.2.1 is no address of this host" in done.stderr
    words = ["--ssh", "hosts", "--ssh-command", "nossh", "script.py"]
    done = call([*LOCKSTEP, "run", *words], tmp_path)
    assert done.returncode == 2
    assert "No such file or directory: 'nossh'" in done.stderr


def test_a_directory_that_is_not_there_is_told(tmp_path: Path, ssh: list[str]) -> None:
    write(tmp_path / "script.py", "")
    done = call([*LOCKSTEP, "run", *ssh, "--directory", "/nowhere", "script.py"], tmp_path)
    assert done.returncode == 126
    assert "lockstep: the script cannot be started: [Errno 2]" in done.stderr


WAIT = """
import os, signal, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
if "--stubborn" in sys.argv:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
try:
    print("ready", os.environ["LOCKSTEP_HOST_INDEX"], flush=True)
    time.sleep(120)
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
        wait_until(lambda: not script.others(), 5, lambda: f"left: {script.others()}")


def test_the_second_ctrl_c_ends_all(tmp_path: Path, ssh: list[str]) -> None:
    command = command_over_ssh(ssh, "--stubborn")
    with running(WAIT, directory=tmp_path, command=command) as script:
        for _ in range(2):
            script.wait_for_line("")
        script.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert script.process.poll() is None
        script.process.send_signal(signal.SIGINT)
        assert script.finish()[0] == 130
        wait_until(lambda: not script.others(), 5, lambda: f"left: {script.others()}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_where_the_command_is_killed(
    number: int, tmp_path: Path, ssh: list[str]
) -> None:
    with running(WAIT, directory=tmp_path, command=command_over_ssh(ssh)) as script:
        for _ in range(2):
            script.wait_for_line("")
        script.process.send_signal(number)
        wait_until(lambda: not script.others(), 15, lambda: f"left: {script.others()}")


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
    orders = Orders(script=Script(target="a.py"), directory="/", variables={}, secret="s3cret")
    assert "s3cret" not in repr(orders) + str(orders) + repr([orders])
    assert b"s3cret" in orders.line()


def test_orders_that_do_not_come_start_nothing(tmp_path: Path) -> None:
    for text in ("", '{"script"'):
        done = subprocess.run(
            [sys.executable, "-m", "lockstep.launch.held_script"],
            input=text,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
        assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
