"""The Cluster: hosts and their devices, as pure data."""

import msgspec

# With more replicas per core they only wait for one another.
MAX_CPU_REPLICAS_PER_CORE = 8


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One device of a host: a CPU core's worth of compute, or an accelerator.

    Attributes:
        kind: torch's name of its type: "cpu", "cuda", "xpu".
        index: among those of its kind.
        memory_bytes: a core's part of the host's; an accelerator's own, or 0 before it is queried.
        model: its maker's name of it, if queried.
    """

    kind: str
    index: int
    memory_bytes: int
    model: str = ""

    @property
    def name(self) -> str:
        """``"cpu:0"``, ``"cuda:1"``."""
        return f"{self.kind}:{self.index}"


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """A host, as the launcher defines it. Processes of one host share memory.

    Attributes:
        name: for messages.
        num_cores: usable cores.
        devices: of all kinds.
        num_given: devices that the launcher assigns to this job; None if it does not say, 0 if
            there are only parameter servers.
        num_servers: parameter servers that the launcher has started.
        arithmetic: hosts where this is the same compute the same bits.
        lack: why there is no accelerator, in a sentence; empty if there is one.
    """

    name: str
    num_cores: int
    devices: tuple[Device, ...]
    num_given: int | None = None
    num_servers: int = 0
    arithmetic: str = ""
    lack: str = ""

    def devices_of(self, kind: str) -> tuple[Device, ...]:
        """The host's devices of one kind, by index."""
        return tuple(device for device in self.devices if device.kind == kind)

    @property
    def accelerators(self) -> tuple[Device, ...]:
        """The host's devices other than cores, by index."""
        return tuple(device for device in self.devices if device.kind != "cpu")


def num_devices(cluster: "Cluster") -> int:
    """Devices for a job: those that launchers assign, else all accelerators, else one per core."""
    return sum(host.num_given or len(host.accelerators) or host.num_cores for host in cluster.hosts)


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """All available hosts."""

    hosts: tuple[Host, ...]

    @property
    def cores(self) -> "Cluster":
        """The same without accelerators, for training on cores alone."""
        cores = (
            msgspec.structs.replace(host, devices=host.devices_of("cpu")) for host in self.hosts
        )
        return Cluster(hosts=tuple(cores))
