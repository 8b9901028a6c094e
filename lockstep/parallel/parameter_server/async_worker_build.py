"""From a Plan with parameter servers that are not synchronous to this rank's Worker."""

from functools import partial
from typing import Any

from lockstep.channel.polling import wait_on
from lockstep.parallel.build import build_worker, divided_pieces
from lockstep.parallel.exchange.engine import Endpoint, remote_workers
from lockstep.parallel.local_sgd.local_worker import build_inner_worker
from lockstep.parallel.parameter_server.async_worker import AsyncWorker
from lockstep.parallel.parameter_server.push_pull import Pusher
from lockstep.parallel.parameter_server.remote_worker import RemoteWorker
from lockstep.parallel.worker import Worker
from lockstep.parallel.workload import Workload


def build_served_worker(work: Workload, endpoint: Endpoint) -> Worker:
    """The Worker of a worker or a server; for the arguments see ``build_worker``."""
    plan, spec, rank = work.plan, endpoint.spec, endpoint.rank
    is_server = plan.is_server(rank)
    assert endpoint.region is not None
    pieces = divided_pieces(plan, spec.groups[0], work.updater)
    options: dict[str, Any] = {
        "region": endpoint.region,
        "offsets": spec.mail_offsets,
        "served": [own for owner, own in pieces.items() if plan.is_server(owner)],
        "inner": None if is_server else build_inner_worker(work, endpoint, Pusher()),
    }
    proxies = remote_workers(plan)
    if rank in proxies:
        server = proxies[rank]
        options |= {"server": server, "mail": endpoint.mail_channels()}
        return build_worker(work, endpoint, partial(RemoteWorker, **options))
    remote = [worker for worker, server in proxies.items() if server == rank]
    # The proxies watch for failures themselves.
    mail = endpoint.mail_channels(wait_on) if remote else None
    return build_worker(work, endpoint, partial(AsyncWorker, remote=remote, mail=mail, **options))
