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
    variables: dict[str, str | None]
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
    script: Script, directory: str, rendezvous: Address, devices: Sequence[int | None]
) -> list[Orders]:
    """Orders for the hosts of a new job.

    Args:
        script: what to run.
        directory: where, on every host.
        rendezvous: where host 0 listens.
        devices: how many each host is to use; None leaves that to the script.
    """
    job, secret = secrets.token_hex(8), secrets.token_hex(32)
    terminal = _shown_terminal()
    all_orders = []
    for host, number in enumerate(devices):
        variables: dict[str, str | None] = {
            "LOCKSTEP_HOSTS": str(len(devices)),
            "LOCKSTEP_HOST_INDEX": str(host),
            "LOCKSTEP_RENDEZVOUS": str(rendezvous),
            "LOCKSTEP_DEVICES": None if number is None else str(number),
            "LOCKSTEP_JOB": job,
            "LOCKSTEP_SECRET_FILE": None,
        }
        if host == 0 and terminal is not None:
            variables |= {name: os.environ.get(name) for name in _OF_TERMINALS}
        all_orders.append(
            Orders(
                script=script,
                directory=directory,
                variables=variables,
                secret=secret,
                terminal=terminal if host == 0 else None,
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
