"""Lost hosts: a ``fit`` that has lost another host, or a process of it, goes on with all hosts.

What is left of the job meets anew, where it has met at first. A host that is started again, by
whoever looks after it, comes there by its script's own ``fit``; then all go on from host 0's newest
checkpoint, as if all had been started again, but for the processes that are there. Connections are
new, so a host that was given up, and wakes, can tell nobody anything: it has lost the others, and
comes to the meeting as well.

Where the job may go on with fewer hosts (``lockstep run --min-hosts``), those that have come do so
after a while, as if the job had been started on them alone.
"""

import math
from collections.abc import Callable
from typing import TypeVar

from lockstep.checkpoint.storage import Folder
from lockstep.cluster.place import Reach
from lockstep.errors import CheckpointError, HostError, OptionError, WorkerError
from lockstep.train.hosts import Hosts
from lockstep.train.job_context import JobContext
from lockstep.train.progress import OutputConsole

# The least to wait for hosts that are being started: short time-outs are for those that run, and
# who gives up sooner than another host can start would never meet it.
_MEETING_SECONDS = 120.0

_T = TypeVar("_T")


def outlast(
    fit: Callable[[bool], _T], restarts: int, job_context: JobContext, *, verbose: object
) -> tuple[_T, list[str]]:
    """Fit, and once more where a host was lost; what comes of it, and what was lost.

    Args:
        fit: meets the hosts; is told whether it goes on with what it has begun.
        restarts: how often at the most.
        job_context: of the calls.
        verbose: 0 is silent.

    Raises:
        HostError, WorkerError: what was lost where no restart is left.
    """
    job_context.meeting_seconds = _MEETING_SECONDS if restarts else 0.0
    job_context.patience_seconds = math.inf
    lost: list[str] = []
    while True:
        try:
            return fit(bool(lost)), lost
        except (HostError, WorkerError) as error:
            is_loss = error.is_loss and job_context.spans_hosts
            if not is_loss or len(lost) == restarts:
                raise
            lost.append(f"{error}".partition("\n")[0])
            job_context.patience_seconds = _MEETING_SECONDS
            OutputConsole(quiet=not verbose).print(
                f"{lost[-1]} Restart {len(lost)} of {restarts}: waiting for all hosts, to go "
                "on from the newest checkpoint to the same result.",
                highlight=False,
                soft_wrap=True,
            )


def check_restarts_on(
    hosts: Hosts | None, restarts: int, *, has_checkpoint: bool, reach: Reach
) -> None:
    """Refuse restarts where several scripts train and nobody could go on.

    Raises:
        OptionError: this is so.
    """
    if hosts is None or hosts.is_one_process:
        return
    if restarts and reach == "roles" and hosts.place.num_hosts > 1:
        raise OptionError(
            "Workers and parameter servers are restarted on one host only.",
            received=f"restarts={restarts} with {hosts.place.num_hosts} hosts",
            fix="Leave `restarts` out, and start the scripts again: a checkpoint is gone on from.",
        )
    if restarts and (hosts.has_followers or not has_checkpoint):
        raise OptionError(
            "Restarts on several hosts need a checkpoint, and one process on each host.",
            received=f"restarts={restarts} {'with' if has_checkpoint else 'without'} one, "
            f"{hosts.place.num_processes} on a host by {hosts.place.launcher}",
            fix="Pass checkpoint=, or to Keras a lockstep.keras.Checkpoint. Where a launcher "
            "starts a process for each device, have it start the script again instead: "
            "torchrun --max-restarts, for example.",
        )


def check_kept(kept: object, folder: Folder, *, goes_on: bool) -> None:
    """See that hosts that go on after a loss can.

    Args:
        kept: what host 0 has found.
        folder: there.
        goes_on: they do.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    if kept is None and goes_on:
        raise CheckpointError(
            "Hosts that go on after a loss need the checkpoints that host 0 has written.",
            received=f"none in {folder} on host 0",
            fix="Start host 0 where it was before, or give it a folder that all hosts share.",
        )
