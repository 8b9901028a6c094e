"""From a Plan to this rank's Worker.

What ranks share is laid out first, the same for all: an ``ExchangeSpec``. From it, and the memory
made after it, each rank builds its own end. A Plan without stages is one with a single stage that
every rank holds, so that all parameters are in one group.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any, Literal

import torch
from torch import nn

from lockstep.channel.channel import Channel
from lockstep.comm.board import Board
from lockstep.comm.domain_sums import members_by_domain, pairs
from lockstep.comm.exchange import Exchange, ExchangeSpec, GroupSpec
from lockstep.comm.gradient_rows import GradientSpec
from lockstep.comm.gradients import TensorSpec
from lockstep.comm.host_exchange import HostExchange
from lockstep.comm.mail_channels import MailChannels
from lockstep.comm.meeting_point import MeetingPoint
from lockstep.comm.process_group import ProcessGroupTransport
from lockstep.comm.shared_memory import SharedRegion
from lockstep.comm.tensor_channels import TensorChannels
from lockstep.comm.transport import Transport
from lockstep.comm.wide_board import Crossing, WideBoard
from lockstep.parallel.batch_norm import BatchNorms
from lockstep.parallel.gradient_rules import GradientRules
from lockstep.parallel.groups import ParameterGroup
from lockstep.parallel.losses import LossAdapter
from lockstep.parallel.model_passes import ModelPasses
from lockstep.parallel.owned_group import OwnedGroup
from lockstep.parallel.partition import Partition
from lockstep.parallel.passes import Passes
from lockstep.parallel.stage_mail import MailSpec, StageMail, mail_spec
from lockstep.parallel.stage_passes import StagePasses
from lockstep.parallel.step_functions import StepFunction
from lockstep.parallel.store import tensor_spec
from lockstep.parallel.update import Updater
from lockstep.parallel.worker import Worker
from lockstep.plan.decision import LocalUpdate, ProcessGroup, SharedMemory
from lockstep.plan.layout import Piece, block_sizes
from lockstep.plan.lowering import lower_train
from lockstep.plan.prediction import stage_graph
from lockstep.plan.program import Backward, BackwardInput, BackwardWeight, Forward, RankProgram
from lockstep.plan.spec import Plan

# Messages of one kind in use at once in evaluation: the sender may be so far ahead.
_SLOTS_IN_EVALUATION = 3
# Of a share's outputs that go at once, in float64.
_OUTPUT_ELEMENTS = 1 << 15


def exchange_spec(
    plan: Plan,
    model: nn.Module,
    updater: Updater | None,
    groups: Sequence[ParameterGroup],
    partitions: Mapping[bool, Partition],
    loss: LossAdapter | None = None,
) -> ExchangeSpec:
    """The layout of what ranks share: known before any process starts.

    Args:
        plan: the Plan.
        model: the model.
        updater: the optimizer; None where nothing is trained.
        groups: the parameters, by the ranks that have them.
        partitions: of the model in stages, by whether it is in training.
        loss: the loss, adapted.
    """
    trained = {
        name: tensor_spec(name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and updater is not None
    }
    limits = {f"{layer.name}.weight".lstrip("."): layer.row_limit for layer in plan.layers}
    if updater is None or not updater.is_elementwise:
        limits = {}
    group_specs = tuple(
        _group_spec(plan, group, [trained[name] for name in group.names if name in trained], limits)
        for group in groups
    )
    if plan.pipeline is None:
        return ExchangeSpec(
            num_ranks=plan.num_ranks,
            share_ranks=tuple(map(plan.replica_of, range(plan.num_shares))),
            groups=group_specs,
            row_capacity=_row_capacity(plan, model, loss),
        )
    graph = stage_graph(plan.pipeline)
    last_stage = len(plan.pipeline.stages) - 1
    return ExchangeSpec(
        num_ranks=plan.num_ranks,
        share_ranks=tuple(graph.rank_of(last_stage, share) for share in range(plan.num_shares)),
        groups=group_specs,
        row_capacity=_row_capacity(plan, model, loss),
        mail_bytes=tuple(spec.num_bytes for spec in _mail_specs(plan, partitions, loss).values()),
    )


def _row_capacity(plan: Plan, model: nn.Module, loss: LossAdapter | None) -> int:
    """The longest row that a share may offer: statistics, weights of losses, part of outputs."""
    longest = 0 if plan.pipeline is not None else BatchNorms(model).row_length
    if loss is None:
        return longest
    return max(longest, len(loss.parts.factors), 0 if loss.is_certain else _OUTPUT_ELEMENTS)


def _group_spec(
    plan: Plan,
    group: ParameterGroup,
    tensors: Sequence[TensorSpec],
    limits: Mapping[str, int],
) -> GroupSpec:
    """A row for every few shares, or for each rank of a stage; none where a rank is alone."""
    row_ranks: tuple[int, ...] = ()
    per_row = 0 if plan.pipeline is not None else plan.shares_per_row
    if plan.pipeline is None and not isinstance(plan.update, LocalUpdate):
        row_ranks = tuple(map(plan.replica_of, range(0, plan.num_shares, per_row)))
    elif len(group.ranks) > 1:
        row_ranks = group.ranks
    return GroupSpec(
        ranks=group.ranks,
        row_ranks=row_ranks,
        shares_per_row=per_row,
        gradients=GradientSpec(
            num_shares=max(len(row_ranks), 1),
            tensors=tuple(tensors),
            row_limits=tuple(
                limits.get(tensor.name, 0) if row_ranks and per_row and _has_rows(tensor) else 0
                for tensor in tensors
            ),
        ),
    )


def _has_rows(spec: TensorSpec) -> bool:
    """Whether a weight lies in memory row by row."""
    return len(spec.shape) == 2 and spec.stride == (spec.shape[1], 1)


def _mail_specs(
    plan: Plan, partitions: Mapping[bool, Partition], loss: LossAdapter | None
) -> dict[bool, MailSpec]:
    """The mailboxes of stages, by whether the model is in training."""
    assert plan.pipeline is not None
    graph = stage_graph(plan.pipeline)
    is_certain = loss is None or loss.is_certain  # else all may go forward before one goes backward
    in_training = _slots_in_training(plan) if is_certain else plan.num_shares
    slots = {True: in_training, False: _SLOTS_IN_EVALUATION}
    return {
        training: mail_spec(graph, partition, slots[training], training=training)
        for training, partition in partitions.items()
    }


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
ChannelUse = Literal["sums", "mail"]
ChannelKey = tuple[int, int, ChannelUse]


def channel_keys(plan: Plan, groups: Sequence[ParameterGroup]) -> set[ChannelKey]:
    """The channels that a Plan needs."""
    keys: set[ChannelKey] = set()
    for group in groups if isinstance(plan.engine, SharedMemory) else ():
        members = members_by_domain(group.ranks, plan.domains)
        keys |= {(low, high, "sums") for low, high in pairs(members)}
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
        channels: this rank's for sums, by the rank at the other end.
        mail_channels: likewise for what stages send.
        crossing: to the other hosts' leaders; None unless this rank leads its host.
        mirrored: see ``HostExchange``.
        timeout_seconds: longest wait for another host.
    """

    host: int
    names: Mapping[int, str]
    channels: Mapping[int, Channel]
    mail_channels: Mapping[int, Channel]
    crossing: Crossing | None
    mirrored: Sequence[torch.Tensor]
    timeout_seconds: float

    @property
    def all_channels(self) -> list[Channel]:
        """Whatever they are for."""
        return [*self.channels.values(), *self.mail_channels.values()]


def build_exchange(
    plan: Plan,
    spec: ExchangeSpec,
    region: SharedRegion | None,
    *,
    rank: int,
    look_around: Callable[[float], None],
    neighbours: Neighbours | None = None,
    meeting_point: str = "",
) -> Exchange:
    """This rank's end of what the Plan's ranks share."""
    if region is None:
        return Exchange(spec, None, board=None, rank=rank)
    transports = _transports(plan, spec, rank, look_around, neighbours, meeting_point)
    if neighbours is None:
        board = Board(region, rank=rank, num_ranks=plan.num_ranks, look_around=look_around)
        return Exchange(
            spec, region, board=board, rank=rank, domains=plan.domains, transports=transports
        )
    return HostExchange(
        spec,
        region,
        board=WideBoard(
            region,
            rank=rank,
            hosts=plan.hosts,
            look_around=look_around,
            crossing=neighbours.crossing,
        ),
        hosts=[plan.ranks_of_host(host) for host in range(plan.num_hosts)],
        host=neighbours.host,
        domains=plan.domains,
        transports=transports,
        mirrored=neighbours.mirrored,
    )


def meeting_point_for(plan: Plan) -> MeetingPoint | None:
    """Where the ranks of a Plan's process group find each other, if it has one."""
    return MeetingPoint() if isinstance(plan.engine, ProcessGroup) else None


def _transports(
    plan: Plan,
    spec: ExchangeSpec,
    rank: int,
    look_around: Callable[[float], None],
    neighbours: Neighbours | None,
    meeting_point: str,
) -> dict[int, Transport]:
    """By the number of a group: what moves its tensors between domains."""
    numbers = [number for number, group in enumerate(spec.groups) if rank in group.ranks]
    match plan.engine:
        case ProcessGroup(backend=backend):
            return {
                number: ProcessGroupTransport(
                    spec.groups[number].ranks,
                    rank=rank,
                    name=f"group {number}",
                    backend=backend,
                    meeting_point=meeting_point,
                    look_around=look_around,
                )
                for number in numbers
            }
        case _ if neighbours is None:
            return {}
        case _:
            channels = TensorChannels(
                neighbours.channels, neighbours.names, look_around, neighbours.timeout_seconds
            )
            return dict.fromkeys(numbers, channels)


def build_worker(
    plan: Plan,
    spec: ExchangeSpec,
    region: SharedRegion | None,
    *,
    rank: int,
    model: nn.Module,
    loss: LossAdapter | None,
    updater: Updater | None,
    groups: Sequence[ParameterGroup],
    partitions: Mapping[bool, Partition],
    rules: GradientRules,
    functions: Sequence[StepFunction],
    seed: int,
    device: torch.device,
    look_around: Callable[[float], None],
    neighbours: Neighbours | None = None,
    meeting_point: str = "",
) -> Worker:
    """Put a rank's parts together.

    Args:
        plan: the Plan.
        spec: the layout of what ranks share, and
        region: where it lies; None where one rank is alone.
        rank: this rank.
        model: this rank's model; its parameters may lie in memory shared with other ranks.
        loss: the loss, adapted; None where only predictions are asked for.
        updater: the optimizer; None where nothing is trained.
        groups: the parameters, by the ranks that have them.
        partitions: of the model in stages, by whether it is in training.
        rules: for gradients.
        functions: the user's own training steps, in the order of their turns, if there are any.
        seed: of all random streams.
        device: where the model is.
        look_around: see ``Board``.
        neighbours: what this rank has of other hosts, where there are several.
        meeting_point: see ``ProcessGroupTransport``.
    """
    exchange = build_exchange(
        plan,
        spec,
        region,
        rank=rank,
        look_around=look_around,
        neighbours=neighbours,
        meeting_point=meeting_point,
    )
    divided = [_divided_pieces(plan, group, updater) for group in spec.groups]
    for number, gradients in exchange.gradients.items():
        gradients.divide(divided[number])
    owned = _owned_groups(plan, spec, model, divided, rank)
    options: dict[str, Any] = {
        "plan": plan,
        "rank": rank,
        "model": model,
        "loss": loss,
        "exchange": exchange,
        "trainable": [member for group in owned for member in group.members],
        "rules": rules,
        "seed": seed,
        "device": device,
    }
    passes: Passes
    if plan.pipeline is None:
        passes = ModelPasses(group=spec.groups[0], functions=functions, **options)
        ruled = frozenset(name for name, _ in model.named_buffers() if rank == 0)
        held = None
    else:
        mail_channels = _mail_channels(neighbours, look_around)
        passes = StagePasses(
            stages=plan.pipeline.stages,
            partitions=partitions,
            mail=_open_mail(plan, spec, partitions, loss, exchange, region, mail_channels),
            mail_channels=mail_channels,
            groups=owned,
            **options,
        )
        ruled = _ruled_buffers(plan, model, partitions, rank)
        held = _held_names(plan, groups, partitions, rank) | ruled
    return Worker(
        plan=plan,
        rank=rank,
        model=model,
        exchange=exchange,
        passes=passes,
        updater=updater,
        groups=owned,
        rules=rules,
        told_elsewhere=_told_elsewhere(plan, spec, rank),
        held=held,
        ruled=ruled,
    )


def _mail_channels(
    neighbours: Neighbours | None, look_around: Callable[[float], None]
) -> MailChannels | None:
    """Carries this rank's mail to other hosts, if there are any."""
    if neighbours is None:
        return None
    return MailChannels(neighbours.mail_channels, neighbours.names, look_around)


def _open_mail(
    plan: Plan,
    spec: ExchangeSpec,
    partitions: Mapping[bool, Partition],
    loss: LossAdapter | None,
    exchange: Exchange,
    region: SharedRegion | None,
    mail_channels: MailChannels | None,
) -> dict[bool, StageMail]:
    """This rank's view of the mailboxes, by whether the model is in training."""
    assert region is not None
    assert exchange.board is not None
    opened: dict[bool, StageMail] = {}
    first_box = 0
    specs = _mail_specs(plan, partitions, loss)
    for (training, mail), offset in zip(specs.items(), spec.mail_offsets, strict=True):
        opened[training] = StageMail(
            mail,
            region,
            offset,
            exchange.board,
            ranks_here=exchange.ranks_here,
            mail_channels=mail_channels,
            first_box=first_box,
        )
        first_box += len(mail.boxes)
    return opened


def _divided_pieces(
    plan: Plan, group: GroupSpec, updater: Updater | None
) -> dict[int, list[Piece]]:
    """The pieces of a group that each of its ranks updates.

    Of several domains, each updates its part of the parameters, and all of those whose factors are
    exchanged.
    """
    if updater is None:
        return {rank: [] for rank in group.ranks}
    extents, num_rows = group.gradients.extents, group.gradients.num_shares
    everywhere = [number for number, extent in enumerate(extents) if extent.row_elements]
    if len(plan.domains) == 1 or not everywhere:
        return dict(
            zip(group.ranks, updater.divide(extents, len(group.ranks), num_rows), strict=True)
        )
    others = [number for number, extent in enumerate(extents) if not extent.row_elements]
    divided = _renumbered(
        updater.divide([extents[number] for number in others], len(group.ranks), num_rows), others
    )
    for ranks in plan.domains:
        own = updater.divide([extents[number] for number in everywhere], len(ranks), num_rows)
        for rank, pieces in zip(ranks, _renumbered(own, everywhere), strict=True):
            divided[rank] += pieces
    return {
        rank: sorted(pieces, key=lambda piece: piece.parameter)
        for rank, pieces in zip(group.ranks, divided, strict=True)
    }


def _renumbered(divided: list[list[Piece]], numbers: Sequence[int]) -> list[list[Piece]]:
    """Pieces of some parameters, numbered among all of them."""
    return [
        [replace(piece, parameter=numbers[piece.parameter]) for piece in pieces]
        for pieces in divided
    ]


def _owned_groups(
    plan: Plan,
    spec: ExchangeSpec,
    model: nn.Module,
    divided: Sequence[Mapping[int, Sequence[Piece]]],
    rank: int,
) -> list[OwnedGroup]:
    """The groups that a rank holds."""
    parameters = dict(model.named_parameters())
    return [
        OwnedGroup(
            number=number,
            spec=group,
            members=[parameters[tensor.name] for tensor in group.gradients.tensors],
            pieces=pieces[rank],
            blocks=block_sizes(group.gradients.extents, group.gradients.num_shares, pieces[rank]),
            is_scattered=len(members_by_domain(group.ranks, plan.domains)) > 1,
        )
        for number, (group, pieces) in enumerate(zip(spec.groups, divided, strict=True))
        if rank in group.ranks
    ]


def _told_elsewhere(plan: Plan, spec: ExchangeSpec, rank: int) -> frozenset[str]:
    """Parameters that all domains update alike, where the first tells of them."""
    if rank in plan.domains[0]:
        return frozenset()
    return frozenset(
        tensor.name
        for group in spec.groups
        for tensor, limit in zip(group.gradients.tensors, group.gradients.row_limits, strict=True)
        if limit
    )


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
