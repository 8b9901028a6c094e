"""Whether a strategy has a use for all the processes that a launcher has started."""

from lockstep.cluster.place import Place, Reach
from lockstep.errors import OptionError


def check_reach(place: Place, reach: Reach) -> None:
    """Refuse processes of which a strategy knows nothing.

    Args:
        place: what the launcher says.
        reach: how far the strategy's Plans go.

    Raises:
        OptionError: there are some.
    """
    if reach == "one host":
        raise _strangers(place)
    if reach == "roles" and place.num_processes > 1 and not place.num_servers:
        raise OptionError(
            "Of several processes of a host ParameterServerStrategy must know which are servers.",
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
            "Only ParameterServerStrategy has a use for parameter servers.",
            received=f"{place.launcher} with {place.num_servers} of the role 'ps'",
            fix="Use ParameterServerStrategy, or leave 'ps' out.",
        )


def _strangers(place: Place) -> OptionError:
    kind = "hosts" if place.num_hosts > 1 else "processes"
    number = place.num_hosts if place.num_hosts > 1 else place.num_processes
    return OptionError(
        f"This strategy trains on one host with one script, and {place.launcher} says that "
        "there are others, which would all train for themselves.",
        received=f"{number} {kind}",
        fix="Use MultiWorkerMirroredStrategy, or start the script once.",
    )
