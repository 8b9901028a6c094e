"""``lockstep run --ssh``: the script on every host of a file, with ssh and nothing else.

The hosts need the same directory, interpreter and Lockstep as this machine, and ssh must let in
without asking. They meet with a secret that is made for this one run. It goes to each of them on
the standard input of ssh, never in a command; so do all orders, see ``held_script.py``.

The port where the hosts meet is one that is free on the first of them when it is asked.

The file has one line for each host.

::

    # host 0, where the others meet it and progress is shown
    node1
    ada@node2 devices=4     # logs in as another user, and uses 4 devices
"""

import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from lockstep.cluster.place import Address
from lockstep.errors import HostError, OptionError, Problems, problem
from lockstep.launch.launchers.launch_spec import make_orders
from lockstep.launch.launchers.local_member import watch_held
from lockstep.launch.launchers.multi_host_run import HOLD_SCRIPT
from lockstep.launch.script import Script

# A name or address that no command could take for an option.
_LOGIN = re.compile(r"(?:(?P<user>[A-Za-z0-9_][\w.-]*)@)?(?P<name>[A-Za-z0-9_:][\w.:%-]*)")
_DEVICES = re.compile(r"devices=0*([1-9][0-9]{0,5})")


class ListedHost(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the file.

    Attributes:
        name: by which ssh and the other hosts reach it.
        user: who logs in; None leaves that to ssh.
        devices: how many it is to use; None where the line does not say.
    """

    name: str
    user: str | None = None
    devices: int | None = None

    @property
    def login(self) -> str:
        """``user@name``, or the name alone."""
        return self.name if self.user is None else f"{self.user}@{self.name}"


def read_host_file(path: Path) -> tuple[ListedHost, ...]:
    """The hosts, in the order of the file.

    Raises:
        OptionError: no such file, no host in it, or lines that cannot be read.
    """
    text = _read(path)
    problems = Problems()
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if words:
            host = _parse(words)
            if host is None:
                problems.add(
                    "A line of the host file must be [user@]host [devices=N].",
                    received=f"{line.strip()!r} in line {number}",
                    fix="A comment begins with #.",
                )
            else:
                hosts.append(host)
    if not hosts:
        problems.add(
            "The host file must name a host.", received=str(path), fix="Write one on each line."
        )
    problems.raise_if_any(OptionError)
    return tuple(hosts)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(
            "The host file must be a text file.", received=error, fix="Check its path."
        ) from error


def _parse(words: list[str]) -> ListedHost | None:
    login, devices = _LOGIN.fullmatch(words[0]), None
    if len(words) == 2:
        devices = _DEVICES.fullmatch(words[1])
    if login is None or len(words) > 2 or (len(words) == 2 and devices is None):
        return None
    return ListedHost(
        name=login["name"],
        user=login["user"],
        devices=None if devices is None else int(devices[1]),
    )


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
    servers: int | None,
) -> int:
    """Run a script on all hosts; returns the exit status of the first that failed, or 0.

    Args:
        script: what to run.
        hosts: where; number 0 is the first.
        shells: how to get there.
        rendezvous: where host 0 listens; None is its name, and a port that is free there.
        port: to be used with its name.
        devices: of hosts that do not say.
        servers: see ``make_orders``.

    Raises:
        HostError: host 0 cannot be reached, or its name is not one of its addresses there.
    """
    if rendezvous is None:
        port = _ask_for_port(hosts[0], shells) if port is None else port
        rendezvous = Address(name=hosts[0].name, port=port)
    all_orders = make_orders(
        script,
        shells.directory,
        rendezvous,
        [host.devices or devices for host in hosts],
        servers,
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
