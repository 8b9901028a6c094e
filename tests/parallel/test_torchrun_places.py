"""Places under the real torchrun: two of its agents on this host, which stand for two hosts."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import MEET, TIMEOUT_SECONDS, clean_environment, free_port, write

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def agent(folder: Path, *options: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*TORCHRUN, *options, "script.py", "--rate", "1"],
        cwd=folder,
        env=clean_environment() | {"OMP_NUM_THREADS": "1", "LOCKSTEP_SECRET": "5" * 64},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outputs(agents: list["subprocess.Popen[str]"]) -> list[list[str]]:
    """The lines of each agent's workers."""
    try:
        said = [each.communicate(timeout=TIMEOUT_SECONDS) for each in agents]
    finally:
        for each in agents:
            each.kill()
    assert [each.returncode for each in agents] == [0] * len(agents), said
    return [sorted(out.splitlines()) for out, _ in said]


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_hosts_with_different_numbers_of_processes_can_meet(backend: str, tmp_path: Path) -> None:
    write(tmp_path / "script.py", MEET)
    port = free_port()
    where = {
        "static": ("--master-addr", "127.0.0.1", "--master-port", str(port)),
        "c10d": ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"),
    }[backend]
    # Which agent is host 0 is for c10d to say.
    agents = [
        agent(tmp_path, "--nnodes=2", f"--nproc-per-node={count}", f"--node-rank={host}", *where)
        for host, count in enumerate((1, 2))
    ]
    arguments = ["--rate", "1"]
    one, two = outputs(agents)
    first = int(one[0].split()[0])
    assert one == [f"{first} 2 1 host {1 - first} {arguments}"]
    assert two == sorted(
        [f"{1 - first} 2 2 host {first} {arguments}", f"{1 - first} 2 2 follows {arguments}"]
    )


@pytest.mark.thorough
def test_one_host_has_one_leader(tmp_path: Path) -> None:
    write(tmp_path / "script.py", MEET)
    (lines,) = outputs([agent(tmp_path, "--standalone", "--nproc-per-node=2")])
    arguments = ["--rate", "1"]
    assert lines == sorted([f"0 1 2 {arguments}", f"0 1 2 follows {arguments}"])
