"""Lost hosts: a ``fit`` that has lost another host, or a process of it, restarts with all hosts.

The remaining hosts rendezvous again, at the same address. A host that its supervisor has started
again joins them by its script's own ``fit``. Then all resume from the newest checkpoint, on host
0's disk or in the memory of a remaining host (``train.checkpointing.memory_checkpoints``), as if
all had been started again, but in the processes that still run. Connections are new, so a host that
was given up and wakes cannot disturb the others: it finds its connections closed, and joins, too.

If the job may run on fewer hosts (``lockstep run --min-hosts``), those that have joined start after
a while, as if the job had been started on them alone.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from lockstep.checkpoint.storage import Folder
from lockstep.cluster.place import Reach
from lockstep.errors import CheckpointError, HostError, OptionError, WorkerError
from lockstep.events import LOGGER
from lockstep.train.checkpointing.checkpoints import CheckpointWriter
from lockstep.train.checkpointing.memory_checkpoints import MemoryCheckpoints
from lockstep.train.checkpointing.shared_folder import SharedFolder
from lockstep.train.logging.progress import OutputConsole
from lockstep.train.multihost.hosts import Hosts
from lockstep.train.resume.fit_record import FitState
from lockstep.train.runtime.job_context import JobContext

# Shortest wait for hosts that are being started. Short timeouts are for hosts that run: one that
# gives up before another can start would never meet it.
_MEETING_SECONDS = 120.0

_T = TypeVar("_T")


def fit_with_restarts(
    fit: Callable[[MemoryCheckpoints], _T],
    restarts: int,
    job_context: JobContext,
    *,
    verbose: object,
) -> tuple[_T, list[str]]:
    """Fit, and again after each loss of a host; returns the result, and a line for each loss.

    Args:
        fit: connects to the hosts and trains, given the checkpoints in this process's memory.
        restarts: at most so many.
        job_context: of the calls.
        verbose: 0 is silent.

    Raises:
        HostError, WorkerError: the loss, if no restart is left.
    """
    job_context.meeting_seconds = _MEETING_SECONDS if restarts else 0.0
    job_context.patience_seconds = math.inf
    lost: list[str] = []
    memory = MemoryCheckpoints()
    while True:
        try:
            return fit(memory), lost
        except (HostError, WorkerError) as error:
            is_loss = error.is_loss and job_context.spans_hosts
            if not is_loss or len(lost) == restarts:
                raise
            lost.append(f"{error}".partition("\n")[0])
            LOGGER.warning("%s Restart %d of %d", lost[-1], len(lost), restarts)
            memory.is_restart = True
            job_context.patience_seconds = _MEETING_SECONDS
            OutputConsole(quiet=not verbose).print(
                f"{lost[-1]} Restart {len(lost)} of {restarts}: waiting for all hosts, to resume "
                "from the newest checkpoint, to the same result.",
                highlight=False,
                soft_wrap=True,
            )


def check_host_restarts(
    hosts: Hosts | None, restarts: int, has_checkpoint: bool, reach: Reach
) -> None:
    """Refuse restarts in jobs of several scripts that could not resume.

    Raises:
        OptionError: they are asked for.
    """
    if hosts is None or hosts.is_one_process:
        return
    if restarts and reach == "roles" and hosts.place.num_hosts > 1:
        raise OptionError(
            "Workers and parameter servers can be restarted on one host only.",
            received=f"restarts={restarts} with {hosts.place.num_hosts} hosts",
            fix="Leave `restarts` out, and start the scripts again: they resume from a checkpoint.",
        )
    if restarts and (hosts.has_followers or not has_checkpoint):
        raise OptionError(
            "Restarts on several hosts need a checkpoint, and one process on each host.",
            received=f"restarts={restarts} {'with' if has_checkpoint else 'without'} a checkpoint, "
            f"{hosts.place.num_processes} processes on a host by {hosts.place.launcher}",
            fix="Pass checkpoint=, or to Keras a lockstep.keras.Checkpoint. Where a launcher "
            "starts a process for each device, have it start the script again instead: "
            "torchrun --max-restarts, for example.",
        )


@contextmanager
def resumed_from_newest(
    writer: CheckpointWriter,
    memory: MemoryCheckpoints,
    hosts: Hosts | None,
    restarts: int,
    *,
    is_chief: bool,
    is_divided: bool,
) -> Iterator[None]:
    """Around a ``fit`` with checkpoints: find the newest of all hosts, and share copies in memory.

    Args:
        writer: gets that checkpoint, as ``found``.
        memory: of this process.
        hosts: all of them, which call this; None for one alone.
        restarts: allowed after a loss.
        is_chief: this process writes.
        is_divided: ranks divide the training.

    Raises:
        CheckpointError: no checkpoint is complete; see ``newest_of_all``.
        HostError: another host has another number of restarts.
    """
    if hosts is not None:  # copies in memory need all hosts
        hosts.check_equal({"`restarts`": restarts})
    with ExitStack() as stack:
        if is_chief:
            stack.enter_context(writer.opened())
        folder, is_one_host = writer.checkpoint.directory, hosts is None or len(hosts.names) == 1
        writer.shared = SharedFolder.find(hosts, folder) if is_divided else None
        writer.is_divided = is_divided and (is_one_host or writer.shared is not None)
        if is_divided and not writer.is_divided:
            writer.show_line(
                f"Hosts do not share {folder}: host 0 gathers each checkpoint, and writes it alone."
            )
        on_disk = writer.newest() if is_chief or writer.shared is not None else None
        if writer.shared is not None:  # no host has memory for the whole training
            memory.forget()
            writer.found, restarts = on_disk, 0
            _check_found(on_disk, folder, is_restart=memory.is_restart)
        else:
            writer.found = newest_of_all(hosts, on_disk, memory, folder)
        stack.enter_context(memory.shared(hosts if restarts else None, writer.found))
        del on_disk  # it may be as large as the training
        yield


def newest_of_all(
    hosts: Hosts | None, on_disk: FitState | None, memory: MemoryCheckpoints, folder: Folder
) -> FitState | None:
    """The newest checkpoint of any host, on every host; None if there is none.

    Args:
        hosts: all of them, which call this; None for one alone.
        on_disk: the newest in host 0's folder.
        memory: of this process.
        folder: of host 0, for messages.

    Raises:
        CheckpointError: this host restarts after a loss, and no host has a checkpoint; or one is
            invalid.
    """
    own = [one for one in (on_disk, memory.newest()) if one is not None]
    newest = max(own, key=lambda one: one.progress, default=None)
    if hosts is not None:
        progress = hosts.from_all(None if newest is None else newest.progress)
        first = max(range(len(progress)), key=lambda host: progress[host] or ())
        tree = hosts.from_host(first, None if newest is None else newest.tree())
        if first != hosts.host:
            newest = None if tree is None else FitState.of(tree)
    _check_found(newest, folder, is_restart=memory.is_restart)
    return newest


def _check_found(newest: FitState | None, folder: Folder, *, is_restart: bool) -> None:
    """Check that hosts that restart after a loss have a checkpoint.

    Raises:
        CheckpointError: they have none.
    """
    if newest is None and is_restart:
        raise CheckpointError(
            "Hosts that restart after a loss need a checkpoint that host 0 has written, or a copy "
            "in the memory of host 0 or 1.",
            received=f"none in {folder} on host 0, and no copy",
            fix="Start host 0 where it was before, or give it a folder that all hosts share.",
        )
