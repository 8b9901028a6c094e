"""Members whose agents, or the ssh clients to them, are processes of this machine."""

import os
import sys
from collections.abc import Sequence

from lockstep.cluster.devices import usable_cores
from lockstep.cluster.place import Address
from lockstep.launch.free_port import find_free_port
from lockstep.launch.launchers.launch_spec import (
    INTERRUPT,
    LaunchSpec,
    make_host_specs,
    make_process_specs,
)
from lockstep.launch.launchers.multi_host_run import AGENT_ARGUMENTS, AgentProcess, Member, watch
from lockstep.launch.script import Script

_LOOPBACK = "127.0.0.1"


class LocalMember(AgentProcess, Member):
    """A member with an agent process.

    Args:
        host: see ``Member``.
        prefix: see ``Member``.
        command: starts the agent.
        spec: for the agent.
    """

    def __init__(self, host: str, prefix: str, command: Sequence[str], spec: LaunchSpec) -> None:
        Member.__init__(self, host, prefix)
        AgentProcess.__init__(self, command, spec)

    def interrupt(self) -> None:
        self.write(INTERRUPT)


def run_members(
    commands: Sequence[tuple[str, str, Sequence[str]]], specs: Sequence[LaunchSpec]
) -> int:
    """Start members, and watch them; see ``watch``.

    Args:
        commands: each member's name, the prefix of its lines, and the command of its agent.
        specs: each agent's.
    """
    members: list[LocalMember] = []
    try:
        for (name, prefix, command), spec in zip(commands, specs, strict=True):
            members.append(LocalMember(name, prefix, command, spec))
        return watch(members)
    finally:
        for member in members:
            member.close()


def run_processes(script: Script, num_processes: int) -> int:
    """Run a script in several processes of this host, with one device each.

    Returns:
        The exit status of the first that failed, or 0.
    """
    return _run_here("process", make_process_specs(script, os.getcwd(), num_processes))


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
    names = [f"{kind} {number}" for number in range(len(specs))]
    return run_members(
        [(name, f"[{name}] " if number else "", command) for number, name in enumerate(names)],
        specs,
    )
