"""Parameter servers: ranks that own parameters and update them, beside ranks that compute."""

from dataclasses import dataclass, replace

import msgspec

from lockstep.cluster.topology import MAX_CPU_REPLICAS_PER_CORE, Cluster, Host
from lockstep.errors import DeviceError, OptionError
from lockstep.graph.layer_graph import LayerGraph
from lockstep.plan.decision import ServedUpdate
from lockstep.plan.makers import Maker
from lockstep.plan.many_hosts import MirroredHosts
from lockstep.plan.spec import Plan

INEXACT = "Workers compute with older weights: the result is not that of one device."


@dataclass(frozen=True, kw_only=True)
class Served(Maker):
    """Workers on the cores of all hosts, each with its share of every batch, and servers.

    The servers, which update, are on the last host, where there may be no workers.

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
            OptionError: more servers than parameters, or second copies on several hosts.
        """
        cluster = cluster.cores
        counts, servers = self.workers.replicas(cluster), self.update.servers
        computing = [host for host, count in zip(cluster.hosts, counts, strict=True) if count]
        plan = self.workers(graph, Cluster(hosts=tuple(computing)), batch_size)
        self._check_servers(graph)
        self._check_hosts(len(counts))
        self._check_ranks(counts[-1], cluster.hosts[-1])
        # Weights are cut into a block of rows per share, and no server has less than a block. Where
        # factors go to other hosts, workers there would have to update.
        is_one_host = len(counts) == 1
        keeps_rows = self.update.is_synchronous and servers <= plan.num_shares and is_one_host
        layers = plan.layers
        if not keeps_rows:
            layers = tuple(msgspec.structs.replace(layer, row_limit=0) for layer in layers)
        cores, ranks = cluster.hosts[-1].num_cores, range(counts[-1], counts[-1] + servers)
        return msgspec.structs.replace(
            plan,
            strategy="parameter servers",
            devices=(*plan.devices, *(f"cpu:{rank % cores}" for rank in ranks)),
            hosts=() if is_one_host else (*counts[:-1], counts[-1] + servers),
            layers=layers,
            update=self.update,
            notes=(*plan.notes, *([] if self.update.is_synchronous else [INEXACT])),
        )

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

    def _check_hosts(self, num_hosts: int) -> None:
        if num_hosts > 1 and self.update.replicas > 1:
            raise OptionError(
                "Second copies of what servers update are for workers and servers of one host.",
                received=f"replicas={self.update.replicas} with {num_hosts} hosts",
                fix="Leave `replicas` out, and use a checkpoint.",
            )

    def _check_ranks(self, num_workers: int, host: Host) -> None:
        num_ranks, cores = num_workers + self.update.servers, host.num_cores
        if num_ranks > cores * MAX_CPU_REPLICAS_PER_CORE:
            raise DeviceError(
                f"The servers' host has {cores} usable cores, enough for "
                f"{cores * MAX_CPU_REPLICAS_PER_CORE} workers and servers.",
                received=f"{num_workers} workers and {self.update.servers} servers",
                fix="Use fewer of them.",
            )

    @property
    def outlives_servers(self) -> bool:
        return self.update.replicas > 1

    def in_precision(self, precision: str) -> "Served":
        """The same in another precision."""
        return replace(self, workers=replace(self.workers, precision=precision))
