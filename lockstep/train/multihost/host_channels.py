"""The connections of a call beside shared memory: channels to other hosts, process groups."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from lockstep.channel.sealed_channel import Channel
from lockstep.comm.transports.memfd_store import MeetingPoint
from lockstep.parallel.exchange.engine import ChannelKey, Neighbours, channel_keys
from lockstep.parallel.groups import ParameterGroup
from lockstep.plan.spec import Plan
from lockstep.train.multihost.hosts import Hosts
from lockstep.train.runtime.assignment import Assignment
from lockstep.train.runtime.helper_session import Connections
from lockstep.train.runtime.stores import Mapped

# The address at which ranks of one host reach each other.
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class HostChannels:
    """The connections of a host's ranks in one call, as its leader has made them.

    Attributes:
        hosts: all hosts; None if the Plan has one.
        channels: this host's channels, by the ranks at this end and at the other, and by their use.
        meeting_point: the store at which ranks of process groups meet; None without such groups.
        connections: the description of all these that this host's ranks get.
    """

    hosts: Hosts | None
    channels: Mapping[ChannelKey, Channel]
    meeting_point: MeetingPoint | None
    connections: Connections

    @classmethod
    def of(
        cls,
        hosts: Hosts | None,
        plan: Plan,
        groups: Sequence[ParameterGroup],
        timeout_seconds: float,
        *,
        reuses: bool = True,
    ) -> "HostChannels":
        """Make the connections that a Plan needs.

        Args:
            hosts: all hosts; None for a job of one.
            plan: the Plan.
            groups: the parameters, by the ranks that have them.
            timeout_seconds: longest wait for another host.
            reuses: reuse the channels of the last call; else the caller owns the channels.
        """
        host, address = 0, _LOOPBACK
        names: Mapping[int, str] = {}
        channels: Mapping[ChannelKey, Channel] = {}
        if hosts is None or plan.num_hosts == 1:
            hosts = None
        else:
            host, address = hosts.host, hosts.address
            names = {rank: hosts.names[plan.host_of(rank)] for rank in range(plan.num_ranks)}
            opened = hosts.open_channels if reuses else hosts.new_channels
            channels = opened(plan, sorted(channel_keys(plan, groups)), timeout_seconds)
        point = None
        if not plan.engine.shares_memory:
            point = MeetingPoint(
                address=address,
                num_ranks=len(plan.ranks_of_host(host)),
                timeout_seconds=timeout_seconds,
            )
        connections = Connections(
            host=host,
            names=names,
            channels={key: channel.keys for key, channel in channels.items()},
            timeout_seconds=timeout_seconds,
            meeting=None if point is None else point.meeting,
        )
        return cls(hosts=hosts, channels=channels, meeting_point=point, connections=connections)

    @property
    def descriptors(self) -> list[int]:
        """The channels', in their order."""
        return [end.fileno() for end in self.channels.values()]

    def neighbours(
        self, rank: int, mirrored: Sequence[torch.Tensor], look_around: Callable[[float], None]
    ) -> Neighbours | None:
        """The neighbours on other hosts of a rank of this process; see ``Connections``."""
        if self.hosts is None:
            return None
        own = [end for (low, _, _), end in self.channels.items() if low == rank]
        return self.connections.neighbours(rank, own, mirrored, self.hosts.crossing(look_around))


def bring_groups(hosts: Hosts, assignment: Assignment, stores: Sequence[Mapped]) -> None:
    """Copy parameters and slots to the hosts that have no rank for them."""
    plan = assignment.plan
    for mapped in stores:
        having = {plan.host_of(rank) for rank in mapped.ranks}
        if len(having) < plan.num_hosts:
            hosts.broadcast_region(
                mapped.store.region, min(having), is_current=hosts.host in having
            )
