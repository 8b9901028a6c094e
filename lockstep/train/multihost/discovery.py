"""Finds the hosts of this process's job, from the launcher's variables, and connects to them.

A process keeps its connections from one call to the next.
"""

import atexit
import math
import os

import msgspec
import torch

from lockstep.cluster.devices import discover, processor_name
from lockstep.cluster.environment import find_place
from lockstep.cluster.place import Place, Reach
from lockstep.cluster.topology import Cluster
from lockstep.errors import OptionError
from lockstep.launch.health.heartbeats import Heartbeats
from lockstep.launch.rendezvous.control_group import ControlGroup, HostInfo
from lockstep.launch.rendezvous.host_rendezvous import meet
from lockstep.launch.rendezvous.pair_channels import open_channels
from lockstep.launch.security.secret import find_secret
from lockstep.train.multihost.followers import Follower
from lockstep.train.multihost.hosts import Hosts
from lockstep.version import __version__

_connected: dict[Place, Hosts] = {}


@atexit.register
def _close_all() -> None:
    """At the script's end: tells the other hosts that this one is done, not lost."""
    for hosts in _connected.values():
        if hosts.is_open:
            hosts.close()


def find_hosts(
    timeout_seconds: float,
    reach: Reach = "all hosts",
    meeting_seconds: float = 0.0,
    patience_seconds: float = math.inf,
) -> Hosts | None:
    """The hosts to train with, connected now or before; None if the process trains alone.

    Args:
        timeout_seconds: longest wait for another host.
        reach: how far the strategy's Plans go.
        meeting_seconds: longest wait until all have connected, if longer than ``timeout_seconds``.
        patience_seconds: of that, once enough hosts to go on have connected (``Place.min_hosts``).

    Raises:
        OptionError: the strategy cannot use the other processes of the job.
        HostError: a host does not connect, or differs from this one.
    """
    place = None if reach == "one process" else find_place(os.environ)
    if place is None:
        return None
    _check_reach(place, reach)
    hosts = _connected.get(place)
    if hosts is None or not hosts.is_open:
        control_group = _connect(place, max(timeout_seconds, meeting_seconds), patience_seconds)
        hosts = _connected[place] = Hosts(place, control_group, timeout_seconds)
    hosts.timeout_seconds = timeout_seconds
    return hosts


def _connect(place: Place, timeout_seconds: float, patience_seconds: float) -> ControlGroup:
    secret = None
    if place.num_hosts > 1:
        secret = find_secret(os.environ, is_one_machine=place.is_one_machine)
    control_group = meet(
        place,
        secret,
        local_host_info(place),
        timeout_seconds=timeout_seconds,
        patience_seconds=patience_seconds,
    )
    if control_group.num_hosts == 1:
        return control_group
    try:
        counts = {(0, host): 1 for host in range(1, control_group.num_hosts)}
        channels = open_channels(control_group, counts, timeout_seconds)
        control_group.heartbeats = Heartbeats({host: end for host, (end,) in channels.items()})
    except BaseException:
        control_group.close()
        raise
    return control_group


def local_host_info(place: Place) -> HostInfo:
    """What this host tells the others when they connect."""
    host = discover().hosts[0]
    host = msgspec.structs.replace(
        host,
        num_given=place.devices,
        num_servers=place.num_servers_here,
        arithmetic=_arithmetic(),
    )
    return HostInfo(
        facts={
            "the version of Lockstep": __version__,
            "the version of torch": str(torch.__version__),
        },
        about={"name": host.name, "host": msgspec.json.encode(host).decode()},
    )


def _arithmetic() -> str:
    """Hosts with the same value here compute products with the same bits."""
    return f"{torch.backends.cpu.get_cpu_capability()} {processor_name()}"


def find_follower(timeout_seconds: float, reach: Reach) -> Follower | None:
    """This process, if another process leads its host.

    Args:
        timeout_seconds: longest wait for the leader.
        reach: how far the strategy's Plans go.
    """
    place = find_place(os.environ) if reach in ("roles", "all hosts") else None
    if place is None or place.leads:
        return None
    _check_reach(place, reach)
    return Follower(place, timeout_seconds)


def find_cluster(timeout_seconds: float) -> Cluster:
    """All hosts of this process's job; see ``find_hosts``."""
    hosts = find_hosts(timeout_seconds)
    return discover() if hosts is None else hosts.cluster


def find_num_ranks() -> int | None:
    """Ranks of all hosts, if another process leads this one's host; else None.

    Raises:
        OptionError: the launcher does not give the number.
    """
    place = find_place(os.environ)
    if place is None or place.leads:
        return None
    if place.num_ranks is None:
        raise OptionError(
            "Only the first process of a host knows the number of replicas here: the hosts have "
            "different numbers of processes, and some have one.",
            received=f"process {place.process} of host {place.host}",
            fix=f"Have {place.launcher} start as many processes on each host.",
        )
    return place.num_ranks


def _check_reach(place: Place, reach: Reach) -> None:
    """Refuse processes that a strategy cannot use.

    Args:
        place: the launcher's description of the job.
        reach: how far the strategy's Plans go.

    Raises:
        OptionError: there are some.
    """
    if reach == "one host":
        raise _unused_processes(place)
    if reach == "roles" and place.num_processes > 1 and not place.num_servers:
        raise OptionError(
            "ParameterServerStrategy cannot tell which processes of this host are servers.",
            received=f"{place.launcher} with {place.num_processes}, and none of the role 'ps'",
            fix="Set TF_CONFIG with 'ps' in its cluster, or start the script once on each host: it "
            "starts its workers and servers itself.",
        )
    if reach == "roles" and place.min_hosts is not None:
        raise OptionError(
            "Workers and parameter servers need all hosts.",
            received=f"a job that may go on with {place.min_hosts} of {place.num_hosts}",
            fix="Leave --min-hosts (LOCKSTEP_MIN_HOSTS) out.",
        )
    if reach != "roles" and place.num_servers:
        raise OptionError(
            "Only ParameterServerStrategy uses parameter servers.",
            received=f"{place.launcher} with {place.num_servers} of the role 'ps'",
            fix="Use ParameterServerStrategy, or leave 'ps' out.",
        )


def _unused_processes(place: Place) -> OptionError:
    kind = "hosts" if place.num_hosts > 1 else "processes"
    number = place.num_hosts if place.num_hosts > 1 else place.num_processes
    return OptionError(
        f"This strategy trains on one host with one script. {place.launcher} has started others, "
        "and each would train a model of its own.",
        received=f"{number} {kind}",
        fix="Use MultiWorkerMirroredStrategy, or start the script once.",
    )
