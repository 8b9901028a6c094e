"""Lost hosts: a ``fit`` that has lost another host, or a process of it, goes on with all hosts.

What is left of the job meets anew, where it has met at first. A host that is started again, by
whoever looks after it, comes there by its script's own ``fit``; then all go on from the newest
checkpoint, on host 0's disk or in the memory of a host that is left
(``train.checkpointing.memory_checkpoints``), as if all had been started again, but for the
processes that are there. Connections are new, so a host that was given up, and wakes, can tell
nobody anything: it has lost the others, and comes to the meeting as well.

Where the job may go on with fewer hosts (``lockstep run --min-hosts``), those that have come do so
after a while, as if the job had been started on them alone.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TypeVar

from lockstep.checkpoint.storage import Folder
from lockstep.checkpoint.trees import Tree
from lockstep.cluster.place import Reach
from lockstep.errors import CheckpointError, HostError, OptionError, WorkerError
from lockstep.events import LOGGER
from lockstep.train.checkpointing.checkpoints import CheckpointWriter
from lockstep.train.checkpointing.memory_checkpoints import MemoryCheckpoints
from lockstep.train.logging.progress import OutputConsole
from lockstep.train.multihost.hosts import Hosts
from lockstep.train.resume.fit_record import Found
from lockstep.train.runtime.job_context import JobContext

# The least to wait for hosts that are being started: short time-outs are for those that run, and
# who gives up sooner than another host can start would never meet it.
_MEETING_SECONDS = 120.0

_T = TypeVar("_T")


def outlast(
    fit: Callable[[MemoryCheckpoints], _T],
    restarts: int,
    job_context: JobContext,
    *,
    verbose: object,
) -> tuple[_T, list[str]]:
    """Fit, and once more where a host was lost; what comes of it, and what was lost.

    Args:
        fit: meets the hosts; has what this process keeps of it in memory.
        restarts: how often at the most.
        job_context: of the calls.
        verbose: 0 is silent.

    Raises:
        HostError, WorkerError: what was lost where no restart is left.
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
            memory.goes_on = True
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


@contextmanager
def going_on(
    keeper: CheckpointWriter, hosts: Hosts | None, restarts: int, *, is_chief: bool
) -> Iterator[None]:
    """Within the block a ``fit`` is kept that goes on from the newest checkpoint of all.

    Args:
        keeper: gets that one, as ``found``.
        hosts: all of them, which call this; None for one alone.
        restarts: how often to go on after a loss.
        is_chief: this process writes.

    Raises:
        CheckpointError: what is there is not whole; see ``newest_of_all``.
        HostError: another host was asked for another number of restarts.
    """
    if hosts is not None:  # with some they share copies, which takes all of them
        hosts.check_equal({"`restarts`": restarts})
    with ExitStack() as stack:
        on_disk = stack.enter_context(keeper.opened()) if is_chief else None
        tree = newest_of_all(hosts, on_disk, keeper.memory, keeper.directory)
        if tree is not None:
            is_on_disk = tree is on_disk
            keeper.found = replace(
                Found.of(tree),
                is_written=is_on_disk or not is_chief,
                name=keeper.place if is_on_disk else "the newest copy of the training",
            )
        stack.enter_context(keeper.memory.shared(hosts if restarts else None, tree))
        del on_disk, tree  # each may be as large as the training
        yield


def newest_of_all(
    hosts: Hosts | None, on_disk: dict[str, Tree] | None, memory: MemoryCheckpoints, folder: Folder
) -> dict[str, Tree] | None:
    """The newest checkpoint that any host has, on every host; None if there is none.

    Args:
        hosts: all of them, which call this; None for one alone.
        on_disk: what host 0 has found there.
        memory: what this process has.
        folder: where host 0 has looked.

    Raises:
        CheckpointError: this host goes on after a loss, and nobody has any; what is there is none.
    """
    own = [one for one in (on_disk, memory.newest()) if one is not None]
    newest = max(own, key=_place, default=None)
    if hosts is not None:
        places = hosts.from_all(None if newest is None else _place(newest))
        first = max(range(len(places)), key=lambda host: places[host] or ())
        newest = hosts.from_host(first, newest)
    if newest is None and memory.goes_on:
        raise CheckpointError(
            "Hosts that go on after a loss need a checkpoint that host 0 has written, or a copy in "
            "the memory of host 0 or 1.",
            received=f"none in {folder} on host 0, and no copy",
            fix="Start host 0 where it was before, or give it a folder that all hosts share.",
        )
    return newest


def _place(checkpoint: dict[str, Tree]) -> tuple[int, bool, int, int]:
    """How far the training has come in a checkpoint; what has come further is greater.

    Raises:
        CheckpointError: it is none.
    """
    found = Found.of(checkpoint)
    position = found.state.position
    place = position["fit"] or {"epoch": 0, "batch": 0}
    return position["steps"], found.record.is_finished, place["epoch"], place["batch"]
