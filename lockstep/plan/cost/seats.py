"""The devices that ranks sit on, and the links between them.

Seats are in the order of places: the fastest host first, and its fastest device. A stage takes
seats that are next to one another, and the last stage takes the first ones: so a search that adds
stages from the last to the first knows what is behind each.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lockstep.cluster.topology import Cluster, Device, Host, Link
from lockstep.errors import DeviceError

# Where nothing is known of links: a copy to memory that all processes of a host see, and a
# network of 10 Gbit/s. The first was measured at 5 to 6 GB/s.
SHARED_MEMORY = Link(latency_seconds=2e-5, bytes_per_second=5e9)
# A collective call of gloo beside ranks that compute, whose threads wait for a core.
PROCESS_GROUP = Link(latency_seconds=2.5e-3, bytes_per_second=1e9)
DEFAULT_NETWORK = Link(latency_seconds=5e-5, bytes_per_second=1.25e9)

# Memory of processes without a model, as measured on Linux with torch 2.13: the script's, and what
# training adds to it; the process that helpers are forked from, and what each adds to its pages;
# a member of a process group, and what it takes to divide gradients or parameters there; a process
# with a CUDA context.
_SCRIPT_BYTES, _TRAINING_BYTES = 224 << 20, 35 << 20
_TEMPLATE_BYTES, _HELPER_BYTES = 157 << 20, 34 << 20
_MEMBER_BYTES, DIVIDING_BYTES = 8 << 20, 80 << 20
ACCELERATOR_BASE_BYTES = 600 << 20

# Of every step on cores, and more of it for each rank of a host: what a model without work takes.
_STEP_SECONDS = 3e-4


@dataclass(frozen=True)
class Seat:
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
        seat: the slowest of their devices.
        group: all of them.
        limit: the least memory of their devices; 0 if it is not known.
        before: the link to the stage before, as long as this end takes for a message.
        after: to the stage behind.
    """

    seat: Seat
    group: Group
    limit: int
    before: Link
    after: Link


@dataclass(frozen=True, eq=False)
class Seats:
    """The devices for a job, in the order of places."""

    cluster: Cluster
    all: tuple[Seat, ...]
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
            seat=min(own, key=lambda seat: _rank(seat)[0]),
            group=self._group(own),
            limit=min(seat.device.memory_bytes for seat in own),
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

    def _group(self, own: Sequence[Seat]) -> Group:
        first, last = own[0].host, own[-1].host
        return Group(
            size=len(own),
            hosts=len({seat.host for seat in own}) if first != last else 1,
            inside=own[0].link or inner_link(self.cluster.hosts[first]),
            outside=network_between(self.cluster, first, last),
        )


def seats_of(cluster: Cluster, count: int | None = None, *, apart: bool = False) -> Seats:
    """The first ``count`` devices of a Cluster in the order of places; None is all.

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
    seats = [
        [
            Seat(number, device, _speed(cluster.hosts[number], wanted) / crowd, apart)
            for device in devices
        ]
        for number, devices in enumerate(hosts)
    ]
    for own in seats:
        own.sort(key=_rank, reverse=True)
    seats.sort(key=lambda own: _rank(own[0]), reverse=True)
    return _with_processes(cluster, [seat for own in seats for seat in own][:wanted])


def seats_at(
    cluster: Cluster, places: Sequence[tuple[int, Device]], *, apart: bool = False
) -> Seats:
    """Given devices, each with the number of its host, in the order of places."""
    cores = {
        number: len(host.accelerators) or host.num_cores
        for number, host in enumerate(cluster.hosts)
    }
    found = []
    for host, device in places:
        crowd = sum(other == host for other, _ in places) / max(cores[host], 1)
        speed = _speed(cluster.hosts[host], len(places)) / max(crowd, 1.0)
        found.append(Seat(host, device, speed, apart))
    return _with_processes(cluster, found)


def _with_processes(cluster: Cluster, seats: Sequence[Seat]) -> Seats:
    """Seats with the costs of their processes; a host's ranks have equal parts of its memory."""
    counts = Counter(seat.host for seat in seats)
    return Seats(
        cluster,
        tuple(
            replace(
                seat,
                base_bytes=_base_bytes(cluster.hosts[seat.host], counts[seat.host], seat),
                step_seconds=_step_seconds(counts[seat.host], seat),
                has_others=len(seats) > 1,
            )
            for seat in seats
        ),
    )


def _base_bytes(host: Host, ranks: int, seat: Seat) -> float:
    if not seat.is_core:
        return ACCELERATOR_BASE_BYTES
    total = (host.script_bytes or _SCRIPT_BYTES) + _TRAINING_BYTES
    if ranks > 1:
        total += _TEMPLATE_BYTES + (ranks - 1) * _HELPER_BYTES
    return total / ranks + seat.apart * _MEMBER_BYTES


def _step_seconds(ranks: int, seat: Seat) -> float:
    if not seat.is_core:
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


def _rank(seat: Seat) -> tuple[float, int]:
    """Larger for faster devices, and for those with more memory."""
    return (seat.device.operations_per_second or seat.speed, seat.device.memory_bytes)
