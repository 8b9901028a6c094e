"""How many of a Plan's ranks each host gets, where their number does not follow from the hosts."""

from lockstep.cluster.topology import MAX_CPU_REPLICAS_PER_CORE, Cluster
from lockstep.errors import DeviceError
from lockstep.plan.shares import share_bounds


def ranks_per_host(num_ranks: int, cluster: Cluster) -> tuple[int, ...]:
    """Consecutive ranks for each host: as launchers give them, else as many on each.

    Raises:
        DeviceError: a host would have none, or more than it can hold.
    """
    given = [host.num_given for host in cluster.hosts]
    counts = tuple(count for count in given if count is not None)
    if len(cluster.hosts) == 1 or len(counts) < len(given) or sum(counts) != num_ranks:
        counts = tuple(stop - start for start, stop in share_bounds(num_ranks, len(given)))
    if min(counts) == 0:
        raise DeviceError(
            "Every host must have a rank.",
            received=f"a plan for {num_ranks} devices on {len(counts)} hosts",
            fix="Use more stages or replicas, or fewer hosts.",
        )
    for host, count in zip(cluster.hosts, counts, strict=True):
        most = host.num_cores * MAX_CPU_REPLICAS_PER_CORE
        if count > most:
            which = "This host" if len(counts) == 1 else f"Host {host.name}"
            raise DeviceError(
                f"{which} has {host.num_cores} usable cores, enough for {most} processes.",
                received=f"a plan for {count}",
                fix="Use fewer stages or replicas.",
            )
    return counts
