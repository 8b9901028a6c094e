"""Wired hosts: the wires that a call has to other hosts, and what goes over them at its end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.channel.channel import Channel
from lockstep.parallel.build import WireKey, wire_keys
from lockstep.train.assignment import Assignment
from lockstep.train.hosts import Hosts
from lockstep.train.serving import Abroad
from lockstep.train.stores import Mapped


@dataclass(frozen=True, kw_only=True)
class Wired:
    """Other hosts, with wires to them.

    Attributes:
        hosts: all hosts.
        abroad: what this host's ranks are told of them.
        channels: this host's wires, by the ranks at this end and at the other, and by their use.
    """

    hosts: Hosts
    abroad: Abroad
    channels: Mapping[WireKey, Channel]

    @classmethod
    def of(
        cls, hosts: Hosts | None, assignment: Assignment, timeout_seconds: float
    ) -> "Wired | None":
        """Have the wires that a Plan needs, if it has several hosts."""
        plan, groups = assignment.plan, assignment.groups
        if hosts is None or plan.num_hosts == 1:
            return None
        channels = hosts.open_wires(plan, wire_keys(plan, groups), timeout_seconds)
        names = {rank: hosts.names[plan.host_of(rank)] for rank in range(plan.num_ranks)}
        abroad = Abroad(
            host=hosts.host,
            names=names,
            wires={key: channel.keys for key, channel in channels.items()},
            timeout_seconds=timeout_seconds,
        )
        return cls(hosts=hosts, abroad=abroad, channels=channels)


def bring_groups(wired: Wired, assignment: Assignment, stores: Sequence[Mapped]) -> None:
    """Have every host know the parameters and slots that it has no rank for."""
    plan = assignment.plan
    for ranks, store in stores:
        having = {plan.host_of(rank) for rank in ranks}
        if len(having) < plan.num_hosts:
            is_here = wired.hosts.host in having
            wired.hosts.bring(store.region, min(having), is_here=is_here)
