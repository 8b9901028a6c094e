"""Groups: which ranks have which parameters.

The same ranks hold and update all parameters of a group, in one store that only they map. A data
parallel Plan has one group. A pipeline has a group per stage, and one for each set of stages that
share parameters: tied parameters exist once, and their gradients are summed over these stages.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from lockstep.parallel.pipeline.partition import Partition
from lockstep.plan.spec import Plan


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters and the ranks that have them.

    Attributes:
        ranks: in ascending order.
        names: of the parameters, in the model's order.
    """

    ranks: tuple[int, ...]
    names: tuple[str, ...]


def parameter_groups(
    plan: Plan, model: nn.Module, partitions: Sequence[Partition]
) -> tuple[ParameterGroup, ...]:
    """The groups of a model's parameters, those of rank 0 first.

    Args:
        plan: the Plan.
        model: the model.
        partitions: of the model in training, in evaluation, or both; none without a pipeline.
    """
    names = [name for name, _ in model.named_parameters()]
    if plan.pipeline is None:
        return (ParameterGroup(ranks=tuple(range(plan.num_ranks)), names=tuple(names)),)
    stages: dict[str, set[int]] = {name: set() for name in names}
    for each in partitions:
        for stage, part in enumerate(each.parts):
            for name in part.parameters:
                stages[name].add(stage)
    members: dict[tuple[int, ...], list[str]] = {}
    for name in names:
        # A parameter that no stage uses has no gradient, and is never stepped.
        using = stages[name] or {0}
        ranks = {rank for stage in using for rank in plan.pipeline.stages[stage].ranks}
        members.setdefault(tuple(sorted(ranks)), []).append(name)
    return tuple(
        ParameterGroup(ranks=ranks, names=tuple(members[ranks])) for ranks in sorted(members)
    )
