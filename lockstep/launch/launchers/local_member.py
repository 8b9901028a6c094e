"""Members of a fleet that a process of this machine holds; and fleets on this machine alone."""

import os
import sys
from collections.abc import Sequence

from lockstep.cluster.devices import usable_cores
from lockstep.cluster.place import Address
from lockstep.launch.free_port import find_free_port
from lockstep.launch.launchers.launch_spec import (
    INTERRUPT,
    Orders,
    make_orders,
    make_process_orders,
)
from lockstep.launch.launchers.multi_host_run import HOLD_SCRIPT, HeldProcess, Member, watch
from lockstep.launch.script import Script

_LOOPBACK = "127.0.0.1"


class HeldMember(HeldProcess, Member):
    """A process with the orders on its standard input.

    Args:
        host: see ``Member``.
        prefix: see ``Member``.
        command: to start it.
        orders: for the script.
    """

    def __init__(self, host: str, prefix: str, command: Sequence[str], orders: Orders) -> None:
        Member.__init__(self, host, prefix)
        HeldProcess.__init__(self, command, orders)

    def interrupt(self) -> None:
        self.tell(INTERRUPT)


def watch_held(commands: Sequence[tuple[str, str, Sequence[str]]], orders: Sequence[Orders]) -> int:
    """Start members, and watch them; see ``watch``.

    Args:
        commands: of each its name, the prefix of its lines, and the command.
        orders: of each.
    """
    members: list[HeldMember] = []
    try:
        for (name, prefix, command), own in zip(commands, orders, strict=True):
            members.append(HeldMember(name, prefix, command, own))
        return watch(members)
    finally:
        for member in members:
            member.close()


def run_processes(script: Script, num_processes: int) -> int:
    """Run a script in several processes of this host, each of which is one device.

    Returns:
        The exit status of the first that failed, or 0.
    """
    return _watch_here("process", make_process_orders(script, os.getcwd(), num_processes))


def run_hosts(script: Script, num_hosts: int, *, devices: int | None, servers: int | None) -> int:
    """Run a script on several hosts, all of which are this machine.

    Args:
        script: what to run.
        num_hosts: how many.
        devices: of each host; None is its part of the cores.
        servers: see ``make_orders``.

    Returns:
        The exit status of the first that failed, or 0.
    """
    where = Address(_LOOPBACK, find_free_port(_LOOPBACK))
    each = devices or max(usable_cores() // num_hosts, 1)
    return _watch_here("host", make_orders(script, os.getcwd(), where, [each] * num_hosts, servers))


def _watch_here(kind: str, orders: Sequence[Orders]) -> int:
    command = (sys.executable, *HOLD_SCRIPT)
    names = [f"{kind} {number}" for number in range(len(orders))]
    return watch_held(
        [(name, f"[{name}] " if number else "", command) for number, name in enumerate(names)],
        orders,
    )
