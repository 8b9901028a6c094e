"""Parameter servers: ranks that own parameters and update them, beside ranks that compute."""

from dataclasses import dataclass, replace

import msgspec

from lockstep.cluster.topology import MAX_CPU_REPLICAS_PER_CORE, Cluster
from lockstep.errors import DeviceError, OptionError
from lockstep.graph.layer_graph import LayerGraph
from lockstep.plan.decision import ServedUpdate
from lockstep.plan.makers import Maker, Mirrored
from lockstep.plan.spec import Plan

INEXACT = "Workers compute with older weights: the result is not that of one device."


@dataclass(frozen=True, kw_only=True)
class Served(Maker):
    """Workers on the cores of a host, each with its share of every batch, and servers that update.

    Attributes:
        workers: as replicas that would update for themselves.
        update: how many servers, and how far workers may be apart.
    """

    workers: Mirrored
    update: ServedUpdate

    def __call__(self, graph: LayerGraph, cluster: Cluster, batch_size: int) -> Plan:
        """Make the Plan for global batches of ``batch_size`` samples.

        Raises:
            DeviceError: more processes than this host can hold.
            OptionError: more servers than parameters.
        """
        cluster = cluster.cores
        plan = self.workers(graph, cluster, batch_size)
        self._check_servers(graph)
        self._check_ranks(plan.num_ranks, cluster)
        cores, servers = cluster.hosts[0].num_cores, self.update.servers
        # Weights are cut into a block of rows per share, and no server has less than a block.
        keeps_rows = self.update.is_synchronous and servers <= plan.num_shares
        layers = plan.layers
        if not keeps_rows:
            layers = tuple(msgspec.structs.replace(layer, row_limit=0) for layer in layers)
        ranks = range(plan.num_ranks, plan.num_ranks + servers)
        return msgspec.structs.replace(
            plan,
            strategy="parameter servers",
            devices=(*plan.devices, *(f"cpu:{rank % cores}" for rank in ranks)),
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

    def _check_ranks(self, num_workers: int, cluster: Cluster) -> None:
        num_ranks = num_workers + self.update.servers
        cores = cluster.hosts[0].num_cores
        if num_ranks > cores * MAX_CPU_REPLICAS_PER_CORE:
            raise DeviceError(
                f"This host has {cores} usable cores, enough for "
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
