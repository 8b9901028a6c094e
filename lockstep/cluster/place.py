"""A process's place in a job of many: which host it is on, and which of its processes it is.

A *host* is what the launcher says it is: processes of different hosts never share memory, even
where they could.
"""

import ipaddress
import re
from typing import Literal

import msgspec

# How far a Plan goes where a launcher has started several processes. "one process": each trains
# for itself, whatever the others do; "one host": there must be no others; "roles": they
# train together, and of several on one host it must be known which are parameter servers; "all
# hosts": they train together.
Reach = Literal["one process", "one host", "roles", "all hosts"]

MAX_PORT = 65535

_WRITTEN_ADDRESS = re.compile(
    r"(?:\[(?P<ipv6>[0-9A-Fa-f.:]*:[0-9A-Fa-f.:]*(?:%[\w.-]+)?)\]|(?P<name>[A-Za-z0-9_.-]+))"
    r":(?P<port>[0-9]{1,5})"
)


class Address(msgspec.Struct, frozen=True):
    """Where a host listens: a name or IP address, and a port."""

    name: str
    port: int

    def __str__(self) -> str:
        # An IPv6 address has colons of its own.
        return f"[{self.name}]:{self.port}" if ":" in self.name else f"{self.name}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether it is of this machine wherever it is read, and nobody else reaches it."""
        try:
            return self.name == "localhost" or ipaddress.ip_address(self.name).is_loopback
        except ValueError:  # a name, which may be anybody's
            return False

    @staticmethod
    def parse(text: str) -> "Address":
        """The address that is written ``name:port``, an IPv6 address in brackets.

        Raises:
            ValueError: it is written otherwise; the message is what was received.
        """
        match = _WRITTEN_ADDRESS.fullmatch(text)
        if match is None or not 0 < int(match["port"]) <= MAX_PORT:
            raise ValueError(repr(text))
        return Address(name=match["ipv6"] or match["name"], port=int(match["port"]))


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """What the launcher says of this process.

    Attributes:
        launcher: its name, for messages: "TF_CONFIG", "torchrun", "srun", "lockstep run".
        job: tells this job from others on the same hosts, and one start of it from the next.
        host: the number of this host.
        num_hosts: how many there are.
        process: the number of this process among those of its host.
        num_processes: of this host; where there is one, it starts helpers for its other devices.
        rendezvous: where host 0 listens, in order of preference: it takes the first that is free.
        devices: how many this host is to compute on; None where the launcher does not say.
        num_ranks: processes on all hosts, where each of them is one device; else None.
        is_one_machine: all hosts are this machine, by their addresses.
        num_servers: of all hosts' processes, the last ones, which are parameter servers.
        min_hosts: so many hosts go on where the others do not come; None is all.
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
        """Whether this process speaks for its host."""
        return self.process == 0

    @property
    def num_servers_here(self) -> int:
        """Of this host's processes, those that are parameter servers."""
        return self.num_processes - (self.devices or 0) if self.num_servers else 0
