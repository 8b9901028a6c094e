"""What moves tensors between the ranks of a Plan, as users choose it.

By default the ranks of a host share memory, and Lockstep's own channels join hosts. Any backend of
torch.distributed can move the tensors instead. Then every rank has parameters of its own, and
gradients are exchanged as they are: to have a weight's gradient formed from all activations
(``LayerPlacement.row_limit``) pays where each rank forms its rows of it, and not where all form
the whole. Whoever has asked for a number of shares wants the bits that shared memory gives, so
there it is done.
"""

from dataclasses import dataclass

import msgspec

from lockstep.cluster.topology import Cluster
from lockstep.errors import Problems
from lockstep.graph.layer_graph import LayerGraph
from lockstep.plan.decision import ProcessGroup
from lockstep.plan.makers import Maker
from lockstep.plan.spec import Plan

BACKENDS = ("gloo",)


@dataclass(frozen=True, kw_only=True)
class OverProcessGroup(Maker):
    """Another maker's Plan, over torch.distributed.

    Attributes:
        maker: the other maker.
        backend: torch.distributed's.
        keeps_bits: gradients are formed as in shared memory, though it takes longer.
    """

    maker: Maker
    backend: str
    keeps_bits: bool = False

    def sample_size(self, cluster: Cluster, batch_size: int) -> int | None:
        return self.maker.sample_size(cluster, batch_size)

    def check_batch_size(self, batch_size: int) -> None:
        self.maker.check_batch_size(batch_size)

    def __call__(self, graph: LayerGraph, cluster: Cluster, batch_size: int) -> Plan:
        """Make the Plan for global batches of ``batch_size`` samples."""
        plan = self.maker(graph, cluster, batch_size)
        if plan.num_ranks == 1:
            return plan
        layers = plan.layers
        if not self.keeps_bits:
            layers = tuple(msgspec.structs.replace(layer, row_limit=0) for layer in layers)
        return msgspec.structs.replace(
            plan, engine=ProcessGroup(backend=self.backend), layers=layers
        )


def over(engine: str | None, maker: Maker, *, num_shares: int | None = None) -> Maker:
    """A maker of Plans with the engine that the user names; None is the default one."""
    if engine is None:
        return maker
    return OverProcessGroup(maker=maker, backend=engine, keeps_bits=num_shares is not None)


def check_engine(problems: Problems, engine: object) -> None:
    """Note what is no engine."""
    if engine is not None and engine not in BACKENDS:
        problems.add(
            "`engine` must be a backend of torch.distributed that works on CPUs, or None.",
            received=f"engine={engine!r}",
            fix='Use engine="gloo", or leave it out to share memory.',
        )
