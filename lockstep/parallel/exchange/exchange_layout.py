"""The layout of the memory that a Plan's ranks share: known before any process starts."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import nn

from lockstep.comm.collectives.gradient_spec import GradientSpec
from lockstep.comm.collectives.gradients import TensorSpec
from lockstep.comm.exchange_spec import ExchangeSpec, GroupSpec
from lockstep.comm.shared_memory import work_queue
from lockstep.comm.sparse import row_versions
from lockstep.parallel.data_parallel.batch_norm import BatchNorms
from lockstep.parallel.exchange.compressed_tensors import compressions
from lockstep.parallel.groups import ParameterGroup, parameter_groups
from lockstep.parallel.local_sgd.averaging import averaged_groups
from lockstep.parallel.parameter_server import slot_journal
from lockstep.parallel.parameter_server.update_rollback import copied_bytes
from lockstep.parallel.pipeline.stage_mail import MailSpec, mail_spec
from lockstep.parallel.sharding.units import unit_of_parameters
from lockstep.parallel.storage.store import slot_spec, tensor_spec
from lockstep.parallel.tensor.shard_exchange import SLOT_BYTES
from lockstep.parallel.workload import Workload
from lockstep.plan.averaging import AveragedUpdate
from lockstep.plan.decision import LocalUpdate, ServedUpdate
from lockstep.plan.devices import is_cpu
from lockstep.plan.layout import num_buckets
from lockstep.plan.makers.replicas import plan_of_replica
from lockstep.plan.mesh import division_axis
from lockstep.plan.program.lowering import lower_stages, stage_graph
from lockstep.plan.program.rank_program import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    RankProgram,
)
from lockstep.plan.spec import Plan

# Messages of one kind in use at once in evaluation: a sender may be this far ahead.
_SLOTS_IN_EVALUATION = 3

# Elements of a share's outputs in one message, in float64.
_OUTPUT_ELEMENTS = 1 << 15


def exchange_spec(work: Workload) -> ExchangeSpec:
    """The layout of the memory that ranks share: known before any process starts."""
    plan = work.plan
    trained = [] if work.updater is None else _trained(work.model)
    rank_of: Callable[[int], int]
    if plan.pipeline is None:
        rank_of = plan.rank_of
        mail_bytes = _work_bytes(work, trained)
    else:
        degree, last_stage = plan.tensor_degree, len(plan.pipeline.stages) - 1
        rank_of = partial(stage_graph(plan.pipeline, degree).at(0, degree).rank_of, last_stage)
        mail_bytes = tuple(spec.num_bytes for spec in mail_specs(work).values())
        mail_bytes += tuple(spec.num_bytes for spec in replica_specs(work))
        mail_bytes += _slot_bytes(plan)
    return ExchangeSpec(
        num_ranks=plan.num_ranks,
        share_ranks=tuple(map(rank_of, range(plan.num_shares))),
        groups=_group_specs(work, trained),
        row_capacity=_row_capacity(work),
        mail_bytes=mail_bytes,
        on_accelerators=not is_cpu(plan.devices),
        gathering_rank=plan.num_ranks - 1 if plan.is_stale else None,
        ranks_per_share=plan.tensor_degree,
    )


def replica_specs(work: Workload) -> list[ExchangeSpec]:
    """The layout that each replica's ranks share between averages, if replicas are pipelines."""
    plan = work.plan
    if not isinstance(plan.update, AveragedUpdate) or plan.pipeline is None or work.updater is None:
        return []
    return [exchange_spec(work_of_replica(work, number)) for number in range(plan.num_replicas)]


def work_of_replica(work: Workload, replica: int) -> Workload:
    """The workload of one replica that trains by itself."""
    plan = plan_of_replica(work.plan, replica)
    groups = parameter_groups(plan, work.model, list(work.partitions.values()))
    return replace(work, plan=plan, groups=groups)


def _trained(model: nn.Module) -> list[TensorSpec]:
    return [
        tensor_spec(name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


def _group_specs(work: Workload, trained: Sequence[TensorSpec]) -> tuple[GroupSpec, ...]:
    plan, updater = work.plan, work.updater
    if isinstance(plan.update, AveragedUpdate):
        return averaged_groups(work)
    limits = {f"{layer.name}.weight".lstrip("."): layer.row_limit for layer in plan.layers}
    if updater is None or not updater.is_elementwise:
        limits = {}
    keeps_rows = updater is not None and (plan.num_servers > 0 or updater.hands_on)
    sparse = sparse_weights(work.model) if keeps_rows else frozenset()
    units = units_of(work)
    return tuple(
        group_spec(
            plan,
            group,
            [one for one in trained if one.name in group.names],
            limits,
            sparse,
            units=units,
        )
        for group in work.groups
    )


def units_of(work: Workload) -> dict[str, int | None] | None:
    """The unit of each parameter, if ranks keep only their part of the gradients."""
    sharding = work.plan.sharding
    if sharding is None or not sharding.divides_gradients or work.updater is None:
        return None
    return unit_of_parameters(sharding, work.model)


def _work_bytes(work: Workload, trained: Sequence[TensorSpec]) -> tuple[int, ...]:
    """Sizes of the memory that ranks share for more than gradients.

    For layers that are divided inside these are the slots in which shards meet. For asynchronous
    workers and servers they are the progress table, the servers' slot notes, second copies, and,
    for other hosts, the times at which rows of sparse parameters changed.
    """
    plan, updater = work.plan, work.updater
    if plan.tensor is not None:
        return _slot_bytes(plan)
    if not (plan.is_stale and isinstance(plan.update, ServedUpdate) and updater is not None):
        return ()
    servers, parameters = plan.num_servers, dict(work.model.named_parameters())
    slots = [slot_spec(key, parameters[key.parameter]) for key in updater.slot_keys()]
    return (
        work_queue.num_bytes(plan.num_ranks - servers, servers),
        slot_journal.num_bytes(trained, servers),
        copied_bytes([*trained, *slots]) if plan.update.replicas > 1 else 0,
        row_versions.num_bytes(
            [one for one in trained if plan.hosts and one.name in sparse_weights(work.model)]
        ),
    )


def _slot_bytes(plan: Plan) -> tuple[int, ...]:
    """Sizes of the memory in which shards meet, for each ranks that divide layers together."""
    degree = plan.tensor_degree if plan.engine.shares_memory else 1
    return (2 * SLOT_BYTES,) * (plan.num_ranks // degree) if degree > 1 else ()


def _row_capacity(work: Workload) -> int:
    """The longest row of a share: statistics, weights of losses, or a part of outputs."""
    longest = 0 if work.plan.pipeline is not None else BatchNorms(work.model).row_length
    loss = work.loss
    if loss is None:
        return longest
    in_stages = work.plan.pipeline is not None
    offered = _OUTPUT_ELEMENTS if loss.may_take_whole(in_stages=in_stages) else 0
    return max(longest, len(loss.parts.factors), offered)


def group_spec(
    plan: Plan,
    group: ParameterGroup,
    tensors: Sequence[TensorSpec],
    limits: Mapping[str, int],
    sparse: frozenset[str],
    *,
    is_early: bool = True,
    units: Mapping[str, int | None] | None = None,
) -> GroupSpec:
    """The layout of a group: rows for every few shares or each rank of a stage, if several.

    Args:
        plan: the Plan.
        group: the group.
        tensors: its trained parameters.
        limits: see ``GradientSpec.row_limits``; by parameter.
        sparse: see ``GradientSpec``.
        is_early: gradients may be sent during backward, as far as the Plan allows it.
        units: of parameters, if each rank keeps its part of the gradients only; else None.
    """
    row_ranks: tuple[int, ...] = ()
    per_row = 0 if plan.pipeline is not None else plan.shares_per_row
    if plan.pipeline is None and not isinstance(plan.update, LocalUpdate):
        row_ranks = tuple(map(plan.rank_of, range(0, plan.num_shares, per_row)))
    elif len(group.ranks) > 1:  # of those that divide layers together, the first has a row
        row_ranks = tuple(rank for rank in group.ranks if rank % plan.tensor_degree == 0)
    return GroupSpec(
        ranks=group.ranks,
        row_ranks=row_ranks,
        shares_per_row=per_row,
        gradients=GradientSpec(
            num_shares=max(len(row_ranks), 1),
            tensors=tuple(tensors),
            num_buckets=_num_buckets(plan, group, tensors, is_early=is_early),
            row_limits=tuple(
                limits.get(tensor.name, 0) if row_ranks and per_row and _has_rows(tensor) else 0
                for tensor in tensors
            ),
            sparse=sparse,
            buckets=tuple(_bucket_of(units[tensor.name]) for tensor in tensors) if units else (),
        ),
        compressions=compressions(plan, group.ranks, tensors),
        divisions=_divisions(plan) if units else (),
        keeps_on_host=plan.sharding is not None and plan.sharding.streams_parameters,
        keeps_memory=plan.sharding is not None and plan.sharding.is_small,
    )


def _divisions(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """The ranks that divide parameters, group by group."""
    axis = division_axis(plan.mesh)
    return tuple(tuple(plan.ranks_along(axis, first)) for first in plan.ranks_along("data", 0))


def _bucket_of(unit: int | None) -> int:
    """Backward completes the last unit first, and what is in no unit last."""
    return 0 if unit is None else unit + 1


def sparse_weights(model: nn.Module) -> frozenset[str]:
    """Names of the embeddings with ``sparse=True`` whose weights are used for nothing else."""
    holders = Counter(
        id(weight) for module in model.modules() for weight in module._parameters.values()
    )
    names = {id(weight): name for name, weight in model.named_parameters() if weight.requires_grad}
    return frozenset(
        names[id(module.weight)]
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        and module.sparse
        and module.max_norm is None
        and id(module.weight) in names
        and holders[id(module.weight)] == 1
        and _has_rows(tensor_spec("", module.weight))
    )


def _num_buckets(
    plan: Plan, group: ParameterGroup, tensors: Sequence[TensorSpec], *, is_early: bool
) -> int:
    """Number of gradient buckets; without stages they are sent during backward."""
    if plan.engine.shares_memory or len(group.ranks) == 1:
        return 0
    extents = [tensor.extent for tensor in tensors]
    is_early = is_early and plan.pipeline is None and plan.tensor is None
    return num_buckets(extents, are_early=is_early)


def _has_rows(spec: TensorSpec) -> bool:
    """True if a weight lies in memory row by row."""
    return len(spec.shape) == 2 and spec.stride == (spec.shape[1], 1)


def mail_specs(work: Workload) -> dict[bool, MailSpec]:
    """The mailboxes of stages, by training mode of the model.

    Pipelines that train separately have their own mailboxes for training: see ``replica_specs``.
    """
    plan, loss = work.plan, work.loss
    assert plan.pipeline is not None
    graph = stage_graph(plan.pipeline, plan.tensor_degree)
    # With a loss of the whole batch, all microbatches go forward before one goes backward.
    may_take_whole = loss is not None and loss.may_take_whole(in_stages=True)
    in_training = plan.num_shares if may_take_whole else _slots_in_training(plan)
    slots = {True: in_training, False: _SLOTS_IN_EVALUATION}
    return {
        training: mail_spec(
            graph,
            partition,
            slots[training],
            degree=plan.tensor_degree,
            training=training,
            shares_memory=plan.engine.shares_memory,
        )
        for training, partition in work.partitions.items()
        if not (training and isinstance(plan.update, AveragedUpdate))
    }


def _slots_in_training(plan: Plan) -> int:
    """The number of slots with which no sender waits for one.

    Before its forward pass k, a sender has done the backward pass of all microbatches except those
    it has in flight. So have the readers of its messages, except for their passes for weights, of
    which at most as many are missing as they have in flight themselves.
    """
    assert plan.pipeline is not None
    programs = lower_stages(plan, plan.pipeline, plan.num_shares)
    return min(2 * max(map(_most_in_flight, programs)), plan.num_shares)


def _most_in_flight(program: RankProgram) -> int:
    """The most microbatches of one stage whose passes have begun and are not all done."""
    now: Counter[int] = Counter()
    most = 0
    splits = any(isinstance(action, BackwardInput) for action in program)
    for action in program:
        if isinstance(action, Forward):
            now[action.stage] += 1
            most = max(most, now[action.stage])
        elif isinstance(action, BackwardWeight if splits else Backward):
            now[action.stage] -= 1
    return most
