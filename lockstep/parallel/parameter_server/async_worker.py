"""The Worker of a rank with asynchronous parameter servers.

A worker takes a part of a batch, pulls the weights, and computes with an inner Worker of a one-rank
Plan, whose update is a push: it writes the gradients to this worker's row in shared memory, and
servers read their pieces. A server sums the gradients of a batch, weighted by samples, and steps
when all parts have come. So every batch is one update of all its samples; batches may end in
another order than they began.

When a process dies all others are ended, the first worker reads the progress of the servers, and
new processes continue from there. Unfinished parts are computed again; a server's incomplete sums
are dropped. If it died within an update its second copy undoes that.

If callbacks or metrics need all ranks after every step, ranks train synchronously
(``begin_training``). A Plan whose staleness is 0 has an ordinary Worker.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from lockstep.comm.collectives.gradients import TensorSpec
from lockstep.comm.p2p.tcp_p2p import MailChannels
from lockstep.comm.shared_memory.shared_region import SharedRegion
from lockstep.comm.shared_memory.status_board import StatusBoard
from lockstep.comm.shared_memory.work_queue import Push, QueueProgress, WorkItem, WorkQueue
from lockstep.comm.sparse.row_versions import RowVersions
from lockstep.data.iterable.read_ahead import Read
from lockstep.errors import NonFiniteError
from lockstep.launch.health.failure import add_note
from lockstep.parallel.batch_run import Observe, StepBatch
from lockstep.parallel.local_steps import LocalSteps
from lockstep.parallel.owned_group import OwnedGroup
from lockstep.parallel.parameter_server.push_pull import OwnWeights, PulledWeights, Pusher
from lockstep.parallel.parameter_server.server import ParameterServer
from lockstep.parallel.parameter_server.slot_journal import SlotJournal
from lockstep.parallel.parameter_server.update_rollback import SecondCopy
from lockstep.parallel.parameter_server.worker_messages import Inbox, Outbox
from lockstep.parallel.parameter_server.worker_proxy import FreshWeights, WorkerProxy
from lockstep.parallel.training_step import StepResult
from lockstep.parallel.updater_interface import PieceSlots
from lockstep.parallel.worker import Worker
from lockstep.parallel.workload import Workload
from lockstep.plan.decision import ServedUpdate
from lockstep.plan.layout import Piece
from lockstep.plan.shares import num_filled_shares, share_bounds

# The only group of a Plan without stages.
_GROUP = 0


@dataclass(frozen=True, kw_only=True)
class ServerProgress:
    """The progress of workers and servers in an epoch when a process died.

    Attributes:
        table: which batches are in the weights.
        slots: by server, the slots of its updater that are not in shared memory.
        num_past: batches of the task in this epoch before ``table.oldest``.
        num_ended: those whose steps the first worker has ended.
    """

    table: QueueProgress
    slots: Sequence[Sequence[PieceSlots]]
    num_past: int
    num_ended: int


class AsyncWorker(Worker, LocalSteps):
    """One rank, a worker or a server; see the module, and ``async_worker_build``.

    Args:
        work: common to all ranks.
        region: memory of the work queue, the servers' notes of slots, and second copies, and
        offsets: where each begins there.
        served: the pieces of each server.
        inner: computes a worker's parts, with a ``Pusher``; None on a server.
        remote: workers of other hosts that this rank is the proxy of.
        mail: to their hosts; None without remote workers.
        options: see ``Worker``.
    """

    has_own_optimizer = False

    def __init__(
        self,
        work: Workload,
        *,
        region: SharedRegion,
        offsets: Sequence[int],
        served: Sequence[Sequence[Piece]],
        inner: Worker | None,
        remote: Sequence[int] = (),
        mail: MailChannels | None = None,
        **options: Any,
    ) -> None:
        super().__init__(work, **options)
        update = self.plan.update
        assert isinstance(update, ServedUpdate)
        assert self.board is not None
        num_workers = self.plan.num_ranks - self.plan.num_servers
        self._queue = WorkQueue(region, offsets[0], self.board, num_workers, update.staleness)
        assert self.updater is not None
        group = self._groups[_GROUP]
        self._mail = mail
        row_versions = RowVersions(region, offsets[3], _sparse(group) if self.plan.hosts else {})
        self._notes = SlotJournal(region, offsets[1], group.spec.gradients.tensors, len(served))
        self._copies = (
            SecondCopy.each(group, self.updater, served, region, offsets[2])
            if update.replicas > 1
            else []
        )
        self._resume_point: ServerProgress | None = None  # where this epoch begins
        self._losses: Sequence[float] = ()  # of the last epoch
        self._has_held_updates = False
        self._inner = inner
        self._server: ParameterServer | None = None
        if inner is None:
            number = self.rank - num_workers
            self._server = ParameterServer(
                number,
                self._queue,
                exchange=self.exchange,
                group=group,
                pieces=self._pieces[_GROUP],
                updater=self.updater,
                notes=self._notes,
                copy=self._copies[number] if self._copies else None,
                proxies=[self._proxy(one, region, served, row_versions) for one in remote],
                row_versions=row_versions if self.plan.hosts else None,
            )
        else:
            assert isinstance(inner.updater, Pusher)
            inner.updater.push_to = partial(self.exchange.write, _GROUP, self.rank)
            self._weights = self._own_weights(group, served)
        self._is_synchronous = self._is_restartable = False
        self._opened: dict[int, StepBatch] = {}  # batches with parts that may be open
        self._first_step = 0  # since the last synchronisation
        self._num_ended = 0
        self._is_under_way = False
        self._num_synchronised = 0
        self._is_over = False
        self._longest_lead = 0

    def _own_weights(self, group: OwnedGroup, served: Sequence[Sequence[Piece]]) -> OwnWeights:
        return PulledWeights(self._queue, group, served)

    def _proxy(
        self,
        worker: int,
        region: SharedRegion,
        served: Sequence[Sequence[Piece]],
        row_versions: RowVersions,
    ) -> WorkerProxy:
        assert self._mail is not None

        def queue_of(look_around: Callable[[float], None]) -> WorkQueue:
            ranks = self.plan.num_ranks
            board = StatusBoard(region, rank=worker, num_ranks=ranks, look_around=look_around)
            return self._queue.for_rank(board)

        return WorkerProxy(
            worker,
            queue_of=queue_of,
            asks=Inbox(self._mail, worker, "asks", worker),
            grants=Outbox(self._mail, worker, "grants", worker),
            pushes=Inbox(self._mail, worker, "pushes", worker),
            rows=self.exchange.other_view(_GROUP),
            weights=lambda queue: FreshWeights(queue, self._groups[_GROUP], served, row_versions),
        )

    def begin_training(
        self, *, is_synchronous: bool, is_restartable: bool, is_watched: bool
    ) -> None:
        self._is_synchronous, self._is_restartable = is_synchronous, is_restartable

    @property
    def local_steps(self) -> LocalSteps | None:
        return None if self._is_synchronous else self

    def train_step(self, batch: StepBatch) -> StepResult:
        """Compute open parts of this batch and of older ones; the result is of these parts."""
        if self._is_synchronous:
            return super().train_step(batch)
        assert self.board is not None
        self.board.step = batch.step
        if not self._is_under_way:
            self._begin(batch.step)
        self.board.glance()
        result = self._train_async(batch)
        self._num_ended += 1
        return result

    def _train_async(self, batch: StepBatch) -> StepResult:
        step = batch.step
        if self._server is not None:
            self._server.serve(lambda: self._queue.is_applied(step) or self.is_halted)
            return _joined([])
        oldest = self._oldest_open(step)
        self._opened = {number: one for number, one in self._opened.items() if number >= oldest}
        self._opened[step] = batch
        return _joined(list(self._computed_parts(batch)))

    def _begin(self, step: int) -> None:
        """Begin asynchronous training; every rank calls it."""
        if self.rank == self._beginner:
            resumed = self._resume_point
            self._queue.begin(step, None if resumed is None else resumed.table)
        if self._server is not None:
            self._server.begin(is_restartable=self._can_restart)
        self._first_step, self._num_ended = step, 0
        self._is_under_way = True
        self.barrier()

    @property
    def _beginner(self) -> int:
        """The rank that clears the table: the first on the servers' host."""
        plan = self.plan
        return plan.ranks_of_host(plan.host_of(plan.num_ranks - 1)).start

    # --- workers ---------------------------------------------------------------------------------

    def _oldest_open(self, step: int) -> int:
        """The oldest batch that may have open parts."""
        return self._queue.oldest_open(step)

    def _computed_parts(self, batch: StepBatch) -> Iterator[StepResult]:
        """Compute parts of the batch until all are taken."""
        step, num_parts = batch.step, self._num_parts(len(batch.indices))
        while not self.is_halted:
            part = self._queue.take(step, num_parts)
            if part is not None:
                yield self._compute(part, batch.observe)
            elif self._queue.is_opened(step):
                return
            else:
                self._queue.wait(lambda: self._queue.may_take(step) or self.is_halted)

    def _finish_open_batches(self) -> None:
        """After a halt: compute the open parts of batches that have begun."""
        for step, batch in sorted(self._opened.items()):
            while self._queue.is_opened(step):
                part = self._queue.take(step, self._num_parts(len(batch.indices)))
                if part is None:
                    break
                self._compute(part, None)

    def _num_parts(self, num_samples: int) -> int:
        """Number of parts that are not empty."""
        filled = num_filled_shares(num_samples, self.plan.num_shares)
        return -(-filled // self.plan.shares_per_row)

    def _compute(self, part: WorkItem, observe: Observe | None) -> StepResult:
        assert self._inner is not None
        self._wait_for_row()
        batch = self._opened[part.step]
        indices = batch.indices
        shares = self.plan.shares_of(part.number)
        bounds = share_bounds(len(indices), self.plan.num_shares)
        start, stop = bounds[shares[0]][0], bounds[shares[-1]][1]
        inner = self._inner
        inner.passes.reading = self.passes.reading
        try:
            with self._weights.in_place():
                own = replace(batch, indices=indices[start:stop], observe=observe)
                own = replace(own, first_share=shares[0], batch_size=len(indices))
                result = inner.train_step(own)
        except NonFiniteError as error:
            add_note(
                error,
                f"Shares and samples are counted within a worker's part of the batch: samples "
                f"{start} to {stop - 1}. Other parts of it, and other batches, may be under way.",
            )
            raise
        weight = 0.0 if result.is_skipped else result.weight
        losses = float(result.total), result.weight, result.num_samples, result.is_skipped
        self._push(Push(part, self._num_parts(len(indices)), weight, losses))
        return result

    def _wait_for_row(self) -> None:
        """Wait until this worker's row is free for the gradients of its next part."""
        self._queue.wait(self._queue.is_taken)
        # Not a pass of the exchange: ranks compute different numbers of parts.
        self.exchange.rows_of(_GROUP).begin_pass()
        self._pull()

    def _pull(self) -> None:
        assert isinstance(self._weights, PulledWeights)
        self._weights.pull()

    def _push(self, push: Push) -> None:
        self._queue.push(push)

    # --- together --------------------------------------------------------------------------------

    def synchronise(self, *, is_last: bool = False) -> None:
        """Finish all open batches, on all ranks."""
        resumed = self._resume_point
        if not self._is_under_way and resumed is not None:  # the epoch had no batches left
            self._losses, self._resume_point = resumed.table.losses, None
        if self._is_over or not self._is_under_way:
            return
        self._num_synchronised += 1
        if self._server is None:
            self._finish_work()
        else:
            self._server.serve(lambda: self._queue.are_settled(self._num_synchronised))
            self._server.end()
        assert self.board is not None
        own = is_last, self._queue.longest_lead(), self._queue.losses()[-1]
        values = self.board.all_gather([float(number) for number in own])
        self._is_over = any(last for last, *_ in values)
        _, self._longest_lead, num_updates = map(int, values[-1])  # of a server
        self._opened.clear()
        self._losses, self._resume_point, self._is_under_way = self._queue.losses(), None, False
        if self._inner is not None and self.updater is not None:
            self.updater.count_steps(num_updates)

    def _finish_work(self) -> None:
        """Finish open batches, on a worker."""
        self._finish_open_batches()
        self._queue.settle(self._num_synchronised)
        self._queue.wait(self._queue.is_over)

    def results_of_epoch(self, own: list[StepResult]) -> list[StepResult]:
        """The first worker returns the sums of all: others may have died since their parts."""
        if not self._can_restart:
            return own
        nothing, whole = StepResult(total=0.0, weight=0.0, num_samples=0), _joined(own)
        if self.rank != 0 or not self._losses:
            return [replace(nothing, parts=whole.parts, num_bad=whole.num_bad)]
        total, weight, num_samples, num_skipped, _ = self._losses
        whole = replace(
            whole, total=total, weight=weight, num_samples=int(num_samples), is_skipped=False
        )
        return [whole, *[replace(nothing, is_skipped=True)] * int(num_skipped)]

    @property
    def has_diverged(self) -> bool:
        return self._is_under_way

    # --- when a process has died -----------------------------------------------------------------

    @property
    def _can_restart(self) -> bool:
        """True if shared memory has the whole progress of an epoch."""
        is_one_host = not self.plan.hosts
        takes_notes = self.updater is not None and self.updater.takes_notes
        return is_one_host and self._is_restartable and takes_notes

    def hold_updates(self) -> None:
        """On the first worker, before the others are ended: let servers finish their updates."""
        can_restart = self._is_under_way and self._can_restart
        self._has_held_updates = can_restart and self._queue.hold_servers()

    def progress(self) -> ServerProgress | None:
        """On the first worker, after the others have ended: where to resume; None if impossible."""
        if not self._is_under_way:
            return self._resume_point
        torn = self._queue.torn_servers()
        if not self._has_held_updates or (torn and not self._copies):
            return None
        shortest = min(self._notes.lengths(self._queue.slot))
        if shortest <= 0:  # a server had not begun, or could not record its slots
            return None if shortest else self._resume_point
        for server in torn:
            self._copies[server].restore()
        table = self._queue.progress()
        return ServerProgress(
            table=table,
            slots=self._notes.read(self._queue.slot),
            num_past=table.oldest - self._first_step,
            num_ended=self._num_ended,
        )

    def resume_from(self, progress: ServerProgress | None) -> None:
        """Begin the next epoch there, or at its start if None."""
        self._resume_point, self._losses = progress, ()
        if progress is not None and self._server is not None:
            assert self.updater is not None
            self.updater.take_notes(progress.slots[self._server.number])

    # --- state -----------------------------------------------------------------------------------

    @property
    def is_halted(self) -> bool:
        if not self._is_under_way:
            return super().is_halted
        assert self.board is not None  # others are at other steps
        if self.board.wants_end():
            self._halt()
        return self._must_halt

    def _halt(self) -> None:
        """Make all ranks stop."""
        self._queue.halt()

    @property
    def _must_halt(self) -> bool:
        return self._queue.is_halted

    def epoch_logs(self) -> dict[str, float]:
        return {"staleness": 0 if self._is_synchronous else self._longest_lead}

    def reads(
        self, indices: torch.Tensor, step: int | None = None, turn: int = 0, first_share: int = 0
    ) -> list[Read]:
        """Empty in training: workers take parts as they become free."""
        return super().reads(indices, step, turn) if step is None or self._is_synchronous else []

    def leaves_a_rank_idle(self, num_samples: int) -> bool:
        """Buffers are taken from the first worker, which is never idle in training."""
        return self._is_synchronous and super().leaves_a_rank_idle(num_samples)

    def close(self) -> None:
        super().close()
        if self._mail is not None:
            self._mail.close()

    def abandon(self) -> None:
        super().abandon()
        if self._mail is not None:
            self._mail.abandon()
        for proxy in [] if self._server is None else self._server.proxies:
            proxy.abandon()


def _joined(results: Sequence[StepResult]) -> StepResult:
    """The results of several parts as one step's."""
    return StepResult(
        total=math.fsum(result.total for result in results),
        weight=math.fsum(result.weight for result in results),
        num_samples=sum(result.num_samples for result in results),
        is_skipped=any(result.is_skipped for result in results),
        parts=[sums for result in results for sums in result.parts],
        num_bad=sum(result.num_bad for result in results),
    )


def _sparse(group: OwnedGroup) -> dict[int, TensorSpec]:
    """The parameters of a group with sparse gradients, by number."""
    tensors = enumerate(group.spec.gradients.tensors)
    return {number: tensor for number, tensor in tensors if group.is_sparse(number)}
