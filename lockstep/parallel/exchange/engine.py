"""A Plan's engine on one rank: its end of the exchange, and transports to other domains."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

import torch

from lockstep.channel.sealed_channel import Channel
from lockstep.comm.collectives.cross_host_barrier import Crossing, MultiHostBoard
from lockstep.comm.collectives.host_exchange import HostExchange
from lockstep.comm.collectives.reduce_scatter import members_by_domain, pairs
from lockstep.comm.compression.compressed_sums import Residual
from lockstep.comm.exchange import Exchange
from lockstep.comm.exchange_spec import ExchangeSpec
from lockstep.comm.p2p.process_group_p2p import Pair, channel_name
from lockstep.comm.p2p.tcp_p2p import MailChannels
from lockstep.comm.shared_memory.shared_region import SharedRegion
from lockstep.comm.shared_memory.status_board import StatusBoard
from lockstep.comm.transport import Transport
from lockstep.comm.transports.memfd_store import Meeting
from lockstep.comm.transports.process_group import CPU, ProcessGroups
from lockstep.comm.transports.process_group_transport import ProcessGroupTransport
from lockstep.comm.transports.tensor_channels import TensorChannels
from lockstep.parallel.groups import ParameterGroup
from lockstep.plan.engine_kinds import ProcessGroup
from lockstep.plan.program.lowering import stage_graph
from lockstep.plan.spec import Plan

# Two ranks of different hosts, the lower one first, and the use of the channel between them.
ChannelUse = Literal["sums", "mail"]

ChannelKey = tuple[int, int, ChannelUse]


def channel_keys(plan: Plan, groups: Sequence[ParameterGroup]) -> set[ChannelKey]:
    """The channels that a Plan needs."""
    keys: set[ChannelKey] = set()
    for group in groups if plan.engine.shares_memory else ():
        members = members_by_domain(group.ranks, plan.memory_domains)
        keys |= {(low, high, "sums") for low, high in pairs(members)}
    if plan.pipeline is not None:
        degree = plan.tensor_degree
        for place in range(degree):
            graph = stage_graph(plan.pipeline, degree).at(place, degree)
            for one, other in combinations(range(graph.num_stages), 2):
                for low, high in map(sorted, graph.meetings(one, other)):
                    if plan.host_of(low) != plan.host_of(high):
                        keys.add((low, high, "mail"))
    if plan.is_stale:
        keys |= {(worker, server, "mail") for worker, server in remote_workers(plan).items()}
    return keys


def remote_workers(plan: Plan) -> dict[int, int]:
    """Workers on other hosts than the servers, and the server whose process represents each."""
    servers = range(plan.num_ranks - plan.num_servers, plan.num_ranks)
    here = plan.ranks_of_host(plan.host_of(servers[-1]))
    remote = [rank for rank in range(servers.start) if rank not in here]
    return {rank: servers[number % len(servers)] for number, rank in enumerate(remote)}


@dataclass(frozen=True, kw_only=True)
class Neighbours:
    """A rank's connections to other hosts.

    Attributes:
        host: this host.
        names: of other ranks' hosts, for messages.
        channels: this rank's channels for sums, by the rank at the other end.
        mail_channels: likewise for the mail of stages.
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
        """The channels of both uses."""
        return [*self.channels.values(), *self.mail_channels.values()]


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One rank's means to connect to the other ranks of its Plan.

    Attributes:
        plan: the Plan.
        spec: the layout of the memory that its ranks share.
        rank: this rank.
        region: of ``ExchangeSpec.create``; None for a single rank.
        look_around: see ``StatusBoard``.
        device: this rank's.
        neighbours: its connections to other hosts; None without any.
        meeting: the meeting point of ranks of process groups; None without any.
        residuals: see ``Exchange``.
        values: of parameters, from which this rank takes its part; None if it has them.
    """

    plan: Plan
    spec: ExchangeSpec
    rank: int
    region: SharedRegion | None
    look_around: Callable[[float], None]
    device: torch.device = CPU
    neighbours: Neighbours | None = None
    meeting: Meeting | None = None
    residuals: Mapping[str, Residual] | None = None
    values: Mapping[str, torch.Tensor] | None = None

    def exchange(self, groups: ProcessGroups | None = None) -> Exchange:
        """This rank's end of the exchange."""
        plan, spec, rank = self.plan, self.spec, self.rank
        region, neighbours = self.region, self.neighbours
        if region is None:
            return Exchange(spec, None, board=None, rank=rank)
        options: dict[str, Any] = {
            "domains": plan.memory_domains,
            "transports": self._transports(groups),
            "groups": groups,
            "residuals": self.residuals,
            "device": self.device if spec.on_accelerators else None,
        }
        if neighbours is None:
            board = StatusBoard(
                region, rank=rank, num_ranks=plan.num_ranks, look_around=self.look_around
            )
            return Exchange(spec, region, board=board, rank=rank, **options)
        wide_board = MultiHostBoard(
            region,
            rank=rank,
            hosts=plan.hosts,
            look_around=self.look_around,
            crossing=neighbours.crossing,
        )
        return HostExchange(
            spec,
            region,
            board=wide_board,
            hosts=[plan.ranks_of_host(host) for host in range(plan.num_hosts)],
            host=neighbours.host,
            mirrored=neighbours.mirrored,
            **options,
        )

    def process_groups(self, channels: Iterable[Pair] = ()) -> ProcessGroups | None:
        """This rank's process groups, if the Plan has any; ``channels`` connect stages."""
        plan = self.plan
        if not isinstance(plan.engine, ProcessGroup) or self.meeting is None:
            return None
        members: dict[str, Sequence[int]] = {
            _group_name(number): group.ranks
            for number, group in enumerate(self.spec.groups)
            if len(group.ranks) > 1 and group.gradients.tensors
        }
        if plan.tensor_degree > 1:
            members |= {
                _shards_name(number): plan.tensor_ranks(number)
                for number in range(plan.num_ranks // plan.tensor_degree)
            }
        names = {} if self.neighbours is None else self.neighbours.names
        here = plan.ranks_of_host(plan.host_of(self.rank))
        return ProcessGroups(
            {**members, **{channel_name(pair): pair for pair in channels}},
            rank=self.rank,
            backend=plan.engine.backend,
            device=self.device,
            meeting=self.meeting,
            look_around=self.look_around,
            remote_hosts={other: name for other, name in names.items() if other not in here},
            crossing=None if self.neighbours is None else self.neighbours.crossing,
        )

    def tensor_transport(
        self, number: int, groups: ProcessGroups | None
    ) -> ProcessGroupTransport | None:
        """Between ranks that divide layers together; None if they share memory."""
        if groups is None:
            return None
        ranks = self.plan.tensor_ranks(number)
        return ProcessGroupTransport(ranks, _shards_name(number), groups)

    def mail_channels(
        self, look_around: Callable[[float], None] | None = None
    ) -> MailChannels | None:
        """Carries this rank's mail to other hosts, if there are any.

        Args:
            look_around: for a thread, other than the rank's own, that waits for mail.
        """
        one = self.neighbours
        if one is None:
            return None
        look = look_around or self.look_around
        return MailChannels(one.mail_channels, one.names, look, one.timeout_seconds)

    def _transports(self, groups: ProcessGroups | None) -> dict[int, Transport]:
        """By the number of a group, the transport of its tensors between domains."""
        held = {
            number: group.ranks
            for number, group in enumerate(self.spec.groups)
            if self.rank in group.ranks
        }
        if groups is not None:
            return {
                number: ProcessGroupTransport(ranks, _group_name(number), groups)
                for number, ranks in held.items()
            }
        one = self.neighbours
        if one is None:
            return {}
        channels = TensorChannels(one.channels, one.names, self.look_around, one.timeout_seconds)
        return dict.fromkeys(held, channels)


def _shards_name(number: int) -> str:
    return f"shards {number}"


def _group_name(number: int) -> str:
    return f"gradients {number}"
