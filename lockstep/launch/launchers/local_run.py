"""Runs the script several times on this machine: in processes of one host, or as several hosts."""

import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial

from lockstep.cluster.devices import usable_cores
from lockstep.cluster.place import Address
from lockstep.launch.free_port import find_free_port
from lockstep.launch.launchers.launch_spec import (
    LaunchSpec,
    make_host_specs,
    make_process_specs,
    make_torchrun_specs,
)
from lockstep.launch.launchers.multi_host_run import AGENT_ARGUMENTS, AgentProcess, run_members
from lockstep.launch.script import Script

_LOOPBACK = "127.0.0.1"


def run_processes(script: Script, num_processes: int) -> int:
    """Run a script in several processes of this host, with one device each.

    Returns:
        The exit status of the first that failed, or 0.
    """
    return _run_here("process", make_process_specs(script, os.getcwd(), num_processes))


def run_like_torchrun(script: Script, num_processes: int, variables: Mapping[str, str]) -> int:
    """Run a script in processes of this host, with the environment that torchrun would give them.

    Returns:
        The exit status of the first that failed, or 0.
    """
    where = Address(_LOOPBACK, find_free_port(_LOOPBACK))
    specs = make_torchrun_specs(script, os.getcwd(), num_processes, where, {**variables})
    return _run_here("process", specs)


def run_hosts(script: Script, num_hosts: int, *, devices: int | None, servers: int | None) -> int:
    """Run a script on several hosts, all of which are this machine.

    Args:
        script: the script.
        num_hosts: the number of hosts.
        devices: of each host; None is an equal part of the cores.
        servers: see ``make_host_specs``.

    Returns:
        The exit status of the first that failed, or 0.
    """
    where = Address(_LOOPBACK, find_free_port(_LOOPBACK))
    each = devices or max(usable_cores() // num_hosts, 1)
    return _run_here(
        "host", make_host_specs(script, os.getcwd(), where, [each] * num_hosts, servers)
    )


def _run_here(kind: str, specs: Sequence[LaunchSpec]) -> int:
    command = (sys.executable, *AGENT_ARGUMENTS)
    starts = [partial(AgentProcess, command, spec) for spec in specs]
    return run_members((f"{kind} {number}", start) for number, start in enumerate(starts))
