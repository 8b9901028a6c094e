"""The channels of a call to other hosts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from lockstep.channel.sealed_channel import Channel
from lockstep.comm.transports.memfd_store import MeetingPoint
from lockstep.parallel.exchange.engine import (
    ChannelKey,
    Neighbours,
    channel_keys,
)
from lockstep.parallel.groups import ParameterGroup
from lockstep.plan.spec import Plan
from lockstep.train.multihost.hosts import Hosts
from lockstep.train.runtime.assignment import Assignment
from lockstep.train.runtime.serving import RemoteHosts
from lockstep.train.runtime.stores import Mapped

# The address at which ranks of one host reach each other.
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class HostChannels:
    """Other hosts, with channels to them.

    Attributes:
        hosts: all hosts.
        remote_hosts: the description of the other hosts that this host's ranks get.
        channels: this host's channels, by the ranks at this end and at the other, and by their use.
    """

    hosts: Hosts
    remote_hosts: RemoteHosts
    channels: Mapping[ChannelKey, Channel]

    @classmethod
    def of(
        cls,
        hosts: Hosts | None,
        plan: Plan,
        groups: Sequence[ParameterGroup],
        timeout_seconds: float,
        *,
        reuses: bool = True,
    ) -> "HostChannels | None":
        """Open the channels that a Plan needs, if it has several hosts.

        Args:
            hosts: all hosts; None for a job of one.
            plan: the Plan.
            groups: the parameters, by the ranks that have them.
            timeout_seconds: longest wait for another host.
            reuses: reuse the channels of the last call; else the caller owns the channels.
        """
        if hosts is None or plan.num_hosts == 1:
            return None
        opened = hosts.open_channels if reuses else hosts.new_channels
        channels = opened(plan, sorted(channel_keys(plan, groups)), timeout_seconds)
        names = {rank: hosts.names[plan.host_of(rank)] for rank in range(plan.num_ranks)}
        remote_hosts = RemoteHosts(
            host=hosts.host,
            names=names,
            channels={key: channel.keys for key, channel in channels.items()},
            timeout_seconds=timeout_seconds,
        )
        return cls(hosts=hosts, remote_hosts=remote_hosts, channels=channels)

    def neighbours(
        self, rank: int, mirrored: Sequence[torch.Tensor], look_around: Callable[[float], None]
    ) -> Neighbours:
        """The neighbours on other hosts of a rank of this process; see ``RemoteHosts``."""
        own = [end for (low, _, _), end in self.channels.items() if low == rank]
        return self.remote_hosts.neighbours(rank, own, mirrored, self.hosts.crossing(look_around))


def meeting_point_of(
    plan: Plan, connected: HostChannels | None, timeout_seconds: float
) -> MeetingPoint | None:
    """The store at which ranks of a Plan's process groups meet; None if it has no such groups."""
    if plan.engine.shares_memory:
        return None
    return MeetingPoint(
        address=_LOOPBACK if connected is None else connected.hosts.address,
        num_ranks=len(plan.ranks_of_host(0 if connected is None else connected.hosts.host)),
        timeout_seconds=timeout_seconds,
    )


def bring_groups(connected: HostChannels, assignment: Assignment, stores: Sequence[Mapped]) -> None:
    """Copy parameters and slots to the hosts that have no rank for them."""
    plan = assignment.plan
    for mapped in stores:
        having = {plan.host_of(rank) for rank in mapped.ranks}
        if len(having) < plan.num_hosts:
            is_current = connected.hosts.host in having
            connected.hosts.broadcast_region(
                mapped.store.region, min(having), is_current=is_current
            )
