"""``lockstep doctor`` as typed: alone, on two hosts with a slow link, where one does not come."""

import json
import os
import re
import resource
import secrets
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.cli.main import main
from tests.netns import Hosts

pytestmark = pytest.mark.thorough

MakeHosts = Callable[[int], Hosts]

COMMAND = [sys.executable, "-m", "lockstep", "doctor"]
TIMEOUT_SECONDS = 180.0
PORT = 29400  # of hosts that are ours alone
WIDE = {"COLUMNS": "250"}  # no line is broken


def on_hosts(hosts: Hosts, host: int, *options: str) -> list[str]:
    where = f"{hosts.address(0)}:{PORT}"
    own = ["--hosts", str(len(hosts)), "--host-index", str(host), "--rendezvous", where]
    return [*COMMAND, *own, *options]


def package_of_another_version(folder: Path, name: str, version: str) -> str:
    """A search path on which a package has another version, for those who ask for it."""
    metadata = folder / f"{name}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def without_torch(folder: Path) -> dict[str, str]:
    """Variables of hosts on which torch is broken: there is less to examine, so it is quick."""
    (folder / "torch.py").write_text("raise ImportError('libsomething.so is missing')")
    return {"PYTHONPATH": package_of_another_version(folder, "torch", "9.8.7")}


def alone(*, env: dict[str, str], prepare: Callable[[], None] | None = None) -> tuple[int, str]:
    """Exit status and output of the command on this host."""
    done = subprocess.run(
        COMMAND,
        env={**os.environ, **WIDE, **env},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        preexec_fn=prepare,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_this_host_alone() -> None:
    status, out = alone(env={"LOCKSTEP_DEVICES": "3"})
    assert status == 0
    for fact in (
        r"^Cores +\d+ of \d+, \d+\.\d busy with other work",
        r"^Speed of a core +\d+ GFLOP/s",
        r"^Devices +3 *$",
        r"^Memory +.*iB, .*iB free",
        r"^Open files +[\d,]+",
        r"^Helper processes +the first after .*s, another after \d.* ms",
        r"^Lockstep +\d",
        r"^torch +\d",
        r"^Nothing is wrong\.$",
    ):
        assert re.search(fact, out, re.MULTILINE), (fact, out)
    assert "more devices than cores" in out or (os.cpu_count() or 1) > 2
    assert "host 0" not in out


def test_what_is_wrong_with_this_host(tmp_path: Path) -> None:
    limits = (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    status, out = alone(
        env=without_torch(tmp_path),
        prepare=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits),
    )
    assert status == 1
    assert "Wrong: This host must be such that torch can be imported. Received: ImportError" in out
    assert "libsomething.so is missing" in out
    assert "a limit of 256" in out
    assert re.search(r"^torch +9\.8\.7", out, re.MULTILINE)
    assert "Training will fail, or be refused." in out


@pytest.mark.exhaustive
def test_threads_that_are_bound_are_noticed() -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core is all there is: nothing can be bound to less")
    status, out = alone(env={"OMP_PROC_BIND": "true"})
    assert status == 0
    assert "binds every process that loads torch to the same 1 core of" in out
    assert "Received: OMP_PROC_BIND=true" in out


@pytest.mark.exhaustive
def test_two_hosts_with_a_slow_link(make_hosts: MakeHosts, tmp_path: Path) -> None:
    hosts = make_hosts(2)
    hosts.shape(1, "200mbit")
    secret = tmp_path / "secret"
    secret.write_text(secrets.token_hex(32))
    secret.chmod(0o600)
    other = {"PYTHONPATH": package_of_another_version(tmp_path, "numpy", "1.26.3")}
    first, second = (
        hosts.run(
            host, on_hosts(hosts, host, "--secret-file", str(secret)), {**WIDE, **env}, like="torch"
        )
        for host, env in ((0, {}), (1, other))
    )
    assert "Host 1 is examined: host 0 shows the findings." in second.check()
    out = first.check()
    speeds = re.search(r"^0 and 1 +([\d.]+) Mbit/s +([\d.]+) Mbit/s +[\d.]+ ms", out, re.MULTILINE)
    assert speeds is not None, out
    for speed in speeds.groups():
        assert 60 < float(speed) < 260, "a busy machine may be slower than the link"
    assert "version of numpy" in out
    assert "1.26.3 on host 1" in out
    assert "The slowest link is that between host 0 and host 1" in out


@pytest.mark.exhaustive
def test_hosts_that_must_agree(make_hosts: MakeHosts, tmp_path: Path) -> None:
    """Under TF_CONFIG; the verdict of host 0 is that of all."""
    hosts = make_hosts(2)
    workers = [f"{hosts.address(host)}:{PORT}" for host in range(2)]
    secret = secrets.token_hex(32)
    other = {"PYTHONPATH": package_of_another_version(tmp_path, "torch", "2.9.1")}
    processes = []
    for host, env in ((0, {}), (1, other)):
        task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": host}}
        own = {"TF_CONFIG": json.dumps(task), "LOCKSTEP_SECRET": secret, **WIDE, **env}
        processes.append(hosts.run(host, COMMAND, own, like="torch"))
    status, out, _ = processes[0].finish()
    assert status == 1
    assert "Wrong: All hosts should have the same version of torch." in out
    assert "2.9.1 on host 1" in out
    assert secret not in out
    assert processes[1].finish()[0] == 1


@pytest.mark.exhaustive
def test_a_host_that_does_not_come_is_named(make_hosts: MakeHosts, tmp_path: Path) -> None:
    hosts = make_hosts(2)
    env = {"LOCKSTEP_SECRET": secrets.token_hex(32), **WIDE, **without_torch(tmp_path)}
    status, out, err = hosts.run(0, on_hosts(hosts, 0, "--timeout", "2"), env).finish()
    assert (status, err) == (1, "Waiting at 10.77.0.1:29400 for 1 of 2 hosts: host 1.\n")
    assert "Wrong: All 2 hosts must connect to host 0 at 10.77.0.1:29400 within 2.0 s." in out
    assert "no connection from host 1" in out
    assert re.search(r"^Cores +\d", out, re.MULTILINE), "its own facts are shown all the same"


def test_without_a_secret_hosts_do_not_meet(make_hosts: MakeHosts, tmp_path: Path) -> None:
    hosts = make_hosts(2)
    env = {**WIDE, **without_torch(tmp_path)}
    status, out, err = hosts.run(1, on_hosts(hosts, 1), env).finish()
    assert (status, err) == (1, "")
    assert "Wrong: The hosts of a job must share a secret" in out
    assert "umask 077" in out, "how to make one"


def test_who_does_not_lead_its_host_is_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torchrun = {
        "RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.77.0.1",
        "MASTER_PORT": "29500",
    }
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor"]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (
            ["--hosts", "2"],
            r"--hosts, --host-index and --rendezvous must be given together.*Received: --hosts",
        ),
        (["--host-index", "0", "--rendezvous", "a:1"], "Received: --host-index and --rendezvous"),
        (
            ["--hosts", "2", "--host-index", "2", "--rendezvous", "a:1"],
            "LOCKSTEP_HOST_INDEX must be below LOCKSTEP_HOSTS",
        ),
        (["--hosts", "2", "--host-index", "0", "--rendezvous", "a"], "host:port"),
        (["--timeout", "0"], r"--timeout must be a positive number of seconds.*Received: 0\.0"),
        (["--timeout", "nan"], r"--timeout must be.*nan"),
        (["--seconds", "-1"], r"--seconds must be.*-1\.0"),
        (["--seconds", "inf"], r"--seconds must be.*inf"),
    ],
)
def test_options_that_cannot_be(
    options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *options]) == 2
    assert re.search(complaint, capsys.readouterr().err)
