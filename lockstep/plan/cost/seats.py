"""The devices that ranks sit on, and the links between them.

Seats are in the order of places: the fastest host first, and its fastest device. A stage takes
seats that are next to one another, and the last stage takes the first ones: so a search that adds
stages from the last to the first knows what is behind each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from lockstep.cluster.topology import Cluster, Device, Host, Link
from lockstep.errors import DeviceError

# Where nothing is known of links: a copy to memory that all processes of a host see, and a
# network of 10 Gbit/s. The first was measured at 5 to 6 GB/s.
SHARED_MEMORY = Link(latency_seconds=2e-5, bytes_per_second=5e9)
DEFAULT_NETWORK = Link(latency_seconds=5e-5, bytes_per_second=1.25e9)


@dataclass(frozen=True)
class Seat:
    """A device that a rank may have.

    Attributes:
        host: number of its host in the Cluster.
        device: the device.
        speed: relative to the device on which costs were measured.
        apart: whether ranks on a host's cores share no memory.
    """

    host: int
    device: Device
    speed: float
    apart: bool = False

    @property
    def is_core(self) -> bool:
        """Whether it is a core, which computes and exchanges in turn."""
        return self.device.kind == "cpu"

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
        before: the link to the stage before.
        after: the link to the stage behind.
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
        first, second = self.all[one].host, self.all[other].host
        if first == second:
            return inner_link(self.cluster.hosts[first])
        return network_between(self.cluster, first, second)

    def _group(self, own: Sequence[Seat]) -> Group:
        first, last = own[0].host, own[-1].host
        return Group(
            size=len(own),
            hosts=len({seat.host for seat in own}) if first != last else 1,
            inside=inner_link(self.cluster.hosts[first]),
            outside=network_between(self.cluster, first, last),
        )


def seats_of(cluster: Cluster, count: int | None = None) -> Seats:
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
        [Seat(number, device, _speed(cluster.hosts[number], wanted) / crowd) for device in devices]
        for number, devices in enumerate(hosts)
    ]
    for own in seats:
        own.sort(key=_rank, reverse=True)
    seats.sort(key=lambda own: _rank(own[0]), reverse=True)
    return Seats(cluster, tuple(seat for own in seats for seat in own)[:wanted])


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
    return Seats(cluster, tuple(found))


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
