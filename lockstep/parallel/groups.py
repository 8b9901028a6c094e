"""Groups: which ranks have which parameters.

Parameters of a group are held by the same ranks, lie in one store that only these map, and are
updated by these. Under a data parallel Plan all are in one group. In a pipeline there is a group
per stage, and one for each set of stages that have parameters in common: tied parameters exist
once, and the stages that use them add up their gradients.
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
        # What no stage uses must be somewhere: it has no gradient, and is never stepped.
        using = stages[name] or {0}
        ranks = {rank for stage in using for rank in plan.pipeline.stages[stage].ranks}
        members.setdefault(tuple(sorted(ranks)), []).append(name)
    return tuple(
        ParameterGroup(ranks=ranks, names=tuple(members[ranks])) for ranks in sorted(members)
    )
