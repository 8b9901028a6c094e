"""Parameter servers: ranks that own parameters and update them, beside ranks that compute."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from lockstep.cluster.topology import MAX_CPU_REPLICAS_PER_CORE, Cluster
from lockstep.errors import DeviceError, OptionError
from lockstep.graph.layer_graph import LayerGraph
from lockstep.plan.decision import ServedUpdate
from lockstep.plan.makers.data_parallel import Maker, Traits
from lockstep.plan.makers.many_hosts import MirroredHosts
from lockstep.plan.spec import Plan

INEXACT = "Workers compute with older weights: the result is not that of one device."


@dataclass(frozen=True, kw_only=True)
class Served(Maker):
    """Workers on the cores of all hosts, each with its share of every batch, and servers.

    The servers, which update, are on the last host or, where a launcher has started them, on the
    last ones; workers are on the first of these at most.

    Attributes:
        workers: as replicas that would update for themselves.
        update: how many servers, and how far workers may be apart.
    """

    workers: MirroredHosts
    update: ServedUpdate

    def __call__(self, graph: LayerGraph, cluster: Cluster, batch_size: int) -> Plan:
        """Make the Plan for global batches of ``batch_size`` samples.

        Raises:
            DeviceError: more processes than a host can hold.
            OptionError: more servers than parameters, or what cannot be on several hosts.
        """
        cluster = cluster.cores
        workers, servers = self.workers.replicas(cluster), self._servers(cluster)
        self._check_hosts(cluster, workers, servers)
        computing = [host for host, count in zip(cluster.hosts, workers, strict=True) if count]
        plan = self.workers(graph, Cluster(hosts=tuple(computing)), batch_size)
        self._check_servers(graph)
        # Weights are cut into a block of rows per share, and no server has less than a block. Where
        # factors go to other hosts, workers there would have to update.
        is_one_host = len(workers) == 1
        has_blocks = self.update.servers <= plan.num_shares
        keeps_rows = self.update.is_synchronous and has_blocks and is_one_host
        layers = plan.layers
        if not keeps_rows:
            layers = tuple(msgspec.structs.replace(layer, row_limit=0) for layer in layers)
        counts = tuple(map(sum, zip(workers, servers, strict=True)))
        cores = [
            f"cpu:{rank % host.num_cores}"
            for host, first, stop in zip(cluster.hosts, workers, counts, strict=True)
            for rank in range(first, stop)
        ]
        return msgspec.structs.replace(
            plan,
            strategy="parameter servers",
            devices=(*plan.devices, *cores),
            hosts=() if is_one_host else counts,
            layers=layers,
            update=self.update,
            notes=(*plan.notes, *([] if self.update.is_synchronous else [INEXACT])),
        )

    def _servers(self, cluster: Cluster) -> tuple[int, ...]:
        """How many each host has: those that the launcher has started, or all on the last."""
        given = tuple(host.num_servers for host in cluster.hosts)
        return given if any(given) else (*given[:-1], self.update.servers)

    def _check_servers(self, graph: LayerGraph) -> None:
        names = {
            parameter.name
            for layer in graph.layers
            for parameter in layer.parameters
            if parameter.trainable
        }
        if self.update.servers > max(len(names), 1):
            raise OptionError(
                "Every server must have a parameter to update.",
                received=f"servers={self.update.servers} with {len(names)} parameters",
                fix=f"Use servers={max(len(names), 1)} or fewer.",
            )

    def _check_hosts(
        self, cluster: Cluster, workers: Sequence[int], servers: Sequence[int]
    ) -> None:
        if len(workers) > 1 and self.update.replicas > 1:
            raise OptionError(
                "Replicas of servers need all workers and servers on one host.",
                received=f"replicas={self.update.replicas} with {len(workers)} hosts",
                fix="Leave `replicas` out, and use a checkpoint.",
            )
        num_serving = sum(map(bool, servers))
        if num_serving > 1 and not self.update.is_synchronous:
            raise OptionError(
                "Workers that do not wait take their work from a table in shared memory, so all "
                "servers must be on one host.",
                received=f"staleness={self.update.staleness} with servers on {num_serving} hosts",
                fix="Put all servers on one host, or use staleness=0.",
            )
        for host, computing, serving in zip(cluster.hosts, workers, servers, strict=True):
            most = host.num_cores * MAX_CPU_REPLICAS_PER_CORE
            if serving and computing + serving > most:
                raise DeviceError(
                    f"The servers' host has {host.num_cores} usable cores, enough for {most} "
                    "workers and servers.",
                    received=f"{computing} workers and {serving} servers",
                    fix="Use fewer of them.",
                )

    @property
    def traits(self) -> Traits:
        return Traits(outlives_servers=self.update.replicas > 1)

    def in_precision(self, precision: str) -> "Served":
        """The same in another precision."""
        return replace(self, workers=replace(self.workers, precision=precision))
