"""``lockstep launch ray``, on a real Ray cluster: two nodes of one core each, on this host."""

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.cli.main import main
from lockstep.errors import ExtraError
from lockstep.launch.launchers import ray_cluster
from lockstep.launch.script import Script
from tests.faults.processes import is_alive, running, wait_until
from tests.launching import LOCKSTEP, MEET, call, clean_environment, write

# In a process of its own, because Ray warns and starts threads. It ends with its input.
CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={
    "num_cpus": 1, "include_dashboard": False, "object_store_memory": 80_000_000})
cluster.add_node(num_cpus=1, object_store_memory=80_000_000)
print("address", cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Words that launch on it."""
    folder = tmp_path_factory.mktemp("ray")
    path = write(folder / "cluster.py", CLUSTER)
    with (folder / "errors").open("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=clean_environment() | {"RAY_USAGE_STATS_ENABLED": "0"},
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            found = next((line for line in process.stdout if line.startswith("address ")), "")
            assert found, (folder / "errors").read_text()
            yield ["launch", "ray", "--address", found.split()[1], "--devices", "1"]
        finally:
            process.stdin.close()
            try:
                process.wait(30)
            finally:
                process.kill()
                process.stdout.close()


@pytest.mark.thorough
def test_hosts_run_the_script_and_can_meet(tmp_path: Path, ray: list[str]) -> None:
    write(tmp_path / "script.py", MEET)
    done = call([*LOCKSTEP, *ray, "--hosts", "2", "script.py", "a b"], tmp_path)
    assert done.returncode == 0
    told = [line.removeprefix("[host 1] ") for line in done.stderr.splitlines()]
    assert all(line.startswith("Waiting ") for line in told), told  # on a busy machine
    assert sorted(done.stdout.splitlines()) == [
        "0 2 1 host 1 ['a b']",
        "[host 1] 1 2 1 host 0 ['a b']",
    ]


@pytest.mark.exhaustive
def test_the_first_failure_ends_all_others(tmp_path: Path, ray: list[str]) -> None:
    source = """
import os, pathlib, sys, time
if os.environ["LOCKSTEP_HOST_INDEX"] == "1":
    while not pathlib.Path("pid").exists():
        time.sleep(0.01)
    sys.exit("no more")
pathlib.Path("pid.new").write_text(str(os.getpid()))
os.rename("pid.new", "pid")
time.sleep(120)
"""
    write(tmp_path / "code" / "script.py", source)
    words = ["--hosts", "2", "--directory", str(tmp_path / "code"), "script.py"]
    done = call([*LOCKSTEP, *ray, *words], tmp_path)
    assert done.returncode == 1
    assert done.stderr.endswith(
        "[host 1] no more\nlockstep: host 1 failed with exit status 1; ending the others.\n"
    )
    pid = int((tmp_path / "code" / "pid").read_text())
    wait_until(lambda: not is_alive(pid), 10)


WAIT = """
import os, pathlib, time
try:
    pathlib.Path(f"pid{os.environ['LOCKSTEP_HOST_INDEX']}").write_text(str(os.getpid()))
    print("ready", flush=True)
    while True:
        time.sleep(1)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_scripts_end_with_the_command(number: int, tmp_path: Path, ray: list[str]) -> None:
    command = ["-m", "lockstep", *ray, "--hosts=2", "script.py"]
    with running(WAIT, directory=tmp_path, command=command, options=()) as script:
        assert {script.wait_for_line("") for _ in range(2)} == {"ready", "[host 1] ready"}
        script.process.send_signal(number)
        status, out, _ = script.finish()
    assert status == (130 if number == signal.SIGINT else -number)
    if number == signal.SIGINT:
        assert {"interrupted", "[host 1] interrupted"} <= set(out.splitlines())
    pids = [int((tmp_path / f"pid{host}").read_text()) for host in range(2)]
    wait_until(lambda: not any(map(is_alive, pids)), 30, lambda: f"left: {pids}")


@pytest.mark.exhaustive
def test_an_actor_that_dies_is_told(tmp_path: Path, ray: list[str]) -> None:
    source = """
import os, signal, time
if os.environ["LOCKSTEP_HOST_INDEX"] == "0":
    time.sleep(120)
holder = os.getppid()
actor = int(open(f"/proc/{holder}/stat").read().rpartition(")")[2].split()[1])
os.kill(actor, signal.SIGKILL)
time.sleep(120)
"""
    write(tmp_path / "script.py", source)
    done = call([*LOCKSTEP, *ray, "--hosts", "2", "script.py"], tmp_path)
    assert done.returncode == 1
    assert "[host 1] host 1 is lost: " in done.stderr
    assert "lockstep: host 1 failed with exit status 1; ending the others." in done.stderr


@pytest.mark.thorough
def test_a_cluster_that_is_too_small_is_told(tmp_path: Path, ray: list[str]) -> None:
    write(tmp_path / "script.py", "raise AssertionError")
    done = call([*LOCKSTEP, *ray, "--hosts", "3", "--timeout", "1", "script.py"], tmp_path)
    assert done.returncode == 2
    assert "must have 3 times 1 free CPUs (STRICT_SPREAD) within 1 s" in done.stderr
    assert "Received: nodes with 1, 1 CPUs" in done.stderr


@pytest.mark.exhaustive
def test_hosts_may_share_a_node_where_they_are_let(tmp_path: Path, ray: list[str]) -> None:
    write(tmp_path / "script.py", "import os\nprint(os.environ['LOCKSTEP_HOST_INDEX'])")
    for spread in ("SPREAD", "PACK"):
        words = ["--hosts", "2", "--spread", spread, "script.py"]
        done = call([*LOCKSTEP, *ray, *words], tmp_path)
        assert sorted(done.stdout.splitlines()) == ["0", "[host 1] 1"]


@pytest.mark.parametrize("source", ["option", "environment"])
def test_no_cluster_is_told(source: str, tmp_path: Path) -> None:
    write(tmp_path / "script.py", "raise AssertionError")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # taken, and not listened at
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        words = ["launch", "ray", "--hosts=1", "--devices=1", "script.py"]
        if source == "option":
            done = call([*LOCKSTEP, *words, "--address", address], tmp_path)
        else:
            done = call([*LOCKSTEP, *words], tmp_path, RAY_ADDRESS=address)
    assert done.returncode == 2
    assert f"There must be a Ray cluster at the address. Received: '{address}'" in done.stderr


def test_ray_need_not_be_installed_until_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    job = ray_cluster.RayJob(
        script=Script(target="a.py"), hosts=1, devices=1, directory=str(tmp_path)
    )
    with pytest.raises(ExtraError, match=re.escape('`pip install ".[ray]"` in a clone')):
        ray_cluster.run_on_ray(job)


MISTAKES = {
    "no numbers": (["a.py"], ["--hosts must be a number", "--devices must be a number"]),
    "no time": (
        ["--hosts=1", "--devices=1", "--timeout=0", "a.py"],
        ["--timeout must be positive. Received: --timeout 0.0"],
    ),
    "no address": (
        ["--hosts=1", "--devices=1", "--address=ray://a:1", "a.py"],
        ["--address must be auto or host:port. Received: 'ray://a:1'"],
    ),
    "no script": (["--hosts=1"], ["There must be a SCRIPT"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, messages = MISTAKES[name]
    assert main(["launch", "ray", *words]) == 2
    told = capsys.readouterr().err
    assert [message for message in messages if message not in told] == [], told


def test_the_spread_is_a_choice(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["launch", "ray", "--spread", "wide", "a.py"])
    assert re.search(r"wide.*choose from .*STRICT_SPREAD", capsys.readouterr().err)
