"""Assignments: the work of a rank, and the Worker made from it.

The script's process makes one; helpers get a copy. On several hosts each makes its own, and the
hosts compare them (``train.multihost.hosts``).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.accelerators import rank_device
from lockstep.comm.exchange_spec import ExchangeSpec
from lockstep.comm.shared_memory.shared_region import SharedRegion
from lockstep.comm.transports.memfd_store import Meeting
from lockstep.data.order import kept_streams
from lockstep.launch.health.failure import add_note
from lockstep.parallel.build import build_worker
from lockstep.parallel.exchange.control import Control
from lockstep.parallel.exchange.engine import Endpoint, Neighbours
from lockstep.parallel.local_sgd.local_worker import build_local_worker
from lockstep.parallel.parameter_server.async_worker_build import build_served_worker
from lockstep.parallel.settings import TorchSettings, num_threads
from lockstep.parallel.storage.allocator import keep_freed_memory
from lockstep.parallel.storage.device_memory import noting_shortage, shortage_note
from lockstep.parallel.storage.meta_init import initialize
from lockstep.parallel.worker import Worker
from lockstep.parallel.workload import Workload
from lockstep.plan.averaging import AveragedUpdate
from lockstep.plan.devices import is_cpu
from lockstep.plan.spec import Plan
from lockstep.train.callbacks.driver import TaskDriver
from lockstep.train.fit.failing_layer import naming_layer
from lockstep.train.fit.tasks import Task
from lockstep.train.optim.error_feedback import ErrorFeedback


@dataclass(frozen=True, kw_only=True)
class Assignment(Workload):
    """The work of all ranks.

    Attributes:
        task: the task.
        device: of rank 0's model.
        settings: torch's, as the script has set them.
        blank: names of the parameters without values.
        residuals: of this host, if tensors are compressed between hosts.
    """

    task: Task
    device: torch.device
    settings: TorchSettings
    blank: frozenset[str]
    residuals: ErrorFeedback | None = None


def make_worker(
    assignment: Assignment,
    spec: ExchangeSpec,
    region: SharedRegion | None,
    *,
    rank: int,
    look_around: Callable[[float], None],
    neighbours: Neighbours | None = None,
    meeting: Meeting | None = None,
    values: Mapping[str, torch.Tensor] | None = None,
) -> Worker:
    """The Worker of a rank for an assignment.

    Args:
        assignment: the assignment.
        spec: the layout of the memory that ranks share, and
        region: that memory; None if there is one rank.
        rank: this rank.
        look_around: see ``Board``.
        neighbours: this rank's connections to other hosts, if there are several.
        meeting: the meeting point of ranks of process groups, if any.
        values: of parameters, from which this rank takes its part; None if it has them.
    """
    plan, residuals = assignment.plan, assignment.residuals
    endpoint = Endpoint(
        plan=plan,
        spec=spec,
        rank=rank,
        region=region,
        look_around=look_around,
        device=rank_device(plan.devices, rank),
        neighbours=neighbours,
        meeting=meeting,
        residuals=None if residuals is None else residuals.by_parameter(),
        values=values,
    )
    with noting_shortage(endpoint.device):
        if isinstance(plan.update, AveragedUpdate) and assignment.updater is not None:
            return build_local_worker(assignment, endpoint)
        if plan.is_stale and assignment.updater is not None:
            return build_served_worker(assignment, endpoint)
        return build_worker(assignment, endpoint)


def run_task(assignment: Assignment, worker: Worker, control: Control, driver: TaskDriver) -> Any:
    """Do a rank's part of the task; errors name the layer, and what a full device held."""
    loss = assignment.loss and assignment.loss.loss
    layers = [one.name for one in assignment.plan.layers] if assignment.updater else []
    try:
        with naming_layer(assignment.model, loss, layers=layers):
            return assignment.task.run(worker, control, driver)
    except torch.OutOfMemoryError as error:
        add_note(error, shortage_note(worker))
        raise


def divides_parameters(work: Workload) -> bool:
    """True if each rank keeps its part of the parameters only, and gets no more at the start."""
    sharding = work.plan.sharding
    if sharding is None or work.updater is None or sharding.streams_parameters:
        return False
    return sharding.divides_parameters


def is_made_in_parts(work: Workload) -> bool:
    """True if ranks can initialize their parts of the parameters of a model without values."""
    if work.plan.pipeline is None:
        return divides_parameters(work) and is_cpu(work.plan.devices)
    return len(work.plan.domains) == 1


def initialize_own(assignment: Assignment, worker: Worker) -> None:
    """Initialize parameters that have no values: on each group's first rank its own.

    Where ranks divide parameters, each draws all of them, layer by layer, and keeps its parts.
    """
    blank = frozenset() if assignment.task.brings_values else assignment.blank
    if blank and divides_parameters(assignment):
        worker.keep_parts(())
        initialize(assignment.model, blank, assignment.seed, worker.keep_parts)
    elif blank:
        firsts = (group for group in assignment.groups if group.ranks[0] == worker.rank)
        own = {name for group in firsts for name in group.names}
        initialize(assignment.model, own & blank, assignment.seed)
    if assignment.blank or divides_parameters(assignment):
        worker.barrier()  # all have their values: rank 0 may free those of others


@contextmanager
def compute_settings(plan: Plan) -> Iterator[None]:
    """The Plan's threads within the block; the process's own threads and random states after it."""
    keep_freed_memory()
    with kept_streams(), num_threads(plan.threads_per_device or torch.get_num_threads()):
        yield
