"""The Worker of a rank with parameter servers, where workers may be some steps apart.

A worker takes a part of a batch, brings its copy of the weights up to date, and has a Worker of a
Plan with one rank compute, whose update is to push: the gradients go to this worker's row in shared
memory, and servers come for their pieces. A server adds up what comes of a batch, weighted by
samples, and when all parts have come it steps. So every batch is one update, of all its samples,
whoever has computed what; batches may be finished in another order than they were begun.

When a process dies all others are ended, and the first worker sees how far the servers are
(``stand``): fresh processes go on from there. Parts that were under way are computed anew; what a
server has added up of them goes with it. If it has died within an update its second copy undoes
that.

Where something goes on between steps that concerns all ranks, they train synchronously
(``keeps_pace``); so does a Plan whose staleness is 0, without any of this.
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
from lockstep.parallel.owned_group import OwnedGroup
from lockstep.parallel.parameter_server.push_pull import OwnWeights, PulledWeights, Pusher
from lockstep.parallel.parameter_server.server import ParameterServer
from lockstep.parallel.parameter_server.slot_notes import SlotNotes
from lockstep.parallel.parameter_server.update_rollback import SecondCopy
from lockstep.parallel.parameter_server.worker_messages import Inbox, Outbox
from lockstep.parallel.parameter_server.worker_proxy import FreshWeights, WorkerProxy
from lockstep.parallel.training_step import StepResult
from lockstep.parallel.update import PieceSlots
from lockstep.parallel.worker import Worker
from lockstep.parallel.workload import Workload
from lockstep.plan.decision import ServedUpdate
from lockstep.plan.layout import Piece
from lockstep.plan.shares import num_filled_shares, share_bounds

# The only group of a Plan without stages.
_GROUP = 0


@dataclass(frozen=True, kw_only=True)
class ServerProgress:
    """Where workers and servers were in an epoch when a process died.

    Attributes:
        table: what is in the weights.
        slots: by server, what its updater knows beside what lies in shared memory.
        num_past: batches of the task under way in the epoch that are before ``table.oldest``.
        num_ended: those whose steps the first worker has ended.
    """

    table: QueueProgress
    slots: Sequence[Sequence[PieceSlots]]
    num_past: int
    num_ended: int


class AsyncWorker(Worker):
    """One rank, a worker or a server; see the module, and ``async_worker_build``.

    Args:
        work: what all ranks work on.
        region: where the table of work lies, what servers note of slots, and second copies, and
        offsets: where each begins there.
        served: the pieces of each server.
        alone: computes a worker's parts, with a ``Pusher``; None on a server.
        remote: workers of other hosts for whom this rank speaks.
        mail: to their hosts; None where there are none.
        options: see ``Worker``.
    """

    def __init__(
        self,
        work: Workload,
        *,
        region: SharedRegion,
        offsets: Sequence[int],
        served: Sequence[Sequence[Piece]],
        alone: Worker | None,
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
        self._notes = SlotNotes(region, offsets[1], group.spec.gradients.tensors, len(served))
        self._copies = (
            SecondCopy.each(group, self.updater, served, region, offsets[2])
            if update.replicas > 1
            else []
        )
        self._stand: ServerProgress | None = None  # where this epoch is gone on from
        self._losses: Sequence[float] = ()  # of the last epoch
        self._is_held = False
        self._alone = alone
        self._server: ParameterServer | None = None
        if alone is None:
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
            assert isinstance(alone.updater, Pusher)
            alone.updater.push_to = partial(self.exchange.write, _GROUP, self.rank)
            self._weights = self._own_weights(group, served)
        self._opened: dict[int, StepBatch] = {}  # batches that may have parts
        self._first_step = 0  # since all ranks have met
        self._num_ended = 0
        self._is_under_way = False
        self._num_settled = 0
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

    @property
    def trains_apart(self) -> bool:  # type: ignore[override]  # of any other Worker it is fixed
        return not self.keeps_pace

    def train_step(self, batch: StepBatch) -> StepResult:
        """What this rank can do of a batch, or is left to do of older ones; the result tells."""
        if self.keeps_pace:
            return super().train_step(batch)
        assert self.board is not None
        self.board.step = batch.step
        if not self._is_under_way:
            self._begin(batch.step)
        self.board.glance()
        result = self._train_apart(batch)
        self._num_ended += 1
        return result

    def _train_apart(self, batch: StepBatch) -> StepResult:
        step = batch.step
        if self._server is not None:
            self._server.serve(lambda: self._queue.is_applied(step) or self.is_halted)
            return _joined([])
        oldest = self._oldest_open(step)
        self._opened = {number: one for number, one in self._opened.items() if number >= oldest}
        self._opened[step] = batch
        return _joined(list(self._worked_off(batch)))

    def _begin(self, step: int) -> None:
        """All ranks are here."""
        if self.rank == self._beginner:
            self._queue.begin(step, None if self._stand is None else self._stand.table)
        if self._server is not None:
            self._server.begin(is_restartable=self._can_go_on)
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
        """The oldest batch of which there may be parts."""
        return self._queue.oldest_open(step)

    def _worked_off(self, batch: StepBatch) -> Iterator[StepResult]:
        """Compute parts until there is nothing left of the batch that nobody has taken."""
        step, num_parts = batch.step, self._num_parts(len(batch.indices))
        while not self.is_halted:
            part = self._queue.take(step, num_parts)
            if part is not None:
                yield self._compute(part, batch.observe)
            elif self._queue.is_opened(step):
                return
            else:
                self._queue.wait(lambda: self._queue.may_take(step) or self.is_halted)

    def _work_off_what_is_open(self) -> None:
        """After a halt: what was begun of a batch is brought to its end."""
        for step, batch in sorted(self._opened.items()):
            while self._queue.is_opened(step):
                part = self._queue.take(step, self._num_parts(len(batch.indices)))
                if part is None:
                    break
                self._compute(part, None)

    def _num_parts(self, num_samples: int) -> int:
        """Parts that are not empty: those of the replicas."""
        filled = num_filled_shares(num_samples, self.plan.num_shares)
        return -(-filled // self.plan.shares_per_row)

    def _compute(self, part: WorkItem, observe: Observe | None) -> StepResult:
        assert self._alone is not None
        self._await_room()
        batch = self._opened[part.step]
        indices = batch.indices
        shares = self.plan.shares_of(part.number)
        bounds = share_bounds(len(indices), self.plan.num_shares)
        start, stop = bounds[shares[0]][0], bounds[shares[-1]][1]
        alone = self._alone
        alone.passes.reading = self.passes.reading
        alone.first_share, alone.batch_size = shares[0], len(indices)
        try:
            with self._weights.in_place():
                own = replace(batch, indices=indices[start:stop], observe=observe)
                result = alone.train_step(own)
        except NonFiniteError as error:
            add_note(
                error,
                f"Shares and samples are counted within a worker's part of the batch: samples "
                f"{start} to {stop - 1}. Other parts of it, and other batches, may be under way.",
            )
            raise
        weight = 0.0 if result.is_skipped else result.weight
        losses = float(result.total), result.weight, result.num_samples, result.is_skipped
        self._hand_in(Push(part, self._num_parts(len(indices)), weight, losses))
        return result

    def _await_room(self) -> None:
        """Before a part is computed: wait until there is room for its gradients."""
        self._queue.wait(self._queue.is_taken)
        # No pass of the exchange, of which all ranks make as many; parts go to whoever is free.
        self.exchange.rows_of(_GROUP).begin_pass()
        self._pull()

    def _pull(self) -> None:
        assert isinstance(self._weights, PulledWeights)
        self._weights.pull()

    def _hand_in(self, push: Push) -> None:
        self._queue.push(push)

    # --- together --------------------------------------------------------------------------------

    def settle(self, *, is_last: bool = False) -> None:
        """Have all that was begun come to the weights, on all ranks."""
        if not self._is_under_way and self._stand is not None:  # nothing was left of the epoch
            self._losses, self._stand = self._stand.table.losses, None
        if self._is_over or not self._is_under_way:
            return
        self._num_settled += 1
        if self._server is None:
            self._settle_work()
        else:
            self._server.serve(lambda: self._queue.are_settled(self._num_settled))
            self._server.end()
        assert self.board is not None
        own = is_last, self._queue.longest_lead(), self._queue.losses()[-1]
        told = self.board.tell([float(number) for number in own])
        self._is_over = any(last for last, *_ in told)
        _, self._longest_lead, num_updates = map(int, told[-1])  # a server's, which knows
        self._opened.clear()
        self._losses, self._stand, self._is_under_way = self._queue.losses(), None, False
        if self._alone is not None and self.updater is not None:
            self.updater.count_steps(num_updates)

    def _settle_work(self) -> None:
        """A worker's part of that."""
        self._work_off_what_is_open()
        self._queue.settle(self._num_settled)
        self._queue.wait(self._queue.is_over)

    def results_of_epoch(self, own: list[StepResult]) -> list[StepResult]:
        """The first worker tells of all: who has computed a part may have died since."""
        if self.keeps_pace or not self._can_go_on:
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
    def is_apart(self) -> bool:  # type: ignore[override]  # as above
        return self._is_under_way

    # --- when a process has died -----------------------------------------------------------------

    @property
    def _can_go_on(self) -> bool:
        """Whether shared memory has all that an epoch has come to."""
        is_one_host = not self.plan.hosts
        takes_notes = self.updater is not None and self.updater.takes_notes
        return is_one_host and self.goes_on and takes_notes

    def hold(self) -> None:
        """On the first worker, before the others are ended: have no update be cut off."""
        self._is_held = self._is_under_way and self._can_go_on and self._queue.hold_servers()

    def stand(self) -> ServerProgress | None:
        """On the first worker, when the others have ended: where to go on; None if nobody can."""
        if not self._is_under_way:
            return self._stand
        torn = self._queue.torn_servers()
        if not self._is_held or (torn and not self._copies):
            return None
        shortest = min(self._notes.lengths(self._queue.slot))
        if shortest <= 0:  # a server had not begun, or what it knew is not known
            return None if shortest else self._stand
        for server in torn:
            self._copies[server].restore()
        table = self._queue.stand()
        return ServerProgress(
            table=table,
            slots=self._notes.read(self._queue.slot),
            num_past=table.oldest - self._first_step,
            num_ended=self._num_ended,
        )

    def go_on_from(self, stand: ServerProgress | None) -> None:
        """The epoch that is about to begin goes on from there, or from its beginning."""
        self._stand, self._losses = stand, ()
        if stand is not None and self._server is not None:
            assert self.updater is not None
            self.updater.take_notes(stand.slots[self._server.number])

    # --- what others ask -------------------------------------------------------------------------

    @property
    def is_halted(self) -> bool:
        if not self._is_under_way:
            return super().is_halted
        assert self.board is not None  # others are wherever they are
        if self.board.wants_end():
            self._halt()
        return self._is_told_to_halt

    def _halt(self) -> None:
        """Have all ranks come to an end."""
        self._queue.halt()

    @property
    def _is_told_to_halt(self) -> bool:
        return self._queue.is_halted

    def epoch_logs(self) -> dict[str, float]:
        return {"staleness": 0 if self.keeps_pace else self._longest_lead}

    def reads(self, indices: torch.Tensor, step: int | None = None, turn: int = 0) -> list[Read]:
        """In training nobody knows before who reads what."""
        return super().reads(indices, step, turn) if step is None or self.keeps_pace else []

    def leaves_a_rank_idle(self, num_samples: int) -> bool:
        """The first worker's buffers count."""
        return self.keeps_pace and super().leaves_a_rank_idle(num_samples)

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
    """What a rank has computed of some parts, as one step."""
    return StepResult(
        total=math.fsum(result.total for result in results),
        weight=math.fsum(result.weight for result in results),
        num_samples=sum(result.num_samples for result in results),
        is_skipped=any(result.is_skipped for result in results),
        parts=[sums for result in results for sums in result.parts],
        num_bad=sum(result.num_bad for result in results),
    )


def _sparse(group: OwnedGroup) -> dict[int, TensorSpec]:
    """The parameters of a group whose gradients are of some rows only, by number."""
    tensors = enumerate(group.spec.gradients.tensors)
    return {number: tensor for number, tensor in tensors if group.is_sparse(number)}
