"""A process's place in a job of many: its host, and its number among the processes there.

The launcher defines what a *host* is: processes of different hosts never share memory, even if they
could.
"""

import ipaddress
import re
from typing import Literal

import msgspec

# The processes that a Plan spans, if a launcher has started several. "one process": each trains
# by itself; "one host": there must be no other hosts; "roles": they train together, and if a host
# has several, it must be known which are parameter servers; "all hosts": they train together.
Reach = Literal["one process", "one host", "roles", "all hosts"]

MAX_PORT = 65535

_WRITTEN_ADDRESS = re.compile(
    r"(?:\[(?P<ipv6>[0-9A-Fa-f.:]*:[0-9A-Fa-f.:]*(?:%[\w.-]+)?)\]|(?P<name>[A-Za-z0-9_.-]+))"
    r":(?P<port>[0-9]{1,5})"
)


class Address(msgspec.Struct, frozen=True):
    """The address at which a host listens: a name or IP address, and a port."""

    name: str
    port: int

    def __str__(self) -> str:
        # An IPv6 address contains colons.
        return f"[{self.name}]:{self.port}" if ":" in self.name else f"{self.name}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """True if every machine that reads it reaches only itself by it."""
        try:
            return self.name == "localhost" or ipaddress.ip_address(self.name).is_loopback
        except ValueError:  # a name, which may be of any machine
            return False

    @staticmethod
    def parse(text: str) -> "Address":
        """Parse ``name:port``, with an IPv6 address in brackets.

        Raises:
            ValueError: it has another form; the message is what was received.
        """
        match = _WRITTEN_ADDRESS.fullmatch(text)
        if match is None or not 0 < int(match["port"]) <= MAX_PORT:
            raise ValueError(repr(text))
        return Address(name=match["ipv6"] or match["name"], port=int(match["port"]))


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """This process, as its launcher describes it.

    Attributes:
        launcher: its name, for messages: "TF_CONFIG", "torchrun", "srun", "lockstep run".
        job: identifies this job on its hosts, and each start of it.
        host: the number of this host.
        num_hosts: the number of hosts.
        process: the number of this process among those of its host.
        num_processes: of this host; if there is one, it starts helpers for its other devices.
        rendezvous: addresses of host 0 in order of preference: it takes the first that is free.
        devices: their number on this host; None if the launcher does not say.
        num_ranks: processes on all hosts, if each of them has one device; else None.
        is_one_machine: all hosts are this machine, by their addresses.
        num_servers: parameter servers; the last processes of all hosts.
        min_hosts: this many hosts continue if the others do not join; None is all.
    """

    launcher: str
    job: str
    host: int
    num_hosts: int
    process: int = 0
    num_processes: int = 1
    rendezvous: tuple[Address, ...]
    devices: int | None = None
    num_ranks: int | None = None
    is_one_machine: bool = False
    num_servers: int = 0
    min_hosts: int | None = None

    @property
    def leads(self) -> bool:
        """True if this process leads its host."""
        return self.process == 0

    @property
    def num_servers_here(self) -> int:
        """The number of this host's processes that are parameter servers."""
        return self.num_processes - (self.devices or 0) if self.num_servers else 0
