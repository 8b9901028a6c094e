"""Assignments: what a rank is given to do, and how it becomes a Worker.

The script's process makes one; helpers get a copy. On several hosts each makes its own, and they
are compared (``train.hosts``).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lockstep.accelerators import rank_device
from lockstep.comm.exchange import ExchangeSpec
from lockstep.comm.meeting_point import Meeting
from lockstep.comm.shared_memory import SharedRegion
from lockstep.data.batch_dims import SAMPLES_FIRST, BatchDims
from lockstep.data.order import kept_streams
from lockstep.launch.failure import add_note
from lockstep.parallel.allocator import keep_freed_memory
from lockstep.parallel.blank import initialize
from lockstep.parallel.build import build_worker
from lockstep.parallel.control import Control
from lockstep.parallel.device_memory import shortage_note
from lockstep.parallel.engine import Neighbours
from lockstep.parallel.gradient_rules import GradientRules
from lockstep.parallel.groups import ParameterGroup
from lockstep.parallel.local_worker import build_local_worker
from lockstep.parallel.losses import LossAdapter
from lockstep.parallel.partition import Partition
from lockstep.parallel.served_worker import build_served_worker
from lockstep.parallel.settings import TorchSettings, num_threads
from lockstep.parallel.step_functions import StepFunction
from lockstep.parallel.update import Updater
from lockstep.parallel.worker import Worker
from lockstep.plan.averaging import AveragedUpdate
from lockstep.plan.spec import Plan
from lockstep.train.conductor import Conductor
from lockstep.train.residuals import Residuals
from lockstep.train.tasks import Task


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What every rank gets.

    Attributes:
        plan: the Plan.
        model: the model; its parameters lie in the store where there are helpers.
        loss: the loss, or None for prediction.
        updater: the optimizer, or None where nothing is trained.
        task: what to do.
        seed: of the random streams.
        device: where rank 0's model is.
        settings: torch's, as the script has set them.
        partitions: of the model in stages, by whether it is in training; none without a pipeline.
        groups: the parameters, by the ranks that have them.
        blank: names of the parameters that have no values yet.
        rules: for gradients.
        functions: the user's own training steps, if there are any.
        dims: where the samples are in what the model takes and returns.
        residuals: of this host, where something is compressed between hosts.
    """

    plan: Plan
    model: nn.Module
    loss: LossAdapter | None
    updater: Updater | None
    task: Task
    seed: int
    device: torch.device
    settings: TorchSettings
    partitions: Mapping[bool, Partition]
    groups: tuple[ParameterGroup, ...]
    blank: frozenset[str]
    rules: GradientRules
    functions: tuple[StepFunction, ...] = ()
    dims: BatchDims = SAMPLES_FIRST
    residuals: Residuals | None = None


def make_worker(
    assignment: Assignment,
    spec: ExchangeSpec,
    region: SharedRegion | None,
    *,
    rank: int,
    look_around: Callable[[float], None],
    neighbours: Neighbours | None = None,
    meeting: Meeting | None = None,
) -> Worker:
    """A rank's part of an assignment, ready to run.

    Args:
        assignment: the assignment.
        spec: the layout of what ranks share, and
        region: where it lies; None where one rank is alone.
        rank: this rank.
        look_around: see ``Board``.
        neighbours: what this rank has of other hosts, where there are several.
        meeting: where ranks of process groups find each other, if there are any.
    """
    residuals = None if assignment.residuals is None else assignment.residuals.by_parameter()
    update = assignment.plan.update
    parts: dict[str, Any] = {
        "rank": rank,
        "model": assignment.model,
        "loss": assignment.loss,
        "updater": assignment.updater,
        "rules": assignment.rules,
        "functions": assignment.functions,
        "seed": assignment.seed,
        "device": rank_device(assignment.plan.devices, rank),
        "dims": assignment.dims,
        "look_around": look_around,
    }
    if isinstance(update, AveragedUpdate) and assignment.updater is not None:
        return build_local_worker(
            assignment.plan, spec, region, neighbours=neighbours, residuals=residuals, **parts
        )
    if assignment.plan.is_stale and assignment.updater is not None:
        assert region is not None
        return build_served_worker(assignment.plan, spec, region, **parts)
    return build_worker(
        assignment.plan,
        spec,
        region,
        groups=assignment.groups,
        partitions=assignment.partitions,
        neighbours=neighbours,
        meeting=meeting,
        residuals=residuals,
        **parts,
    )


def run_task(assignment: Assignment, worker: Worker, control: Control, conductor: Conductor) -> Any:
    """Do a rank's part of the task; where its device has no memory left, say what was there."""
    try:
        return assignment.task.run(worker, control, conductor)
    except torch.OutOfMemoryError as error:
        add_note(error, shortage_note(worker))
        raise


def initialize_own(assignment: Assignment, worker: Worker) -> None:
    """Each group's first rank gives its parameters their first values, if they have none."""
    if assignment.blank:
        own = {
            name
            for group in assignment.groups
            if group.ranks[0] == worker.rank
            for name in group.names
        }
        initialize(assignment.model, own & assignment.blank, assignment.seed)
        worker.barrier()


@contextmanager
def compute_settings(plan: Plan) -> Iterator[None]:
    """The Plan's threads within the block; the process's own threads and random states after it."""
    keep_freed_memory()
    with kept_streams(), num_threads(plan.threads_per_device or torch.get_num_threads()):
        yield
