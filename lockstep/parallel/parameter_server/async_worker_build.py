"""From a Plan with parameter servers that are not synchronous to this rank's Worker."""

from functools import partial
from typing import Any

from lockstep.parallel.build import build_worker, divided_pieces
from lockstep.parallel.exchange.engine import Endpoint, remote_workers
from lockstep.parallel.local_sgd.local_worker import build_alone
from lockstep.parallel.parameter_server.async_worker import AsyncWorker
from lockstep.parallel.parameter_server.push_pull import Pusher
from lockstep.parallel.parameter_server.remote_worker import RemoteWorker
from lockstep.parallel.worker import Worker
from lockstep.parallel.workload import Workload


def build_served_worker(work: Workload, endpoint: Endpoint) -> Worker:
    """Put the parts of a rank that trains together; for the arguments see ``build_worker``."""
    plan, spec, rank = work.plan, endpoint.spec, endpoint.rank
    is_server = plan.is_server(rank)
    assert endpoint.region is not None
    pieces = divided_pieces(plan, spec.groups[0], work.updater)
    options: dict[str, Any] = {
        "region": endpoint.region,
        "offsets": spec.mail_offsets,
        "served": [own for owner, own in pieces.items() if plan.is_server(owner)],
        "alone": None if is_server else build_alone(work, endpoint, Pusher()),
    }
    speakers = remote_workers(plan)
    if rank in speakers:
        server = speakers[rank]
        options |= {"server": server, "mail": endpoint.mail_channels()}
        return build_worker(work, endpoint, partial(RemoteWorker, **options))
    remote = [worker for worker, server in speakers.items() if server == rank]
    # Those who wait for it look around for themselves.
    mail = endpoint.mail_channels(_look_nowhere) if remote else None
    return build_worker(work, endpoint, partial(AsyncWorker, remote=remote, mail=mail, **options))


def _look_nowhere(waited_seconds: float) -> None:
    return
