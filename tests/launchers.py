"""Scripts on several hosts, started as users start them: by TF_CONFIG, torchrun or lockstep run.

Hosts are network namespaces (``netns``), where any port is free, or addresses of the loopback
interface, which need no root. What a script prints is one JSON value per line, written at once, so
that lines of several processes do not mix.
"""

import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests import warm
from tests.netns import HostProcess, Hosts

SECRET = {"LOCKSTEP_SECRET": "known to the hosts of the tests, and to nobody else"}
ROOT = Path(__file__).parents[1]

# A namespace is new, so nobody else has these ports.
PORT = 29400
_MASTER_PORT = 29500

# Begins every script: warnings are errors, as everywhere in the tests.
BEGINNING = """
from tests.launching import be_strict
be_strict()
import json, os, sys, time
import torch
from torch import nn
import lockstep

def tell(value):
    sys.stdout.write(json.dumps(value) + "\\n")
    sys.stdout.flush()
"""

# Starts a script with arguments on one of several hosts, with so many devices each.
Launcher = Callable[[Hosts, int, list[str], Sequence[int]], HostProcess]

# Returns what a script has told, which has so many seconds to come to its end.
Reader = Callable[[HostProcess, float], list[Any]]


def by_tf_config(
    hosts: Hosts, index: int, script: list[str], devices: Sequence[int]
) -> HostProcess:
    addresses = [f"{hosts.address(each)}:{PORT}" for each in range(len(devices))]
    environment = {**tf_config(addresses, index), "LOCKSTEP_DEVICES": str(devices[index])}
    return hosts.run(index, [sys.executable, *script], environ(environment), like="torch")


def by_lockstep_run(
    hosts: Hosts, index: int, script: list[str], devices: Sequence[int]
) -> HostProcess:
    command = [
        *(sys.executable, "-m", "lockstep", "run", "--hosts", str(len(devices))),
        *("--host-index", str(index), "--devices", str(devices[index])),
        *("--rendezvous", f"{hosts.address(0)}:{PORT}", *script),
    ]
    return hosts.run(index, command, environ({}), like="torch")


def by_torchrun(hosts: Hosts, index: int, script: list[str], devices: Sequence[int]) -> HostProcess:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(devices))),
        *("--node-rank", str(index), "--nproc-per-node", str(devices[index])),
        *("--master-addr", hosts.address(0), "--master-port", str(_MASTER_PORT), *script),
    ]
    # Its own store complains that it does not know the names of the hosts.
    return hosts.run(index, command, environ({"TORCH_CPP_LOG_LEVEL": "ERROR"}), like="torch")


def tf_config(addresses: Sequence[str], index: int) -> dict[str, str]:
    task = {"type": "worker", "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": list(addresses)}, "task": task})}


def environ(more: Mapping[str, str]) -> dict[str, str]:
    """Variables for a script that knows the secret and finds this copy of the package."""
    return {**SECRET, "PYTHONPATH": str(ROOT), **more}


@contextmanager
def on_loopback(
    script: list[str],
    *,
    num_hosts: int = 2,
    roles: Mapping[str, Sequence[int]] | None = None,
    devices: int = 1,
    options: Sequence[str] = (),
    variables: Mapping[str, str | None] | None = None,
    like: str = "torch",
    directory: Path = ROOT,
) -> Iterator[list[HostProcess]]:
    """The same script on addresses of the loopback interface; all have ended after the block.

    Args:
        script: its path and arguments; ``{host}`` in them is the host's number.
        num_hosts: how many.
        roles: in place of that, the tasks of each role, by their hosts' numbers: a process for
            each.
        devices: of each host that is one process.
        options: of the interpreter.
        variables: added to the environment; None removes one.
        like: the kind of warm interpreter that may run it (see ``warm``).
        directory: where it runs.
    """
    own = warm.VARIABLES if roles else {**warm.VARIABLES, "LOCKSTEP_DEVICES": str(devices)}
    roles = roles or {"worker": range(num_hosts)}
    hosts = [host for tasks in roles.values() for host in tasks]
    addresses = iter(_free_addresses(hosts))
    cluster = {role: [next(addresses) for _ in tasks] for role, tasks in roles.items()}
    tasks = [(role, index) for role, each in roles.items() for index in range(len(each))]
    with ExitStack() as stack:
        processes = []
        for host, (role, index) in zip(hosts, tasks, strict=True):
            words = [word.replace("{host}", str(host)) for word in script]
            config = {"cluster": cluster, "task": {"type": role, "index": index}}
            place = {"TF_CONFIG": json.dumps(config)}
            told = {**os.environ, **own, **environ(place), **(variables or {})}
            environment = {name: value for name, value in told.items() if value is not None}
            argv = [sys.executable, *options, *words]
            process = HostProcess(argv, environment, directory, like=like)
            stack.callback(process.close)
            stack.callback(process.end)
            processes.append(process)
        yield processes


def run_script(
    arguments: Sequence[str | Path],
    directory: Path,
    variables: Mapping[str, str | None] | None = None,
    *,
    like: str | None = "torch",
    timeout_seconds: float = 280.0,
) -> str:
    """What a script of this host says; it must come to a good end.

    Args:
        arguments: of the interpreter: options, the script, and what is for the script.
        directory: where it runs.
        variables: added to the environment; None removes one.
        like: the kind of warm interpreter that may run it; None starts a fresh one.
        timeout_seconds: longest wait; below pytest's, so that its stacks are shown.
    """
    status, out, err = finished(
        arguments, directory, variables, like=like, timeout_seconds=timeout_seconds
    )
    assert status == 0, f"{out[-3000:]}\n{err[-3000:]}"
    return out


def finished(
    arguments: Sequence[str | Path],
    directory: Path,
    variables: Mapping[str, str | None] | None = None,
    *,
    like: str | None = "torch",
    timeout_seconds: float = 280.0,
) -> tuple[int, str, str]:
    """Status, output and errors of a script that ``run_script`` would run."""
    told = {**os.environ, **warm.VARIABLES, **(variables or {})}
    environment = {name: value for name, value in told.items() if value is not None}
    process = HostProcess([sys.executable, *map(str, arguments)], environment, directory, like=like)
    try:
        return process.finish(timeout_seconds)
    finally:
        process.close()


def by_standalone_torchrun(
    script: list[str], timeout_seconds: float, *, like: str = "torch"
) -> list[Any]:
    """All that two processes of this host have told; they must come to a good end."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *script]
    variables = environ({"TORCH_CPP_LOG_LEVEL": "ERROR"})
    out = run_script(words, Path.cwd(), variables, like=like, timeout_seconds=timeout_seconds)
    return [json.loads(line) for line in out.splitlines()]


def lines(process: HostProcess, timeout_seconds: float = 60.0) -> list[Any]:
    """All that a script has told; it must come to a good end, and have nothing to complain of."""
    return [json.loads(line) for line in process.check(timeout_seconds).splitlines()]


def lines_of_all(
    processes: Sequence[HostProcess], timeout_seconds: float, read: Reader = lines
) -> list[list[Any]]:
    """What scripts have told that were started together; the limit is that of all of them.

    It must be below that of pytest: then an error shows what a script is doing.
    """
    deadline = time.monotonic() + timeout_seconds
    return [read(each, max(deadline - time.monotonic(), 0.0)) for each in processes]


def _free_addresses(hosts: Sequence[int]) -> list[str]:
    """One on each of these hosts.

    Until they are used anybody may take their ports, but hardly at such addresses.
    """
    network = f"127.{1 + secrets.randbelow(255)}.{secrets.randbelow(256)}"
    with ExitStack() as stack:
        found = []
        for host in hosts:
            address = f"{network}.{host + 1}"
            sock = stack.enter_context(socket.socket())
            sock.bind((address, 0))
            found.append(f"{address}:{sock.getsockname()[1]}")
        return found
