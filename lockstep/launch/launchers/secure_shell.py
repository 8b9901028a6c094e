"""``lockstep run --ssh``: the script on every host of a file, with ssh and nothing else.

The hosts need the same directory, interpreter and Lockstep as this machine, and ssh must log in
without a password. They authenticate with a secret that is made for this run. It is sent over the
standard input of ssh, never in a command, like the whole specification (``remote_agent``).

The hosts meet at a port that is free on the first host when the run starts.

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
from functools import partial
from pathlib import Path

import msgspec

from lockstep.cluster.place import Address
from lockstep.errors import HostError, OptionError, Problems, problem
from lockstep.launch.launchers.launch_spec import make_host_specs
from lockstep.launch.launchers.multi_host_run import AGENT_ARGUMENTS, AgentProcess, run_members
from lockstep.launch.script import Script

# A name or address that no command can mistake for an option.
_LOGIN = re.compile(r"(?:(?P<user>[A-Za-z0-9_][\w.-]*)@)?(?P<name>[A-Za-z0-9_:][\w.:%-]*)")
_DEVICES = re.compile(r"devices=0*([1-9][0-9]{0,5})")


class ListedHost(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the file.

    Attributes:
        name: its name for ssh and for the other hosts.
        user: the login name; None leaves that to ssh.
        devices: the number that it uses; None if the line does not say.
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
        OptionError: there is no such file, it names no host, or lines are invalid.
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
    *("-o", "BatchMode=yes"),  # no password prompt: the input is for the agent
    *("-o", "ServerAliveInterval=15"),  # a host that vanishes is noticed
    *("-o", "ServerAliveCountMax=3"),
)


class Shells(msgspec.Struct, frozen=True, kw_only=True):
    """How to run commands on the hosts.

    Attributes:
        command: ssh and its options.
        python: the interpreter on every host.
        directory: the script's working directory on every host.
    """

    command: tuple[str, ...]
    python: str
    directory: str

    def on(self, host: ListedHost, *words: str) -> tuple[str, ...]:
        """The command that runs the interpreter on a host."""
        # The host's shell splits the command again.
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
        script: the script.
        hosts: the hosts; number 0 is the first.
        shells: how to run commands there.
        rendezvous: where host 0 listens; None is its name, and ``port`` or a free port.
        port: of host 0, used with its name.
        devices: of hosts whose lines do not say.
        servers: see ``make_host_specs``.

    Raises:
        HostError: host 0 cannot be reached, or its name is not one of its addresses there.
    """
    if rendezvous is None:
        port = _find_port(hosts[0], shells) if port is None else port
        rendezvous = Address(name=hosts[0].name, port=port)
    specs = make_host_specs(
        script,
        shells.directory,
        rendezvous,
        [host.devices or devices for host in hosts],
        servers,
    )
    return run_members(
        (host.name, partial(AgentProcess, shells.on(host, *AGENT_ARGUMENTS), spec))
        for host, spec in zip(hosts, specs, strict=True)
    )


def _find_port(host: ListedHost, shells: Shells) -> int:
    command = shells.on(host, "-m", "lockstep.launch.free_port", host.name)
    try:
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HostError(_unreachable(host, error)) from error
    words = result.stdout.split()[-1:]
    if result.returncode or not words or not words[0].isdigit():
        text = " ".join(result.stderr.split()) or result.stdout.strip() or "nothing"
        raise HostError(_unreachable(host, f"{text} (exit status {result.returncode})"))
    return int(words[0])


def _unreachable(host: ListedHost, received: object) -> str:
    return problem(
        f"ssh must reach {host.name} without a password, and that must be its own name there.",
        received=received,
        fix=f"Try: ssh {host.login} true. Or use --rendezvous host:port, with another name.",
    )
