"""The work of workers and parameter servers: a table in shared memory.

A free worker takes the next part of a batch, in the order of the batches. A batch is *open* from
when its first part is taken until all servers have applied it. A worker's gradients of a part, its
*push*, lie in its row of the gradients until all servers have taken them.

Only taking a part changes words that several ranks write. It holds a lock, which the kernel
releases when the holder dies; threads of one process, which share that lock, have another. All
other words have one writer, and are written in one store after the data that go with them.

So when a process has died and all others were ended, the table still says which servers have
applied which batches (``progress``). New processes resume from it: parts of batches that some
server lacks are taken again. For that the first worker first holds the servers, so that only a dead
server can have left an update half made: its version is odd. An update is *done* when its batch is
noted as applied and the server's second copy, if it has one, is as new.
"""

import fcntl
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from lockstep.comm.shared_memory.shared_region import SharedRegion
from lockstep.comm.shared_memory.status_board import StatusBoard

_NAP_SECONDS = 50e-6
_LOOK_AROUND_SECONDS = 0.02

# Longest wait for a server to end its update: it has a process of its own, and does not wait.
_HOLD_SECONDS = 10.0
# Bytes of the region whose locks stand for taking parts, and for a server's update, from there on.
_TAKES, _UPDATES = 0, 1
_NUM_LOSSES = 4  # see Push
_NUM_SUMS = _NUM_LOSSES + 1  # see QueueProgress


@dataclass(frozen=True)
class WorkItem:
    """A part of a batch.

    Attributes:
        step: the batch's number.
        number: of the part, which is that of the worker that has it where all are as fast.
    """

    step: int
    number: int


@dataclass(frozen=True)
class Push:
    """A worker's result of a part.

    Attributes:
        part: of which batch.
        num_parts: of the batch.
        weight: of its samples in the update.
        losses: what is added to the epoch's: total and weight of the losses, samples, and whether
            the part was left out.
    """

    part: WorkItem
    num_parts: int
    weight: float
    losses: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class QueueProgress:
    """The progress of an epoch, from which other processes can resume it.

    Attributes:
        begun: how many batches were ever opened.
        opened: of those that are not in all weights, by number: their parts, and by server whether
            they are in its weights.
        losses: of the batches in the first server's weights, see ``Push``; and their updates.
        lead: the longest of any worker.
    """

    begun: int
    opened: Mapping[int, tuple[int, tuple[bool, ...]]]
    losses: tuple[float, ...]
    lead: int

    @property
    def oldest(self) -> int:
        """The first batch that is not in all weights."""
        return min(self.opened, default=self.begun)


class WorkQueue:
    """One rank's view.

    Args:
        region: where the table lies.
        offset: where it begins there.
        board: of the ranks: workers first, then servers.
        num_workers: the first ranks.
        staleness: by how many steps a part may be ahead of the oldest open batch; None for any.
        takes: held while a part is taken; the same for all views of a process.
    """

    def __init__(
        self,
        region: SharedRegion,
        offset: int,
        board: StatusBoard,
        num_workers: int,
        staleness: int | None,
        takes: "threading.Lock | None" = None,
    ) -> None:
        num_servers = board.num_ranks - num_workers
        self._board = board
        self._region = region
        self._offset = offset
        self._takes = takes or threading.Lock()
        self._workers = range(num_workers)
        self._servers = range(num_workers, board.num_ranks)
        self._staleness = staleness
        size = num_bytes(num_workers, num_servers) // 8
        words = region.tensor(offset, torch.int64, (size,), (1,)).numpy()
        cut = iter(np.split(words, np.cumsum(_sizes(num_workers, num_servers))[:-1]))
        self._begun = next(cut)  # how many batches were ever opened: their numbers are below
        self._halted = next(cut)  # whether all are to come to an end
        self._leads = next(cut)  # by worker: its longest
        self._settled = next(cut)  # by worker: how often it has come to the end of its work
        self._versions = next(cut)  # by server: odd while it changes the weights
        self._done = next(cut)  # by server: the version with which all was done
        self._updates = next(cut)  # by server: the number + 1 of the batch of its last update
        # By server: of all batches in its weights, by version, the newest and the one before.
        self._losses = next(cut).view(np.float64).reshape(num_servers, 2, _NUM_SUMS)
        self._pushes = next(cut).reshape(num_workers, 4)
        self._weighed = next(cut).view(np.float64).reshape(num_workers, -1)  # the rest of a push
        self._taken = next(cut).reshape(num_servers, num_workers)  # the last push, by number
        opened = next(cut).reshape(_num_entries(num_workers), -1)
        self._steps, self._num_parts = opened[:, 0], opened[:, 1]  # the batch's number + 1
        self._takers = opened[:, 2 : 2 + num_workers]  # the worker's rank + 1
        self._applied = opened[:, 2 + num_workers :]  # by server

    def for_rank(self, board: StatusBoard) -> "WorkQueue":
        """The view of another rank, which a thread of this process speaks for.

        Args:
            board: the rank's.
        """
        workers = len(self._workers)
        return WorkQueue(
            self._region, self._offset, board, workers, self._staleness, takes=self._takes
        )

    # --- workers ---------------------------------------------------------------------------------

    def take(self, step: int, num_parts: int) -> WorkItem | None:
        """Take a part of a batch, or of an older one that is open; None where none may be taken.

        Args:
            step: the batch's number; all before it were opened.
            num_parts: of this batch.
        """
        rank = self._board.rank
        with self._takes, self._locked(_TAKES):
            opened = self._open_steps()
            oldest = min(opened, default=step)
            if step in opened:  # whoever has opened it may have died before it said so
                self._begun[0] = max(self._begun[0], step + 1)
            elif self._begun[0] == step and self._may_open(step, oldest, len(opened)):
                opened[step] = self._open(step, num_parts, opened.values())
            for number, entry in opened.items():
                free = np.flatnonzero(self._takers[entry, : self._num_parts[entry]] == 0)
                if len(free) and number <= step:
                    self._takers[entry, free[0]] = rank + 1
                    self._leads[rank] = max(self._leads[rank], number - oldest)
                    return WorkItem(number, int(free[0]))
        return None

    def may_take(self, step: int) -> bool:
        """Whether ``take`` may succeed: the batch is opened, or may be."""
        opened = self._open_steps()
        return self._begun[0] > step or self._may_open(step, min(opened, default=step), len(opened))

    def _may_open(self, step: int, oldest: int, num_open: int) -> bool:
        is_near = self._staleness is None or step - oldest <= self._staleness
        return is_near and num_open < len(self._steps)

    def _open(self, step: int, num_parts: int, used: Collection[int]) -> int:
        # What was open when looked at stays in its place, though it may be done by now.
        entry = next(entry for entry in range(len(self._steps)) if entry not in used)
        self._steps[entry] = 0
        self._takers[entry] = 0
        self._num_parts[entry] = num_parts
        self._applied[entry] = 0
        self._steps[entry] = step + 1
        self._begun[0] = step + 1
        return entry

    def begin(self, step: int, progress: QueueProgress | None) -> None:
        """Set the number of the next batch, on one rank before all continue.

        Args:
            step: its number.
            progress: of earlier processes, to resume from.
        """
        self._begun[0] = step
        self._leads[:] = 0
        self._losses[:] = 0.0
        if progress is not None:
            self._leads[0] = progress.lead
            self._losses[0] = progress.losses
            for number, (num_parts, applied) in progress.opened.items():
                entry = self._open(number, num_parts, self._open_steps().values())
                self._applied[entry] = applied
            self._begun[0] = progress.begun

    def has_free(self, step: int) -> bool:
        """Whether some part of an open batch, up to this one, is not taken."""
        return any(
            (self._takers[entry, : self._num_parts[entry]] == 0).any()
            for number, entry in self._open_steps().items()
            if number <= step
        )

    def halt(self) -> None:
        """Have all ranks stop, after the batches that are begun."""
        if not self.is_halted:
            self._halted[0] = 1
            self._wake(range(self._board.num_ranks))

    @property
    def is_halted(self) -> bool:
        """Whether all ranks are to stop."""
        return bool(self._halted[0])

    def is_opened(self, step: int) -> bool:
        """Whether a part of the batch was ever taken."""
        return bool(self._begun[0] > step)

    def oldest_open(self, step: int) -> int:
        """The oldest batch that is not in the weights of all servers; ``step`` if all are."""
        return min(self._open_steps(), default=step)

    def is_over(self) -> bool:
        """Whether all that was opened is in the weights."""
        return not self._open_steps()

    def push(self, push: Push) -> None:
        """Have the servers take the gradients in this worker's row; the last push was taken."""
        own = self._pushes[self._board.rank]
        self._weighed[self._board.rank] = push.weight, *push.losses
        own[1:] = push.part.step, push.part.number, push.num_parts
        own[0] += 1
        self._wake(self._servers)

    def is_taken(self) -> bool:
        """Whether this worker's row is free again."""
        rank = self._board.rank
        return bool((self._taken[:, rank] >= self._pushes[rank, 0]).all())

    def settle(self, times: int) -> None:
        """This worker has finished its work for the ``times``-th time."""
        self._settled[self._board.rank] = times
        self._wake(range(self._board.num_ranks))

    def version(self, server: int) -> int:
        """The version of a server's weights: odd while it changes them."""
        return int(self._versions[server])

    def settled_version(self, server: int) -> int:
        """The version of a server's weights, once it does not change them."""
        while (version := self.version(server)) % 2:
            self.wait(lambda: self.version(server) % 2 == 0)
        return version

    def longest_lead(self) -> int:
        """By how many steps any worker was ahead at most, since ``begin``; when all have met."""
        return int(self._leads.max())

    def losses(self) -> tuple[float, ...]:
        """Sums over all batches since ``begin``, once all have settled; see ``QueueProgress``."""
        return self._losses_of_first()

    # --- the first worker, when a process has died -----------------------------------------------

    def hold_servers(self) -> bool:
        """Keep servers from beginning an update; True if none is under way any more."""
        until = time.monotonic() + _HOLD_SECONDS
        return all(
            self._is_locked_until(until, _UPDATES + number) for number in range(len(self._servers))
        )

    def _is_locked_until(self, until: float, byte: int) -> bool:
        while not self._lock(byte):
            if time.monotonic() > until:
                return False
            time.sleep(_NAP_SECONDS)
        return True

    def torn_servers(self) -> list[int]:
        """Servers that died within an update. Call it when all other processes have ended."""
        return [number for number in range(len(self._servers)) if self._versions[number] % 2]

    def progress(self) -> QueueProgress:
        """The progress, when all other processes have ended and no update is half made."""
        for server in np.flatnonzero((self._versions != self._done) & (self._versions % 2 == 0)):
            self._applied[self._steps == self._updates[server], server] = 1
        opened = {
            step: (int(self._num_parts[entry]), tuple(map(bool, self._applied[entry])))
            for step, entry in self._open_steps().items()
        }
        return QueueProgress(
            begun=max([int(self._begun[0]), *(step + 1 for step in opened)]),
            opened=opened,
            losses=self._losses_of_first(),
            lead=self.longest_lead(),
        )

    def _losses_of_first(self) -> tuple[float, ...]:
        return tuple(self._losses[0, self.slot(0)].tolist())

    # --- servers ---------------------------------------------------------------------------------

    def next_push(self) -> tuple[int, Push] | None:
        """What a worker has pushed that this server has not taken, with the worker's rank."""
        taken = self._taken[self._server]
        for worker in np.flatnonzero(self._pushes[:, 0] > taken):
            _, step, number, num_parts = self._pushes[worker].tolist()
            weight, *losses = self._weighed[worker].tolist()
            return int(worker), Push(WorkItem(step, number), num_parts, weight, tuple(losses))
        return None

    def note_taken(self, worker: int) -> None:
        """This server has taken the worker's push."""
        self._taken[self._server, worker] = self._pushes[worker, 0]
        self._board.wake(worker)

    def slot(self, server: int) -> int:
        """Which of two places has what goes with a server's last update; the next takes the other.

        An update that is half made has not counted.
        """
        return int(self._versions[server]) // 2 % 2

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within the block is one update; the first worker may keep it from beginning."""
        with self._locked(_UPDATES + self._server):
            yield
            self._done[self._server] = self._versions[self._server]

    @contextmanager
    def updating(self, step: int, losses: Sequence[float]) -> Iterator[None]:
        """Within the block this server applies a batch to its weights.

        Args:
            step: the batch's number.
            losses: of all its parts, added up, and whether it changes anything.
        """
        own = self._server
        last = self.slot(own)
        self._updates[own] = step + 1
        self._losses[own, 1 - last] = self._losses[own, last] + losses
        self._versions[own] += 1
        yield
        self._versions[own] += 1
        self._applied[self._steps == step + 1, own] = 1
        self._wake(self._workers)
        self._wake(self._servers)

    def is_applied(self, step: int) -> bool:
        """Whether a batch is in this server's weights."""
        is_open = bool((self._applied[self._steps == step + 1, self._server] == 0).any())
        return self.is_opened(step) and not is_open

    def are_settled(self, times: int) -> bool:
        """Whether all workers have settled so often, and all batches are applied."""
        return bool((self._settled >= times).all()) and self.is_over()

    @property
    def _server(self) -> int:
        return self._board.rank - len(self._workers)

    # --- both ------------------------------------------------------------------------------------

    def _open_steps(self) -> dict[int, int]:
        """The batches that are open, oldest first, and where they are in the table."""
        entries = np.flatnonzero((self._steps > 0) & ~self._applied.all(axis=1))
        return dict(sorted((int(self._steps[entry]) - 1, int(entry)) for entry in entries))

    def _wake(self, ranks: range) -> None:
        for rank in ranks:
            if rank != self._board.rank:
                self._board.wake(rank)

    def wait(self, is_there: Callable[[], bool]) -> None:
        """Wait until another rank writes something and wakes this one."""
        self._board.wait_until(self._board.rank, is_there)

    @contextmanager
    def _locked(self, byte: int) -> Iterator[None]:
        """Hold a lock; waits also for a holder that is stopped."""
        waited = 0.0
        while not self._lock(byte):
            time.sleep(_NAP_SECONDS)
            waited += _NAP_SECONDS
            if waited >= _LOOK_AROUND_SECONDS:
                self._board.look_around(waited)
        try:
            yield
        finally:
            fcntl.lockf(self._region.descriptor, fcntl.LOCK_UN, 1, byte)

    def _lock(self, byte: int) -> bool:
        """Whether it was free."""
        try:
            fcntl.lockf(self._region.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except (BlockingIOError, PermissionError):
            return False
        return True


def num_bytes(num_workers: int, num_servers: int) -> int:
    """Size of the table."""
    return 8 * sum(_sizes(num_workers, num_servers))


def _sizes(num_workers: int, num_servers: int) -> list[int]:
    """The sizes of the parts of the table, in words."""
    per_entry = 2 + num_workers + num_servers
    return [
        *(1, 1, num_workers, num_workers, num_servers, num_servers, num_servers),
        num_servers * 2 * _NUM_SUMS,
        *(num_workers * 4, num_workers * (1 + _NUM_LOSSES), num_servers * num_workers),
        _num_entries(num_workers) * per_entry,
    ]


def _num_entries(num_workers: int) -> int:
    """As many batches can be open: each but the newest waits for a worker, perhaps a dead one."""
    return 2 * num_workers + 2
