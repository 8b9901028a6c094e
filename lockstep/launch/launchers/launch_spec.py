"""What a held script is told: which script, where, as which of the hosts; see ``held_script.py``.

The hosts of a job share a secret that is made for it here, and they are told all else that
``lockstep run`` would be told on each of them.
"""

import os
import secrets
import shutil
import signal
import sys
from collections.abc import Sequence

import msgspec

from lockstep.cluster.place import Address
from lockstep.launch.script import Script

# What is written after the orders to have the script see Ctrl-C.
INTERRUPT = bytes([signal.SIGINT])

# What a progress display goes by.
_OF_TERMINALS = ("TERM", "COLORTERM", "NO_COLOR")

# Of an environment: None removes one.
Variables = dict[str, str | None]


class Terminal(msgspec.Struct, frozen=True, kw_only=True):
    """What the script is to take for its terminal: the one that its output will be shown on.

    Attributes:
        streams: of the script's, which are shown there: 1 is its output, 2 are its errors.
        columns: its width.
        lines: its height.
    """

    streams: tuple[int, ...]
    columns: int
    lines: int


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be run.

    Attributes:
        script: what.
        directory: where.
        variables: added to the environment; None removes one.
        secret: of the job.
        terminal: that the script's output is shown on; None where it is shown on none.
    """

    script: Script
    directory: str
    variables: Variables
    secret: str
    terminal: Terminal | None = None

    def __repr__(self) -> str:  # it may come to be shown in a traceback
        return f"Orders({self.script})"

    def line(self) -> bytes:
        """As they are sent."""
        return msgspec.json.encode(self) + b"\n"

    @property
    def environment(self) -> dict[str, str]:
        """Of the script."""
        changed = {**os.environ, **self.variables, "LOCKSTEP_SECRET": self.secret}
        return {name: value for name, value in changed.items() if value is not None}


def make_orders(
    script: Script,
    directory: str,
    rendezvous: Address,
    devices: Sequence[int | None],
    servers: int | None = None,
) -> list[Orders]:
    """Orders for the hosts of a new job.

    Args:
        script: what to run.
        directory: where, on every host.
        rendezvous: where host 0 listens.
        devices: how many each host is to use; None leaves that to the script.
        servers: parameter servers of the job; likewise.
    """
    hosts: list[Variables] = [
        {
            "LOCKSTEP_HOSTS": str(len(devices)),
            "LOCKSTEP_HOST_INDEX": str(host),
            "LOCKSTEP_RENDEZVOUS": str(rendezvous),
            "LOCKSTEP_DEVICES": None if number is None else str(number),
            "LOCKSTEP_SERVERS": None if servers is None else str(servers),
        }
        for host, number in enumerate(devices)
    ]
    return _orders(script, directory, hosts)


def make_process_orders(script: Script, directory: str, num_processes: int) -> list[Orders]:
    """Orders for the processes of a new job on this host, each of which is one device."""
    threads = os.environ.get("OMP_NUM_THREADS") or str(
        max((os.cpu_count() or 1) // num_processes, 1)
    )
    processes: list[Variables] = [
        {
            "LOCKSTEP_HOSTS": "1",
            "LOCKSTEP_HOST_INDEX": "0",
            "LOCKSTEP_PROCESSES": str(num_processes),
            "LOCKSTEP_PROCESS": str(process),
            "OMP_NUM_THREADS": threads,
        }
        for process in range(num_processes)
    ]
    return _orders(script, directory, processes)


def _orders(script: Script, directory: str, members: Sequence[Variables]) -> list[Orders]:
    """Orders for all members of a new job, by the variables in which they differ."""
    job, secret = secrets.token_hex(8), secrets.token_hex(32)
    terminal = _shown_terminal()
    all_orders = []
    for number, own in enumerate(members):
        variables = {**own, "LOCKSTEP_JOB": job, "LOCKSTEP_SECRET_FILE": None}
        is_first = number == 0
        if is_first and terminal is not None:
            variables |= {name: os.environ.get(name) for name in _OF_TERMINALS}
        all_orders.append(
            Orders(
                script=script,
                directory=directory,
                variables=variables,
                secret=secret,
                terminal=terminal if is_first else None,
            )
        )
    return all_orders


def _shown_terminal() -> Terminal | None:
    """The one that this process writes to; None where it writes to none."""
    streams = tuple(
        number for number, stream in ((1, sys.stdout), (2, sys.stderr)) if stream.isatty()
    )
    if not streams:
        return None
    columns, lines = shutil.get_terminal_size()
    return Terminal(streams=streams, columns=columns, lines=lines)
