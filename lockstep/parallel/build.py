"""From a Plan to this rank's Worker.

All ranks compute the same layout of their shared memory first: an ``ExchangeSpec``. From it and the
memory each rank builds its own end. A Plan without stages counts as a single stage that every rank
holds, so all parameters are in one group.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lockstep.comm.collectives.reduce_scatter import members_by_domain
from lockstep.comm.collectives.sharded_reduce import ShardedReduce
from lockstep.comm.exchange import Exchange
from lockstep.comm.exchange_spec import ExchangeSpec, GroupSpec
from lockstep.comm.p2p.interface import MailCarrier, SharedMail
from lockstep.comm.p2p.process_group_p2p import GroupMail, announcement_key
from lockstep.comm.p2p.tcp_p2p import MailChannels
from lockstep.comm.transports.process_group import ProcessGroups
from lockstep.parallel.data_parallel.batch_norm import BatchNorms
from lockstep.parallel.data_parallel.model_passes import ModelPasses
from lockstep.parallel.data_parallel.passes import Passes
from lockstep.parallel.exchange.engine import Endpoint
from lockstep.parallel.exchange.exchange_layout import mail_specs, units_of
from lockstep.parallel.owned_group import OwnedGroup
from lockstep.parallel.pipeline.stage_mail import MailSpec, StageMail
from lockstep.parallel.pipeline.stage_passes import StagePasses
from lockstep.parallel.sharding.norm_places import NormPlaces
from lockstep.parallel.sharding.offloaded_memory import OffloadedMemory
from lockstep.parallel.sharding.parameter_offload import ParameterOffload
from lockstep.parallel.sharding.residency import Residency
from lockstep.parallel.sharding.sharded_passes import ShardedPasses
from lockstep.parallel.sharding.step_residency import StepResidency
from lockstep.parallel.sharding.unit_memory import UnitMemory
from lockstep.parallel.sharding.units import modules_of_units, separate_storages, unit_of_parameters
from lockstep.parallel.tensor.tensor_passes import (
    DividedStagePasses,
    ShardedTensorPasses,
    TensorPasses,
)
from lockstep.parallel.updater_interface import Updater
from lockstep.parallel.worker import Worker
from lockstep.parallel.workload import Workload
from lockstep.plan.layout import Piece, block_sizes
from lockstep.plan.mesh import coordinates, division_axis
from lockstep.plan.spec import Plan


def build_worker(
    work: Workload, endpoint: Endpoint, make: Callable[..., Worker] = Worker
) -> Worker:
    """The Worker of a rank.

    Args:
        work: common to all ranks.
        endpoint: this rank's connections to the others.
        make: the class, with its own arguments bound.
    """
    plan, spec, rank = work.plan, endpoint.spec, endpoint.rank
    mail = {} if plan.pipeline is None else mail_specs(work)
    process = endpoint.process_groups({pair for one in mail.values() for pair in one.channels})
    exchange = endpoint.exchange(process)
    owned = owned_groups(plan, spec, work.updater, dict(work.model.named_parameters()), exchange)
    residency = residency_of(work, owned, exchange, endpoint.device)
    if residency is not None and endpoint.values is not None:
        _take_part(work.model, residency, endpoint.values)
    for gradients in exchange.gradients.values():
        if isinstance(gradients, ShardedReduce):  # units keep all ranks in step, also in backward
            gradients.waits_in_backward = residency is not None or not BatchNorms(work.model)
    if work.updater is not None:
        is_apart = plan.sharding is not None and plan.sharding.offload is not None
        is_apart = is_apart and endpoint.device.type != "cpu"
        work.updater.step_on(endpoint.device if is_apart else None)
    return make(
        work,
        passes=open_passes(work, endpoint, exchange, owned, process, residency),
        groups=owned,
        residency=residency,
        counted_elsewhere=_counted_elsewhere(plan, spec, rank),
        **what_it_has(work, rank),
        exchange=exchange,
    )


def what_it_has(work: Workload, rank: int) -> dict[str, Any]:
    """A rank, and names of what it has: arguments of a Worker."""
    authoritative = authoritative_buffers(work, rank)
    return {
        "rank": rank,
        "local_names": _local_names(work, rank, authoritative),
        "authoritative": authoritative,
    }


def open_passes(
    work: Workload,
    endpoint: Endpoint,
    exchange: Exchange,
    owned: Sequence[OwnedGroup],
    process: ProcessGroups | None = None,
    residency: Residency | None = None,
) -> Passes:
    """The passes of a rank, with the groups that it holds."""
    options: dict[str, Any] = {
        "rank": endpoint.rank,
        "exchange": exchange,
        "trainable": [member for group in owned for member in group.members],
        "device": endpoint.device,
    }
    if work.plan.pipeline is None:
        options["group"] = endpoint.spec.groups[0]
        if residency is not None:
            options["residency"] = residency
        if work.plan.tensor is not None:
            tensor_passes = TensorPasses if residency is None else ShardedTensorPasses
            return tensor_passes(work, endpoint=endpoint, process=process, **options)
        if residency is not None:
            return ShardedPasses(work, **options)
        return ModelPasses(work, **options)
    mail_channels = endpoint.mail_channels()
    mail = _open_mail(mail_specs(work), endpoint, exchange, mail_channels, process)
    options |= {"mail": mail, "mail_channels": mail_channels, "groups": owned}
    if work.plan.tensor is not None:
        return DividedStagePasses(work, endpoint=endpoint, process=process, **options)
    return StagePasses(work, **options)


def residency_of(
    work: Workload, owned: Sequence[OwnedGroup], exchange: Exchange, device: torch.device
) -> Residency | None:
    """The residency of a rank's parameters, if the Plan divides them."""
    sharding, units = work.plan.sharding, units_of(work)
    if sharding is not None and sharding.streams_parameters:
        return offload_of(work, owned[0], exchange, device)
    if sharding is None or units is None or not sharding.divides_parameters:
        return None
    (group,) = owned
    gradients = exchange.gradients[group.number]
    assert isinstance(gradients, ShardedReduce)
    assert exchange.board is not None
    of_trained = {name: units[name] for name in group.names}
    if device.type != "cpu":
        separate_storages(work.model, of_trained)
    memory = UnitMemory(
        group.members,
        list(of_trained.values()),
        len(sharding.units),
        gradients=gradients,
        updated=group.pieces,
        board=exchange.board,
        **_kept_pieces(work.plan, group, exchange.rank),
    )
    return (StepResidency if sharding.is_small else Residency)(
        work.model,
        modules=modules_of_units(sharding, work.model),
        names=[names[0] for names in sharding.units],
        parameters=group.names,
        memory=memory,
        gradients=gradients,
        norms=NormPlaces(BatchNorms(work.model).num_numbers),
        device=device,
        leads=exchange.rank == exchange.ranks_here.start,
        meet=exchange.barrier if work.plan.num_hosts == 1 and device.type == "cpu" else None,
    )


def offload_of(
    work: Workload, group: OwnedGroup, exchange: Exchange, device: torch.device
) -> ParameterOffload:
    """The residency of parameters that lie in host memory."""
    sharding, model = work.plan.sharding, work.model
    assert sharding is not None
    gradients = exchange.gradients[group.number]
    units, parameters = unit_of_parameters(sharding, model), dict(model.named_parameters())
    names = [*group.names, *(name for name in units if name not in {*group.names})]
    rest = len(sharding.units)
    of_names = [units[name] for name in names]
    memory = OffloadedMemory(
        [parameters[name] for name in names],
        [rest if unit is None else unit for unit in of_names],
        rest + 1,
        updated=group.pieces,
        device=device,
    )
    return ParameterOffload(
        model,
        modules=modules_of_units(sharding, model),
        names=[own[0] for own in sharding.units],
        parameters=names,
        memory=memory,
        gradients=gradients if isinstance(gradients, ShardedReduce) else None,
        norms=NormPlaces(BatchNorms(model).num_numbers),
        device=device,
        leads=exchange.rank == exchange.ranks_here.start,
    )


def _kept_pieces(plan: Plan, group: OwnedGroup, rank: int) -> dict[str, Any]:
    """What a rank and others keep, as ``UnitMemory`` takes it.

    Ranks at the same place of their groups keep the same pieces, and divide the update of these.
    """

    def kept_by(one: int) -> list[Piece]:
        pieces = [each for copy in plan.ranks_along("data", one) for each in group.divided[copy]]
        return sorted(pieces, key=lambda piece: (piece.parameter, piece.start))

    return {
        "kept": kept_by(rank),
        "others": {
            one: kept_by(one)
            for one in plan.ranks_along(division_axis(plan.mesh), rank)
            if one != rank
        },
        "copies": {
            one: group.divided[one] for one in plan.ranks_along("data", rank) if one != rank
        },
    }


@torch.no_grad()
def _take_part(model: nn.Module, residency: Residency, values: Mapping[str, torch.Tensor]) -> None:
    """Copy what this rank keeps of parameters from their values, by name."""
    residency.copy_pieces(values)
    for name, parameter in model.named_parameters():
        if name not in residency.gathered:
            parameter.data.copy_(values[name])


def _open_mail(
    specs: Mapping[bool, MailSpec],
    endpoint: Endpoint,
    exchange: Exchange,
    mail_channels: MailChannels | None,
    process: ProcessGroups | None,
) -> dict[bool, StageMail]:
    """This rank's mail, by whether the model is in training."""
    board, region = exchange.board, endpoint.region
    assert region is not None
    assert board is not None
    opened: dict[bool, StageMail] = {}
    first_box = 0
    # Memory of single replicas may follow the mail.
    for (training, mail), offset in zip(specs.items(), endpoint.spec.mail_offsets, strict=False):
        announced = {announcement_key(pair): spec for pair, spec in mail.channels.items()}
        carrier: MailCarrier
        carrier = shared = SharedMail(
            {**mail.boxes, **announced},
            region,
            offset,
            board,
            ranks_here=exchange.ranks_here,
            mail_channels=mail_channels,
            first_box=first_box,
        )
        if process is not None:
            carrier = GroupMail(mail.channels, shared, process, board.rank, endpoint.device)
        opened[training] = StageMail(mail, carrier, board.rank)
        first_box += len(mail.boxes) + len(mail.channels)
    return opened


def divided_pieces(plan: Plan, group: GroupSpec, updater: Updater | None) -> dict[int, list[Piece]]:
    """The pieces of a group that each of its ranks updates.

    Of several domains, each updates its part of the parameters, and all of those whose factors are
    exchanged, or whose sums are compressed.
    """
    if updater is None:
        return {rank: [] for rank in group.ranks}
    extents, num_rows = group.gradients.extents, group.gradients.num_shares
    if plan.num_servers:
        # A parameter that is cut between rows is so into as many blocks, or more.
        served = updater.divide(extents, plan.num_servers, max(num_rows, plan.num_servers))
        workers: list[list[Piece]] = [[] for _ in group.ranks[: -plan.num_servers]]
        return dict(zip(group.ranks, [*workers, *served], strict=True))
    is_everywhere = [bool(group.compressions or extent.row_elements) for extent in extents]
    everywhere = [number for number, is_one in enumerate(is_everywhere) if is_one]
    if len(plan.domains) == 1 or not everywhere:
        slices = updater.divide(extents, len(group.ranks), num_rows)
        return dict(zip(_in_order_of_slices(plan, group.ranks), slices, strict=True))
    others = [number for number, is_one in enumerate(is_everywhere) if not is_one]
    divided = _renumbered(
        updater.divide([extents[number] for number in others], len(group.ranks), num_rows), others
    )
    for ranks in members_by_domain(group.ranks, plan.domains):
        own = updater.divide([extents[number] for number in everywhere], len(ranks), num_rows)
        for rank, pieces in zip(ranks, _renumbered(own, everywhere), strict=True):
            divided[group.ranks.index(rank)] += pieces
    return {
        rank: sorted(pieces, key=lambda piece: piece.parameter)
        for rank, pieces in zip(group.ranks, divided, strict=True)
    }


def _in_order_of_slices(plan: Plan, ranks: Sequence[int]) -> list[int]:
    """Ranks in the order in which they get slices: those that keep the same pieces side by side."""
    axis = division_axis(plan.mesh) if plan.sharding else "shard"
    return sorted(ranks, key=lambda rank: coordinates(plan.mesh, rank).get(axis, 0))


def _renumbered(divided: list[list[Piece]], numbers: Sequence[int]) -> list[list[Piece]]:
    """Pieces of some parameters, numbered among all of them."""
    return [
        [replace(piece, parameter=numbers[piece.parameter]) for piece in pieces]
        for pieces in divided
    ]


def owned_groups(
    plan: Plan,
    spec: ExchangeSpec,
    updater: Updater | None,
    parameters: Mapping[str, nn.Parameter],
    exchange: Exchange,
) -> list[OwnedGroup]:
    """The groups that a rank holds, divided among its ranks."""
    sharding = plan.sharding
    is_shared = sharding is not None and (sharding.shares_parameters or sharding.streams_parameters)
    owned = []
    for number, gradients in exchange.gradients.items():
        group = spec.groups[number]
        pieces = divided_pieces(plan, group, updater)
        gradients.divide(pieces)
        own = pieces[exchange.rank]
        owned.append(
            OwnedGroup(
                number=number,
                spec=group,
                members=[parameters[tensor.name] for tensor in group.gradients.tensors],
                pieces=own,
                divided=pieces,
                blocks=block_sizes(group.gradients.extents, group.gradients.num_shares, own),
                is_scattered=not is_shared
                and len(members_by_domain(group.ranks, plan.domains)) > 1,
            )
        )
    return owned


def _counted_elsewhere(plan: Plan, spec: ExchangeSpec, rank: int) -> frozenset[str]:
    """Parameters that all domains update, and the first domain includes in the norm."""
    return frozenset(
        tensor.name
        for group in spec.groups
        if rank not in members_by_domain(group.ranks, plan.domains)[0]
        for tensor, limit in zip(group.gradients.tensors, group.gradients.row_limits, strict=True)
        if limit or group.compressions
    )


def _local_names(work: Workload, rank: int, authoritative: frozenset[str]) -> frozenset[str] | None:
    """Names of the parameters and buffers on a rank; None for all."""
    if work.plan.pipeline is None:
        return None
    parameters = {name for group in work.groups if rank in group.ranks for name in group.names}
    buffers = {
        name
        for each in work.partitions.values()
        for stage, part in zip(work.plan.pipeline.stages, each.parts, strict=True)
        if rank in stage.ranks
        for name in part.buffers
    }
    return frozenset(parameters | buffers | authoritative)


def authoritative_buffers(work: Workload, rank: int) -> frozenset[str]:
    """Buffers whose values are taken from this rank.

    Training changes a buffer in one stage, whose first replica has its value, even if other stages
    read it in evaluation. Buffers that no stage uses, and those without a pipeline, are rank 0's.
    """
    owners: dict[str, int] = {}
    pipeline = work.plan.pipeline
    stages = [] if pipeline is None else pipeline.stages
    for training in (True, False) if stages else ():
        for stage, part in zip(stages, work.partitions[training].parts, strict=True):
            for name in part.buffers:
                owners.setdefault(name, stage.ranks[0])
    return frozenset(name for name, _ in work.model.named_buffers() if owners.get(name, 0) == rank)
