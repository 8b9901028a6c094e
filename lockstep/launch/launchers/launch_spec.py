"""The launch specification of a script on one host, which its agent (``remote_agent``) reads.

A new job's hosts share a secret, which is made here. The variables are those that ``lockstep run``
on each host would set.
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

# Sent to an agent after the specification: the script gets Ctrl-C.
INTERRUPT = bytes([signal.SIGINT])

# The variables on which a progress display depends.
_TERMINAL_VARIABLES = ("TERM", "COLORTERM", "NO_COLOR")

# Environment variables; None removes one.
Variables = dict[str, str | None]


class Terminal(msgspec.Struct, frozen=True, kw_only=True):
    """The terminal that shows the script's output, which its pseudo-terminal imitates.

    Attributes:
        streams: the script's streams that it shows: 1 is its output, 2 are its errors.
        columns: its width.
        lines: its height.
    """

    streams: tuple[int, ...]
    columns: int
    lines: int


class LaunchSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How to run the script on one host.

    Attributes:
        script: the script.
        directory: its working directory.
        variables: added to the environment; None removes one.
        secret: the job's.
        terminal: the terminal that shows its output, if there is one.
    """

    script: Script
    directory: str
    variables: Variables
    secret: str
    terminal: Terminal | None = None

    def __repr__(self) -> str:  # without the secret: tracebacks may show it
        return f"LaunchSpec({self.script})"

    def line(self) -> bytes:
        """The line that is sent to the agent."""
        return msgspec.json.encode(self) + b"\n"

    @property
    def environment(self) -> dict[str, str]:
        """The script's environment."""
        changed = {**os.environ, **self.variables, "LOCKSTEP_SECRET": self.secret}
        return {name: value for name, value in changed.items() if value is not None}


def make_host_specs(
    script: Script,
    directory: str,
    rendezvous: Address,
    devices: Sequence[int | None],
    servers: int | None = None,
) -> list[LaunchSpec]:
    """The specifications for the hosts of a new job.

    Args:
        script: the script.
        directory: its working directory on every host.
        rendezvous: where host 0 listens.
        devices: the number for each host; None leaves it to the script.
        servers: the number of parameter servers; None leaves it to the script.
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
    return _make_specs(script, directory, hosts)


def make_process_specs(script: Script, directory: str, num_processes: int) -> list[LaunchSpec]:
    """The specifications for the processes of a new job on this host, with one device each."""
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
    return _make_specs(script, directory, processes)


def make_torchrun_specs(
    script: Script, directory: str, num_processes: int, rendezvous: Address, more: Variables
) -> list[LaunchSpec]:
    """The specifications for processes of this host with the environment of torchrun.

    Args:
        script: the script.
        directory: its working directory.
        num_processes: how many.
        rendezvous: where rank 0 listens.
        more: variables for all of them.
    """
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    processes: list[Variables] = [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_processes),
            "LOCAL_WORLD_SIZE": str(num_processes),
            "GROUP_RANK": "0",
            "NODE_RANK": "0",
            "MASTER_ADDR": rendezvous.name,
            "MASTER_PORT": str(rendezvous.port),
            "TORCHELASTIC_RUN_ID": "lockstep",
            "OMP_NUM_THREADS": threads,
            **more,
        }
        for rank in range(num_processes)
    ]
    return _make_specs(script, directory, processes)


def _make_specs(
    script: Script, directory: str, all_variables: Sequence[Variables]
) -> list[LaunchSpec]:
    """The specifications for a new job, by the variables in which they differ."""
    job, secret = secrets.token_hex(8), secrets.token_hex(32)
    terminal = _own_terminal()
    specs = []
    for number, variables_here in enumerate(all_variables):
        variables = {**variables_here, "LOCKSTEP_JOB": job, "LOCKSTEP_SECRET_FILE": None}
        is_first = number == 0
        if is_first and terminal is not None:
            variables |= {name: os.environ.get(name) for name in _TERMINAL_VARIABLES}
        specs.append(
            LaunchSpec(
                script=script,
                directory=directory,
                variables=variables,
                secret=secret,
                terminal=terminal if is_first else None,
            )
        )
    return specs


def _own_terminal() -> Terminal | None:
    """The terminal that this process writes to, if there is one."""
    streams = tuple(
        number for number, stream in ((1, sys.stdout), (2, sys.stderr)) if stream.isatty()
    )
    if not streams:
        return None
    columns, lines = shutil.get_terminal_size()
    return Terminal(streams=streams, columns=columns, lines=lines)
