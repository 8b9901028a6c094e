"""Data parallelism with parameter servers, synchronous to asynchronous by ``staleness``."""

import os

from lockstep.cluster.devices import discover
from lockstep.cluster.environment import find_devices, find_place, find_servers
from lockstep.cluster.place import Reach
from lockstep.errors import OptionError, Problems
from lockstep.options import check_count, check_timeout, is_count
from lockstep.plan.decision import ServedUpdate
from lockstep.plan.devices import device_names
from lockstep.plan.makers.data_parallel import Maker
from lockstep.plan.makers.many_hosts import MirroredHosts
from lockstep.plan.makers.parameter_servers import Served
from lockstep.strategies.base import Strategy
from lockstep.strategies.mirrored import check_format
from lockstep.strategies.multi_worker import num_replicas
from lockstep.tracebacks import public_methods


@public_methods
class ParameterServerStrategy(Strategy):
    """Servers own the parameters and update them; workers compute gradients.

    With ``staleness=0`` all workers train on shares of one batch and wait for its update: the
    result is that of one device. Otherwise a worker that is done takes the next part at once, of
    this batch or the next, so that none waits for a slow one; every batch is still one update, with
    the gradients of all its samples. Ho et al., More Effective Distributed ML via a Stale
    Synchronous Parallel Parameter Server (2013).

    Args:
        servers: processes that each update a part of the parameters; None is the number of
            ``lockstep run --servers``, or 1. With several hosts they are on the last; under a
            ``TF_CONFIG`` they are its tasks "ps".
        workers: processes of each host that compute, including the script's own; None is the
            launcher's number, or else one per usable core, at most 8. Under a ``TF_CONFIG`` with
            "ps" both are the numbers of its tasks: the script is started for each.
        staleness: by how many steps a worker may be ahead of the oldest batch that is not in the
            weights yet. 0 is synchronous; None is unbounded.
        replicas: copies of a server's parameters and slots, 1 or 2. With 2 training survives the
            death of a server, for any ``fit(restarts=)``.
        channels_last: see ``MirroredStrategy``.
        timeout_seconds: longest wait for another process; a longer one is an error.

    Raises:
        OptionError: an invalid argument.
        DeviceError: more workers than this host can hold.
    """

    reach: Reach = "roles"

    def __init__(
        self,
        servers: int | None = None,
        workers: int | None = None,
        staleness: int | None = 0,
        *,
        replicas: int = 1,
        channels_last: bool | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        problems = Problems()
        check_count("servers", servers, problems, optional=True)
        fix = "Use workers=2, or leave it out for one per core."
        check_count("workers", workers, problems, optional=True, fix=fix)
        fix = "Use 0 to train synchronously, 4 for a bound, or None for none."
        check_count("staleness", staleness, problems, least=0, optional=True, fix=fix)
        _check_replicas(problems, replicas)
        check_format(problems, channels_last)
        check_timeout(problems, timeout_seconds)
        problems.raise_if_any(OptionError)
        self.workers, self.servers = _numbers(workers, servers)
        self.staleness = staleness
        self.timeout_seconds = timeout_seconds
        self._maker = Served(
            workers=MirroredHosts(devices_per_host=self.workers, channels_last=channels_last),
            update=ServedUpdate(servers=self.servers, staleness=staleness, replicas=replicas),
        )
        device_names(self.workers, discover().cores.hosts[0])

    def maker(self, precision: str = "fp32") -> Maker:
        return self._maker.in_precision(precision)

    @property
    def num_replicas_in_sync(self) -> int:
        """Workers of all hosts; see ``MultiWorkerMirroredStrategy``."""
        place = find_place(os.environ)
        if place is None:
            return len(device_names(self.workers, discover().cores.hosts[0]))
        if place.num_servers and place.num_ranks is not None:
            return place.num_ranks - place.num_servers
        return num_replicas(self._maker.workers, self.timeout_seconds, on_cores=True)


def _numbers(workers: int | None, servers: int | None) -> tuple[int | None, int]:
    """The numbers of workers and servers, from arguments or the launcher.

    Raises:
        OptionError: arguments and launcher contradict each other.
    """
    place = find_place(os.environ)
    if place is None or place.num_ranks is None or not place.num_servers:
        if workers is None and place is None:
            workers = find_devices(os.environ)
        servers = servers or find_servers(os.environ)
        if servers is None and place is not None and place.launcher == "TF_CONFIG":
            raise OptionError(
                "ParameterServerStrategy cannot tell which processes are servers.",
                received=f"{place.launcher} with none of the role 'ps'",
                fix="Set TF_CONFIG with 'ps' in its cluster; or use servers=1: then each task is "
                "a host that starts its workers itself, and the last one the servers as well.",
            )
        return workers, servers or 1
    given = place.num_ranks - place.num_servers, place.num_servers
    if (workers or given[0], servers or given[1]) != given:
        raise OptionError(
            f"Under {place.launcher} each worker and each server is a task of its own.",
            received=f"workers={workers}, servers={servers} with {given[0]} and {given[1]} tasks",
            fix="Leave `workers` and `servers` out.",
        )
    return (given[0] if place.num_hosts == 1 else None), given[1]


def _check_replicas(problems: Problems, replicas: object) -> None:
    if not is_count(replicas) or replicas not in (1, 2):
        problems.add(
            "`replicas` must be 1 or 2: servers keep parameters in this host's memory.",
            received=f"replicas={replicas!r}",
            fix="Use 2 to outlive the death of a server, or leave it out.",
        )
