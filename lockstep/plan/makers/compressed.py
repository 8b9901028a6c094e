"""Another maker's Plan whose hosts compress what they send each other."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from lockstep.cluster.topology import Cluster
from lockstep.errors import DeviceError, OptionError
from lockstep.formatting import format_bytes
from lockstep.graph.layer_graph import LayerGraph, ParameterInfo
from lockstep.plan.averaging import AveragedUpdate
from lockstep.plan.devices import is_cpu
from lockstep.plan.makers.data_parallel import Maker, Wrapping
from lockstep.plan.program.compression import Compression, num_bytes
from lockstep.plan.spec import Plan

COMPRESSED = "What hosts send is compressed: the result is no longer that of one device."


@dataclass(frozen=True, kw_only=True)
class Compressing(Wrapping):
    """Another maker's Plan, compressed between hosts.

    All hosts update all parameters that several of them have, so they must compute alike. What
    would have been exchanged in place of gradients (``LayerPlacement.row_limit``) is not: a user
    who asks for this knows what is the least to send.

    Attributes:
        compression: of what hosts send.
    """

    compression: Compression

    def __call__(self, graph: LayerGraph, cluster: Cluster, batch_size: int) -> Plan:
        """Make the Plan for global batches of ``batch_size`` samples.

        Raises:
            OptionError: hosts send each other no gradients, or there is one host.
            DeviceError: hosts of different kinds, or with accelerators.
        """
        plan = self.maker(graph, cluster, batch_size)
        if not is_cpu(plan.devices):
            raise DeviceError(
                "Only gradients of CPU replicas can be compressed between hosts.",
                received=f"compression={self.compression} with {plan.devices[0]}",
                fix="Leave `compression` out, or use devices of kind cpu.",
            )
        sent = _sent_between_hosts(plan, graph)
        if not sent:
            raise OptionError(
                "Compression needs several hosts that send each other gradients.",
                received=f"compression={self.compression} with {plan.num_hosts} "
                f"{'host' if plan.num_hosts == 1 else 'hosts'}",
                fix="Leave it out, or have replicas of the same parameters on several hosts.",
            )
        if len({host.arithmetic for host in cluster.hosts}) > 1:
            raise DeviceError(
                "With compression every host updates all weights: all need the same processor to "
                "compute the same bits.",
                received=", ".join(dict.fromkeys(host.arithmetic for host in cluster.hosts)),
                fix="Use hosts of one kind, or leave `compression` out.",
            )
        return msgspec.structs.replace(
            plan,
            compression=self.compression,
            layers=tuple(msgspec.structs.replace(layer, row_limit=0) for layer in plan.layers),
            notes=(*plan.notes, *self._notes(plan, sent)),
        )

    def _notes(self, plan: Plan, sent: Sequence[ParameterInfo]) -> Iterator[str]:
        is_apart = isinstance(plan.update, AveragedUpdate)
        less = sum(num_bytes(self.compression, one.shape) for one in sent)
        whole = sum(one.num_bytes for one in sent) * 2 / plan.num_hosts
        yield (
            f"{'Changes' if is_apart else 'Gradients'} between hosts: {self.compression}, "
            f"{format_bytes(less)} to each other host for "
            f"{'an average' if is_apart else 'a step'}; uncompressed {format_bytes(whole)}."
        )
        if not is_apart:
            yield COMPRESSED


def _sent_between_hosts(plan: Plan, graph: LayerGraph) -> list[ParameterInfo]:
    """The trained parameters that several hosts have, tied ones once."""
    stages = range(1) if plan.pipeline is None else range(len(plan.pipeline.stages))
    wide = {stage for stage in stages if len(_hosts_of(plan, stage)) > 1}
    aliases = {name for names in graph.tied for name in names[1:]}
    return [
        parameter
        for placement, layer in zip(plan.layers, graph.layers, strict=True)
        for parameter in layer.parameters
        if placement.stage in wide and parameter.trainable and parameter.name not in aliases
    ]


def _hosts_of(plan: Plan, stage: int) -> set[int]:
    ranks = range(plan.num_ranks) if plan.pipeline is None else plan.pipeline.stages[stage].ranks
    return {plan.host_of(rank) for rank in ranks}


def compressed(compression: Compression | None, maker: Maker) -> Maker:
    """A maker of Plans with the compression that the user has named; None is none."""
    return maker if compression is None else Compressing(maker=maker, compression=compression)
