"""The placement of ranks: the devices that they have, and the links between these.

Its devices are in order: those of the fastest host first, of which the fastest is first. A stage
takes devices that are next to one another, and the last stage takes the first ones: so a search
that adds stages from the last to the first knows what is behind each.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lockstep.cluster.topology import Cluster, Device, Host, Link
from lockstep.errors import DeviceError

# Where nothing is known of links: a copy to memory that all processes of a host see, and a
# network of 10 Gbit/s. The first was measured at 5 to 6 GB/s.
SHARED_MEMORY = Link(latency_seconds=2e-5, bytes_per_second=5e9)
# A collective call of gloo beside ranks that compute, whose threads wait for a core; what is moved
# is packed, unpacked and added up as well, in memory that is mapped anew.
PROCESS_GROUP = Link(latency_seconds=2.5e-3, bytes_per_second=4e8)
DEFAULT_NETWORK = Link(latency_seconds=5e-5, bytes_per_second=1.25e9)

# Memory of processes without a model, as measured on Linux with torch 2.13: the script's, and what
# training adds to it; the process that helpers are forked from, and what each adds to its pages,
# with 12 MiB for the workspaces of libraries; a member of a process group; one with a CUDA context.
_SCRIPT_BYTES, _TRAINING_BYTES = 224 << 20, 35 << 20
_TEMPLATE_BYTES, _HELPER_BYTES = 157 << 20, 46 << 20
_MEMBER_BYTES = 8 << 20
ACCELERATOR_BASE_BYTES = 600 << 20

# Of every step on cores, and more of it for each rank of a host: what a model without work takes.
_STEP_SECONDS = 3e-4


@dataclass(frozen=True)
class PlacedDevice:
    """A device that a rank may have.

    Attributes:
        host: number of its host in the Cluster.
        device: the device.
        speed: relative to the device on which costs were measured.
        apart: whether ranks on a host's cores share no memory.
        base_bytes: memory of its process without a model.
        step_seconds: of a step without a model.
        has_others: whether there are other ranks.
    """

    host: int
    device: Device
    speed: float
    apart: bool = False
    base_bytes: float = 0.0
    step_seconds: float = 0.0
    has_others: bool = False

    @property
    def is_core(self) -> bool:
        """Whether it is a core, which computes and exchanges in turn."""
        return self.device.kind == "cpu"

    @property
    def link(self) -> Link | None:
        """To ranks on its host's other cores, where these share no memory."""
        return PROCESS_GROUP if self.is_core and self.apart else None

    @property
    def shares_memory(self) -> bool:
        """Whether ranks of its host have the same parameters in the same place."""
        return self.is_core and not self.apart


@dataclass(frozen=True)
class Group:
    """Ranks that exchange something: how many there are on a host, and on how many hosts.

    Attributes:
        size: ranks.
        hosts: that they are on.
        inside: the link between ranks of a host.
        outside: the link between hosts.
    """

    size: int
    hosts: int
    inside: Link
    outside: Link

    @property
    def on_a_host(self) -> int:
        """Ranks on one of the hosts, about."""
        return -(-self.size // self.hosts)


@dataclass(frozen=True)
class Place:
    """Where the ranks of a stage are.

    Attributes:
        placed: the slowest of their devices.
        group: all of them.
        limit: the least memory of their devices; 0 if it is not known.
        before: the link to the stage before, as long as this end takes for a message.
        after: to the stage behind.
    """

    placed: PlacedDevice
    group: Group
    limit: int
    before: Link
    after: Link


@dataclass(frozen=True, eq=False)
class Placement:
    """The devices for a job, in order."""

    cluster: Cluster
    all: tuple[PlacedDevice, ...]
    _known: dict[tuple[int, int], Place] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.all)

    def place(self, behind: int, count: int) -> Place:
        """The place of a stage of ``count`` ranks, with ``behind`` in later stages."""
        found = self._known.get((behind, count))
        if found is None:
            found = self._known[behind, count] = self._place(behind, count)
        return found

    def _place(self, behind: int, count: int) -> Place:
        end, last = behind + count, len(self.all) - 1
        own = self.all[behind:end]
        return Place(
            placed=min(own, key=lambda placed: _rank(placed)[0]),
            group=self._group(own),
            limit=min(placed.device.memory_bytes for placed in own),
            before=self._link(end - 1, min(end, last)),
            after=self._link(max(behind - 1, 0), behind),
        )

    def _link(self, one: int, other: int) -> Link:
        """Cores of a host both copy a message; others are busy together, each for half of it."""
        first, second = self.all[one], self.all[other]
        if first.host != second.host:
            return _half(network_between(self.cluster, first.host, second.host))
        link = inner_link(self.cluster.hosts[first.host])
        return link if first.is_core else _half(link)

    def _group(self, own: Sequence[PlacedDevice]) -> Group:
        first, last = own[0].host, own[-1].host
        return Group(
            size=len(own),
            hosts=len({placed.host for placed in own}) if first != last else 1,
            inside=own[0].link or inner_link(self.cluster.hosts[first]),
            outside=network_between(self.cluster, first, last),
        )


def placement_of(cluster: Cluster, count: int | None = None, *, apart: bool = False) -> Placement:
    """The first ``count`` devices of a Cluster, in order; None is all.

    Accelerators where hosts have some, else cores, on which several ranks may be.

    Raises:
        DeviceError: there are fewer accelerators.
    """
    hosts = [_devices_of(host) for host in cluster.hosts]
    there = sum(map(len, hosts))
    wanted = there if count is None else count
    if wanted > there:
        hosts = _crowded(cluster, hosts, wanted)
    crowd = max(wanted / there, 1.0)
    placement = [
        [
            PlacedDevice(number, device, _speed(cluster.hosts[number], wanted) / crowd, apart)
            for device in devices
        ]
        for number, devices in enumerate(hosts)
    ]
    for own in placement:
        own.sort(key=_rank, reverse=True)
    placement.sort(key=lambda own: _rank(own[0]), reverse=True)
    return _with_processes(cluster, [placed for own in placement for placed in own][:wanted])


def placement_at(
    cluster: Cluster, places: Sequence[tuple[int, Device]], *, apart: bool = False
) -> Placement:
    """Given devices, each with the number of its host, in order."""
    cores = {
        number: len(host.accelerators) or host.num_cores
        for number, host in enumerate(cluster.hosts)
    }
    found = []
    for host, device in places:
        crowd = sum(other == host for other, _ in places) / max(cores[host], 1)
        speed = _speed(cluster.hosts[host], len(places)) / max(crowd, 1.0)
        found.append(PlacedDevice(host, device, speed, apart))
    return _with_processes(cluster, found)


def _with_processes(cluster: Cluster, placement: Sequence[PlacedDevice]) -> Placement:
    """With the costs of each process; a host's ranks have equal parts of its memory."""
    counts = Counter(placed.host for placed in placement)
    return Placement(
        cluster,
        tuple(
            replace(
                placed,
                base_bytes=_base_bytes(cluster.hosts[placed.host], counts[placed.host], placed),
                step_seconds=_step_seconds(counts[placed.host], placed),
                has_others=len(placement) > 1,
            )
            for placed in placement
        ),
    )


def _base_bytes(host: Host, ranks: int, placed: PlacedDevice) -> float:
    if not placed.is_core:
        return ACCELERATOR_BASE_BYTES
    total = (host.script_bytes or _SCRIPT_BYTES) + _TRAINING_BYTES
    if ranks > 1:
        total += _TEMPLATE_BYTES + (ranks - 1) * _HELPER_BYTES
    return total / ranks + placed.apart * _MEMBER_BYTES


def _step_seconds(ranks: int, placed: PlacedDevice) -> float:
    if not placed.is_core:
        return 0.0
    return _STEP_SECONDS * (1 + ranks * (ranks > 1))


def _half(link: Link) -> Link:
    """A link that takes half as long."""
    return Link(
        latency_seconds=link.latency_seconds / 2, bytes_per_second=2 * link.bytes_per_second
    )


def inner_link(host: Host) -> Link:
    """The link between two devices of a host."""
    return host.link or SHARED_MEMORY


def network_between(cluster: Cluster, one: int, other: int) -> Link:
    """The link between two hosts: of the innermost network that has both."""
    for network in cluster.networks:
        if network.hosts == 0 or one // network.hosts == other // network.hosts:
            return network.link
    return cluster.networks[-1].link if cluster.networks else DEFAULT_NETWORK


def _devices_of(host: Host) -> list[Device]:
    return list(host.accelerators or host.devices_of("cpu"))


def _crowded(cluster: Cluster, hosts: list[list[Device]], wanted: int) -> list[list[Device]]:
    """Several ranks on each core."""
    there = sum(map(len, hosts))
    if any(host.accelerators for host in cluster.hosts):
        raise DeviceError(
            "There are not so many devices.",
            received=f"{wanted} devices of {there}",
            fix=f"Plan for {there} or fewer.",
        )
    times = -(-wanted // there)
    return [devices * times for devices in hosts]


def _speed(host: Host, ranks: int) -> float:
    return host.speed_together if ranks > 1 else 1.0


def _rank(placed: PlacedDevice) -> tuple[float, int]:
    """Larger for faster devices, and for those with more memory."""
    return (placed.device.operations_per_second or placed.speed, placed.device.memory_bytes)
