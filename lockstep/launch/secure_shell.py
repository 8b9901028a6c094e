"""``lockstep run --ssh``: the script on every host of a file, with ssh and nothing else.

The hosts need the same directory, interpreter and Lockstep as this machine, and ssh must let in
without asking. They meet with a secret that is made for this one run. It goes to each of them on
the standard input of ssh, never in a command; so do all orders, see ``held_script.py``.

The port where the hosts meet is one that is free on the first of them when it is asked.
"""

import shlex
import subprocess
from collections.abc import Sequence

import msgspec

from lockstep.cluster.place import Address
from lockstep.errors import HostError, problem
from lockstep.launch.held_member import watch_held
from lockstep.launch.held_process import HOLD_SCRIPT
from lockstep.launch.host_file import ListedHost
from lockstep.launch.orders import make_orders
from lockstep.launch.script import Script

_PROBE_SECONDS = 60.0

_OPTIONS = (
    "-T",
    *("-o", "BatchMode=yes"),  # a password could not be asked for: our input takes orders
    *("-o", "ServerAliveInterval=15"),  # a host that vanishes is noticed
    *("-o", "ServerAliveCountMax=3"),
)


class Shells(msgspec.Struct, frozen=True, kw_only=True):
    """How to start something on the hosts.

    Attributes:
        command: ssh, and options for it.
        python: the interpreter on every host.
        directory: where the script runs, on every host.
    """

    command: tuple[str, ...]
    python: str
    directory: str

    def on(self, host: ListedHost, *words: str) -> tuple[str, ...]:
        """The command that runs the interpreter on a host."""
        # Whatever shell is there splits it again.
        return (*self.command, *_OPTIONS, host.login, shlex.join([self.python, *words]))


def run_on_hosts(
    script: Script,
    hosts: Sequence[ListedHost],
    shells: Shells,
    *,
    rendezvous: Address | None,
    port: int | None,
    devices: int | None,
) -> int:
    """Run a script on all hosts; returns the exit status of the first that failed, or 0.

    Args:
        script: what to run.
        hosts: where; number 0 is the first.
        shells: how to get there.
        rendezvous: where host 0 listens; None is its name, and a port that is free there.
        port: to be used with its name.
        devices: of hosts that do not say.

    Raises:
        HostError: host 0 cannot be reached, or its name is not one of its addresses there.
    """
    if rendezvous is None:
        port = _ask_for_port(hosts[0], shells) if port is None else port
        rendezvous = Address(name=hosts[0].name, port=port)
    all_orders = make_orders(
        script, shells.directory, rendezvous, [host.devices or devices for host in hosts]
    )
    commands = [
        (host.name, f"[{host.name}] " if number else "", shells.on(host, *HOLD_SCRIPT))
        for number, host in enumerate(hosts)
    ]
    return watch_held(commands, all_orders)


def _ask_for_port(host: ListedHost, shells: Shells) -> int:
    command = shells.on(host, "-m", "lockstep.launch.free_port", host.name)
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HostError(_unreachable(host, error)) from error
    said = done.stdout.split()[-1:]
    if done.returncode or not said or not said[0].isdigit():
        text = " ".join(done.stderr.split()) or done.stdout.strip() or "nothing"
        raise HostError(_unreachable(host, f"{text} (exit status {done.returncode})"))
    return int(said[0])


def _unreachable(host: ListedHost, received: object) -> str:
    return problem(
        f"{host.name} must be reached without a password, and know itself by that name.",
        received=received,
        fix=f"Try: ssh {host.login} true. Or use --rendezvous host:port, with another name.",
    )
