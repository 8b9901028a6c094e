"""Members of a fleet that a process of this machine holds; and a fleet on this machine alone."""

import os
import sys
from collections.abc import Sequence

from lockstep.launch.fleet import HOLD_SCRIPT, HeldProcess, Member, watch
from lockstep.launch.orders import INTERRUPT, Orders, make_process_orders
from lockstep.launch.script import Script


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
    command = (sys.executable, *HOLD_SCRIPT)
    names = [f"process {number}" for number in range(num_processes)]
    return watch_held(
        [(name, f"[{name}] " if number else "", command) for number, name in enumerate(names)],
        make_process_orders(script, os.getcwd(), num_processes),
    )
