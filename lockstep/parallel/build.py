"""From a Plan to this rank's Worker.

What ranks share is laid out first, the same for all: an ``ExchangeSpec`` for replicas, a
``StageExchangeSpec`` for the stages of a pipeline. From it, and the memory made after it, each rank
builds its own end.
"""

import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Literal

import torch
from torch import nn

from lockstep.comm.board import Board
from lockstep.comm.courier import Courier
from lockstep.comm.exchange import Exchange, LocalExchange, TensorSpec
from lockstep.comm.gradient_rows import GradientSpec
from lockstep.comm.host_exchange import HostExchange
from lockstep.comm.host_sums import pairs
from lockstep.comm.shared_exchange import ExchangeSpec, SharedMemoryExchange
from lockstep.comm.shared_memory import SharedRegion
from lockstep.comm.wide_board import Crossing, WideBoard
from lockstep.comm.wires import Wires
from lockstep.parallel.batch_norm import BatchNorms
from lockstep.parallel.gradient_rules import GradientRules
from lockstep.parallel.groups import ParameterGroup
from lockstep.parallel.losses import LossAdapter
from lockstep.parallel.partition import Partition
from lockstep.parallel.replica import Replica
from lockstep.parallel.stage_exchange import (
    GroupSpec,
    StageExchange,
    StageExchangeSpec,
    StagesAbroad,
)
from lockstep.parallel.stage_mail import mail_spec
from lockstep.parallel.stages import OwnedGroup, StageWorker
from lockstep.parallel.step_functions import StepFunction
from lockstep.parallel.store import tensor_spec
from lockstep.parallel.update import Updater
from lockstep.parallel.worker import Worker
from lockstep.plan.layout import Piece, block_sizes
from lockstep.plan.lowering import lower_train
from lockstep.plan.pipelines import stage_graph
from lockstep.plan.program import Backward, BackwardInput, BackwardWeight, Forward, RankProgram
from lockstep.plan.spec import LocalUpdate, Plan

AnySpec = ExchangeSpec | StageExchangeSpec

# Messages of one kind that may be in use at once in evaluation: the sender may be so far ahead.
_SLOTS_IN_EVALUATION = 3


def exchange_spec(
    plan: Plan,
    model: nn.Module,
    updater: Updater | None,
    groups: Sequence[ParameterGroup],
    partitions: Mapping[bool, Partition],
    num_losses: int = 1,
) -> AnySpec:
    """The layout of what ranks share: known before any process starts.

    Args:
        plan: the Plan.
        model: the model.
        updater: the optimizer; None where nothing is trained.
        groups: the parameters, by the ranks that have them.
        partitions: of the model in stages, by whether it is in training.
        num_losses: parts of the loss.
    """
    trained = {
        name: tensor_spec(name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and updater is not None
    }
    if plan.pipeline is not None:
        return _stage_spec(plan, trained, groups, partitions)
    limits = {f"{layer.name}.weight".lstrip("."): layer.row_limit for layer in plan.layers}
    return ExchangeSpec(
        num_ranks=plan.num_ranks,
        num_shares=plan.num_shares,
        shares_per_row=plan.shares_per_row,
        gradients=GradientSpec(
            num_shares=plan.num_shares // plan.shares_per_row,
            tensors=tuple(trained.values()),
            row_limits=tuple(
                limits.get(name, 0)
                if updater is not None and updater.is_elementwise and _has_rows(spec)
                else 0
                for name, spec in trained.items()
            ),
        ),
        row_capacity=max(BatchNorms(model).row_length, num_losses),
    )


def _has_rows(spec: TensorSpec) -> bool:
    """Whether a weight lies in memory row by row."""
    return len(spec.shape) == 2 and spec.stride == (spec.shape[1], 1)


def _stage_spec(
    plan: Plan,
    trained: Mapping[str, TensorSpec],
    groups: Sequence[ParameterGroup],
    partitions: Mapping[bool, Partition],
) -> StageExchangeSpec:
    assert plan.pipeline is not None
    graph = stage_graph(plan.pipeline)
    slots = {True: _slots_in_training(plan), False: _SLOTS_IN_EVALUATION}
    return StageExchangeSpec(
        num_ranks=plan.num_ranks,
        num_shares=plan.num_shares,
        groups=tuple(
            GroupSpec(
                ranks=group.ranks,
                tensors=tuple(trained[name] for name in group.names if name in trained),
            )
            for group in groups
        ),
        mail={
            training: mail_spec(graph, partition, slots[training], training=training)
            for training, partition in partitions.items()
        },
    )


def _slots_in_training(plan: Plan) -> int:
    """Slots that let no sender wait for one.

    Before its forward pass k, a sender has done the backward pass of all microbatches but those it
    has in flight. So have the readers of what it sent, but for their passes for weights, and of
    these no more are missing than they have in flight themselves.
    """
    programs = [lower_train(plan, rank, plan.num_shares) for rank in range(plan.num_ranks)]
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


# Two ranks of different hosts, the lower one first, and what goes between them.
WireUse = Literal["sums", "mail"]
WireKey = tuple[int, int, WireUse]


def wire_keys(plan: Plan, groups: Sequence[ParameterGroup]) -> set[WireKey]:
    """The wires that a Plan needs."""
    hosts = [plan.ranks_of_host(host) for host in range(plan.num_hosts)]
    keys: set[WireKey] = set()
    for group in groups:
        members = [[rank for rank in ranks if rank in group.ranks] for ranks in hosts]
        keys |= {(low, high, "sums") for low, high in pairs([own for own in members if own])}
    stages = () if plan.pipeline is None else plan.pipeline.stages
    for one, other in combinations(stages, 2):
        for low, high in (sorted(pair) for pair in product(one.ranks, other.ranks)):
            if plan.host_of(low) != plan.host_of(high):
                keys.add((low, high, "mail"))
    return keys


@dataclass(frozen=True, kw_only=True)
class Neighbours:
    """What a rank has of other hosts.

    Attributes:
        host: this host.
        names: of other ranks' hosts, for messages.
        sockets: this rank's for sums, by the rank at the other end.
        mail_sockets: likewise for what stages send.
        crossing: to the other hosts' leaders; None unless this rank leads its host.
        mirrored: see ``HostExchange``.
        timeout_seconds: longest wait for another host.
    """

    host: int
    names: Mapping[int, str]
    sockets: Mapping[int, socket.socket]
    mail_sockets: Mapping[int, socket.socket]
    crossing: Crossing | None
    mirrored: Sequence[torch.Tensor]
    timeout_seconds: float

    @property
    def all_sockets(self) -> list[socket.socket]:
        """Whatever they are for."""
        return [*self.sockets.values(), *self.mail_sockets.values()]


def build_exchange(
    plan: Plan,
    spec: AnySpec,
    region: SharedRegion | None,
    *,
    rank: int,
    look_around: Callable[[float], None],
    neighbours: Neighbours | None = None,
) -> Exchange | StageExchange:
    """This rank's end of what the Plan's ranks share."""
    if isinstance(plan.update, LocalUpdate):
        return LocalExchange()
    assert region is not None
    if neighbours is None:
        board = Board(region, rank=rank, num_ranks=plan.num_ranks, look_around=look_around)
        if isinstance(spec, StageExchangeSpec):
            return StageExchange(spec, region, board=board)
        return SharedMemoryExchange(spec, region, board=board)
    hosts = [plan.ranks_of_host(host) for host in range(plan.num_hosts)]
    wires = Wires(neighbours.sockets, neighbours.names, look_around, neighbours.timeout_seconds)
    wide_board = WideBoard(
        region,
        rank=rank,
        hosts=plan.hosts,
        look_around=look_around,
        crossing=neighbours.crossing,
    )
    if isinstance(spec, StageExchangeSpec):
        abroad = StagesAbroad(
            host=neighbours.host,
            hosts=hosts,
            board=wide_board,
            wires=wires,
            courier=Courier(neighbours.mail_sockets, neighbours.names, look_around),
            mirrored=neighbours.mirrored,
        )
        return StageExchange(spec, region, board=wide_board, abroad=abroad)
    return HostExchange(
        spec,
        region,
        board=wide_board,
        hosts=hosts,
        host=neighbours.host,
        wires=wires,
        mirrored=neighbours.mirrored,
    )


def build_worker(
    plan: Plan,
    *,
    rank: int,
    model: nn.Module,
    loss: LossAdapter | None,
    updater: Updater | None,
    exchange: Exchange | StageExchange,
    spec: AnySpec,
    groups: Sequence[ParameterGroup],
    partitions: Mapping[bool, Partition],
    rules: GradientRules,
    functions: Sequence[StepFunction],
    seed: int,
    device: torch.device,
) -> Worker:
    """Put a rank's parts together."""
    if isinstance(spec, StageExchangeSpec):
        assert isinstance(exchange, StageExchange)
        exchange.divide(_divided_groups(spec, updater))
        ruled = _ruled_buffers(plan, model, partitions, rank)
        return StageWorker(
            plan=plan,
            rank=rank,
            model=model,
            loss=loss,
            exchange=exchange,
            updater=updater,
            partitions=partitions,
            held=_held_names(plan, groups, partitions, rank) | ruled,
            owned=_owned_groups(spec, updater, rank),
            ruled=ruled,
            rules=rules,
            seed=seed,
            device=device,
        )
    assert isinstance(exchange, Exchange)
    divided = _divided_pieces(plan, spec, updater)
    exchange.divide(divided)
    owned = divided[rank]
    return Replica(
        plan=plan,
        rank=rank,
        model=model,
        loss=loss,
        exchange=exchange,
        updater=updater,
        owned=owned,
        blocks=block_sizes(spec.gradients.extents, spec.gradients.num_shares, owned),
        rules=rules,
        functions=functions,
        seed=seed,
        device=device,
        told_elsewhere=_told_elsewhere(plan, spec, rank),
    )


def _divided_pieces(plan: Plan, spec: ExchangeSpec, updater: Updater | None) -> list[list[Piece]]:
    """The pieces that each rank updates.

    On several hosts, each updates its part of the parameters, and all of those whose factors are
    exchanged.
    """
    if updater is None:
        return [[] for _ in range(plan.num_ranks)]
    extents, num_rows = spec.gradients.extents, spec.gradients.num_shares
    if plan.num_hosts == 1:
        return updater.divide(extents, plan.num_ranks, num_rows)
    everywhere = [number for number, extent in enumerate(extents) if extent.row_elements]
    others = [number for number, extent in enumerate(extents) if not extent.row_elements]
    divided = _renumbered(
        updater.divide([extents[number] for number in others], plan.num_ranks, num_rows), others
    )
    for host in range(plan.num_hosts if everywhere else 0):
        ranks = plan.ranks_of_host(host)
        own = updater.divide([extents[number] for number in everywhere], len(ranks), num_rows)
        for rank, pieces in zip(ranks, _renumbered(own, everywhere), strict=True):
            divided[rank] += pieces
    return [sorted(pieces, key=lambda piece: piece.parameter) for pieces in divided]


def _renumbered(divided: list[list[Piece]], numbers: Sequence[int]) -> list[list[Piece]]:
    """Pieces of some parameters, numbered among all of them."""
    return [
        [replace(piece, parameter=numbers[piece.parameter]) for piece in pieces]
        for pieces in divided
    ]


def _told_elsewhere(plan: Plan, spec: ExchangeSpec, rank: int) -> frozenset[str]:
    """Parameters that all hosts update alike, where host 0 tells of them."""
    if plan.host_of(rank) == 0:
        return frozenset()
    gradients = spec.gradients
    return frozenset(
        tensor.name
        for tensor, limit in zip(gradients.tensors, gradients.row_limits, strict=True)
        if limit
    )


def _divided_groups(
    spec: StageExchangeSpec, updater: Updater | None
) -> list[dict[int, list[Piece]]]:
    """The pieces of each group that each of its ranks updates."""
    if updater is None:
        return [{} for _ in spec.groups]
    return [
        dict(
            zip(
                group.ranks,
                updater.divide(group.gradients.extents, len(group.ranks), len(group.ranks)),
                strict=True,
            )
        )
        for group in spec.groups
    ]


def _owned_groups(spec: StageExchangeSpec, updater: Updater | None, rank: int) -> list[OwnedGroup]:
    divided = _divided_groups(spec, updater)
    return [
        OwnedGroup(number=number, spec=group, pieces=pieces[rank])
        for number, (group, pieces) in enumerate(zip(spec.groups, divided, strict=True))
        if rank in pieces
    ]


def _held_names(
    plan: Plan,
    groups: Sequence[ParameterGroup],
    partitions: Mapping[bool, Partition],
    rank: int,
) -> frozenset[str]:
    """Parameters and buffers that are on a rank."""
    assert plan.pipeline is not None
    parameters = {name for group in groups if rank in group.ranks for name in group.names}
    buffers = {
        name
        for each in partitions.values()
        for stage, part in zip(plan.pipeline.stages, each.parts, strict=True)
        if rank in stage.ranks
        for name in part.buffers
    }
    return frozenset(parameters | buffers)


def _ruled_buffers(
    plan: Plan, model: nn.Module, partitions: Mapping[bool, Partition], rank: int
) -> frozenset[str]:
    """Buffers whose values on this rank are those that count.

    Training changes a buffer in one stage, whose first replica has the values that count, even if
    other stages read it in evaluation. What no stage uses is rank 0's.
    """
    assert plan.pipeline is not None
    rulers: dict[str, int] = {}
    for training in (True, False):
        for stage, part in zip(plan.pipeline.stages, partitions[training].parts, strict=True):
            for name in part.buffers:
                rulers.setdefault(name, stage.ranks[0])
    return frozenset(name for name, _ in model.named_buffers() if rulers.get(name, 0) == rank)
