"""Local SGD as a Plan: replicas that step on their own, and average what they have come to."""

from dataclasses import dataclass, replace

import msgspec

from lockstep.cluster.topology import Cluster
from lockstep.graph.layer_graph import LayerGraph
from lockstep.plan.averaging import AveragedUpdate, Nesterov
from lockstep.plan.makers import Maker, Mirrored
from lockstep.plan.spec import Plan

INEXACT = "Replicas train apart between averages: the result is not that of one device."


@dataclass(frozen=True, kw_only=True)
class LocalSteps(Maker):
    """Data parallelism on one host in which every replica has parameters of its own.

    Attributes:
        mirrored: how the replicas would be made if they shared their parameters.
        update: how often they average, and what they do with the average.
    """

    mirrored: Mirrored
    update: AveragedUpdate

    def __call__(self, graph: LayerGraph, cluster: Cluster, batch_size: int) -> Plan:
        """Make the Plan for global batches of ``batch_size`` samples.

        Raises:
            DeviceError: more replicas than this host can hold.
        """
        plan = self.mirrored(graph, cluster, batch_size)
        is_alone = plan.num_ranks == 1 and self.update.outer is None  # there is nothing to average
        return msgspec.structs.replace(
            plan,
            strategy="local SGD",
            update=plan.update if is_alone else self.update,
            layers=tuple(msgspec.structs.replace(layer, row_limit=0) for layer in plan.layers),
            notes=(*plan.notes, *([] if is_alone else [INEXACT])),
        )

    @property
    def outer(self) -> Nesterov | None:
        return self.update.outer

    def in_precision(self, precision: str) -> "LocalSteps":
        """The same in another precision."""
        return replace(self, mirrored=replace(self.mirrored, precision=precision))
