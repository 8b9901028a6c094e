"""The tensors that hosts compress when they send them to one another."""

from collections.abc import Sequence

from torch import nn

from lockstep.comm.collectives.gradients import TensorSpec
from lockstep.comm.collectives.reduce_scatter import members_by_domain
from lockstep.parallel.groups import ParameterGroup
from lockstep.parallel.storage.store import tensor_spec
from lockstep.plan.program.compression import Compression, compression_of
from lockstep.plan.spec import Plan


def compressed_tensors(
    plan: Plan, model: nn.Module, groups: Sequence[ParameterGroup]
) -> list[tuple[TensorSpec, Compression]]:
    """The trained parameters that are compressed between hosts, and their compression."""
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    found: list[tuple[TensorSpec, Compression]] = []
    for group in groups:
        specs = [tensor_spec(name, trained[name]) for name in group.names if name in trained]
        every = zip(specs, compressions(plan, group.ranks, specs), strict=False)
        found += [(spec, compression) for spec, compression in every if compression is not None]
    return found


def compressions(
    plan: Plan, ranks: Sequence[int], tensors: Sequence[TensorSpec]
) -> tuple[Compression | None, ...]:
    """The compression of tensors between hosts with these ranks; empty without any."""
    if plan.compression is None or len(members_by_domain(ranks, plan.memory_domains)) == 1:
        return ()
    return tuple(
        compression_of(plan.compression, tensor.shape) if tensor.dtype.is_floating_point else None
        for tensor in tensors
    )
