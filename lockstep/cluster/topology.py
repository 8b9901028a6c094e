"""The Cluster: hosts and their devices, as pure data."""

import msgspec

# With more replicas per core they only wait for one another.
MAX_CPU_REPLICAS_PER_CORE = 8


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """What joins processes: the memory of a host, a bus, or a network.

    Attributes:
        latency_seconds: until the first byte of a message arrives.
        bytes_per_second: from one process to another, in one direction.
    """

    latency_seconds: float
    bytes_per_second: float

    def seconds(self, num_bytes: float) -> float:
        """How long a message takes."""
        return self.latency_seconds + num_bytes / self.bytes_per_second


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """A level of the network: what joins hosts that are next to one another.

    Attributes:
        hosts: how many consecutive hosts it joins; 0 is all.
        link: from a host to another.
    """

    link: Link
    hosts: int = 0


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One device of a host: a CPU core's worth of compute, or an accelerator.

    Attributes:
        kind: torch's name of its type: "cpu", "cuda", "xpu".
        index: among those of its kind.
        memory_bytes: a core's part of the host's; an accelerator's own, or 0 before it is queried.
        model: its maker's name of it, if queried.
        operations_per_second: floating point operations that it is taken to do, of which planning
            forms times; 0 where the times of a model were measured on such a device.
    """

    kind: str
    index: int
    memory_bytes: int
    model: str = ""
    operations_per_second: float = 0.0

    @property
    def name(self) -> str:
        """``"cpu:0"``, ``"cuda:1"``."""
        return f"{self.kind}:{self.index}"


class Correction(msgspec.Struct, frozen=True, kw_only=True):
    """What runs on a machine have taken, relative to what was predicted of them.

    Attributes:
        family: of Plans.
        factor: of the time of a step.
        fixed: seconds of a step on top.
        num_bytes: of all processes on top.
    """

    family: str
    factor: float = 1.0
    fixed: float = 0.0
    num_bytes: float = 0.0


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
        link: from one of its devices to another; None where it is not known.
        speed_together: of a device while all work, relative to one that works alone.
        script_bytes: memory of the script's process before training, with data, without the model;
            0 if it is not known.
        corrections: of the planner's predictions, by what runs here have taken.
    """

    name: str
    num_cores: int
    devices: tuple[Device, ...]
    num_given: int | None = None
    num_servers: int = 0
    arithmetic: str = ""
    lack: str = ""
    link: Link | None = None
    speed_together: float = 1.0
    script_bytes: int = 0
    corrections: tuple[Correction, ...] = ()

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
    """All available hosts.

    Attributes:
        hosts: in the order of their ranks.
        networks: levels of the network between them, the innermost first; empty where it is not
            known.
    """

    hosts: tuple[Host, ...]
    networks: tuple[Network, ...] = ()

    @property
    def cores(self) -> "Cluster":
        """The same without accelerators, for training on cores alone."""
        cores = (
            msgspec.structs.replace(host, devices=host.devices_of("cpu")) for host in self.hosts
        )
        return msgspec.structs.replace(self, hosts=tuple(cores))
