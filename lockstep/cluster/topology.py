"""The Cluster: hosts and their devices, as pure data."""

import msgspec

# More replicas than this per core only wait for one another.
MAX_CPU_REPLICAS_PER_CORE = 8


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One device of a host: a CPU core's worth of compute, or a GPU."""

    kind: str
    index: int
    memory_bytes: int

    @property
    def name(self) -> str:
        """``"cpu:0"``, ``"cuda:1"``."""
        return f"{self.kind}:{self.index}"


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """A host: what the launcher calls one. Processes of one host share memory.

    Attributes:
        name: for messages.
        num_cores: that may be used.
        devices: of all kinds.
        num_given: devices that the launcher gives to this job; None where it does not say.
        arithmetic: hosts where this is the same compute the same bits.
    """

    name: str
    num_cores: int
    devices: tuple[Device, ...]
    num_given: int | None = None
    arithmetic: str = ""

    def devices_of(self, kind: str) -> tuple[Device, ...]:
        """The host's devices of one kind, by index."""
        return tuple(device for device in self.devices if device.kind == kind)


def num_devices(cluster: "Cluster") -> int:
    """CPU devices that there are for a job: what launchers give it, else one per core."""
    return sum(host.num_given or host.num_cores for host in cluster.hosts)


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """All hosts at hand."""

    hosts: tuple[Host, ...]
