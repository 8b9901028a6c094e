"""Data parallelism over several hosts, as a Plan.

It is the Plan of one host with as many replicas, and two decisions more: how many replicas each
host has, and which weights' activations are sent in place of their gradients.
"""

from dataclasses import dataclass

import msgspec

from lockstep.cluster.topology import Cluster, Host
from lockstep.graph.layer_graph import Layer, LayerGraph
from lockstep.plan.decision import LayerPlacement, SlicedUpdate
from lockstep.plan.devices import check_devices, device_names, threads_for
from lockstep.plan.makers.data_parallel import Maker, Mirrored, matrix_of
from lockstep.plan.spec import Plan

# The default if the network's bandwidth is not given.
DEFAULT_GBIT_PER_SECOND = 10.0

# What a core is taken for. They decide between two ways that give the same result, so they need not
# be right: at the border both take the same time.
_PRODUCTS_PER_SECOND = 3e10
_UPDATES_PER_SECOND = 5e8
_BYTES_PER_ELEMENT = 4


@dataclass(frozen=True, kw_only=True)
class MirroredHosts(Maker):
    """Synchronous data parallelism: every replica on every host holds the whole model.

    Attributes:
        devices_per_host: of each host; None is as many as its launcher gives it, else its part of
            ``num_devices``, else all its accelerators, else one CPU replica per usable core, at
            most 8.
        num_devices: of all hosts, where launchers do not say how many.
        num_shares: parts of each global batch; None is one per replica.
        channels_last: the memory format of images; None chooses.
        gbit_per_second: how fast a host sends to another.
    """

    devices_per_host: int | None = None
    num_shares: int | None = None
    channels_last: bool | None = None
    gbit_per_second: float = DEFAULT_GBIT_PER_SECOND
    num_devices: int | None = None
    precision: str = "fp32"

    def __call__(self, graph: LayerGraph, cluster: Cluster, batch_size: int) -> Plan:
        """Make the Plan for global batches of ``batch_size`` samples.

        Raises:
            DeviceError: more replicas than a host can hold.
            OptionError: fewer shares than replicas.
        """
        names = self._devices(cluster)
        counts = tuple(map(len, names))
        together = Host(
            name="all hosts", num_cores=sum(host.num_cores for host in cluster.hosts), devices=()
        )
        maker = Mirrored(
            devices=sum(counts),
            num_shares=self.num_shares,
            channels_last=self.channels_last,
            precision=self.precision,
        )
        plan = maker(graph, Cluster(hosts=(together,)), batch_size)
        devices = tuple(name for own in names for name in own)
        check_devices(devices)
        plan = msgspec.structs.replace(
            plan,
            strategy="multi-worker mirrored",
            devices=devices,
            threads_per_device=threads_for(devices, together.num_cores),
        )
        if len(counts) == 1:
            return plan
        return msgspec.structs.replace(
            plan,
            hosts=counts,
            update=SlicedUpdate(),
            layers=tuple(
                self._placed(placement, layer, cluster, batch_size)
                for placement, layer in zip(plan.layers, graph.layers, strict=True)
            ),
        )

    def replicas(self, cluster: Cluster) -> tuple[int, ...]:
        """How many each host has.

        Raises:
            DeviceError: more than it can hold.
        """
        return tuple(map(len, self._devices(cluster)))

    def _devices(self, cluster: Cluster) -> list[tuple[str, ...]]:
        part = None
        if self.num_devices is not None:
            part = max(self.num_devices // len(cluster.hosts), 1)
        return [
            device_names(
                self.devices_per_host or (part if host.num_given is None else host.num_given), host
            )
            for host in cluster.hosts
        ]

    def _placed(
        self, placement: LayerPlacement, layer: Layer, cluster: Cluster, batch_size: int
    ) -> LayerPlacement:
        """A layer whose activations are exchanged only if that is faster over this network.

        Whoever has asked for a number of shares wants the bits that other numbers of hosts give, so
        there the network does not decide.
        """
        # Hosts that form the same gradient must compute the same bits.
        are_alike = len({host.arithmetic for host in cluster.hosts}) == 1
        if not placement.row_limit or (
            are_alike
            and (self.num_shares is not None or self._activations_pay(layer, cluster, batch_size))
        ):
            return placement
        return msgspec.structs.replace(placement, row_limit=0)

    def _activations_pay(self, layer: Layer, cluster: Cluster, batch_size: int) -> bool:
        """Whether sending less outweighs that every host forms the whole gradient.

        Per host of n, (n - 1) / n of all this: gradients are received and parameters sent, or the
        batch's activations received; then its cores do the work of the other hosts' cores, too.
        """
        matrix = matrix_of(layer)
        assert matrix is not None  # it has a row limit
        size = matrix.size
        bytes_saved = (2 * size - batch_size * sum(matrix.shape)) * _BYTES_PER_ELEMENT
        work = 2 * batch_size * size / _PRODUCTS_PER_SECOND + size / _UPDATES_PER_SECOND
        cores = min(host.num_cores for host in cluster.hosts)
        return bytes_saved / (self.gbit_per_second / 8 * 1e9) > work / cores
