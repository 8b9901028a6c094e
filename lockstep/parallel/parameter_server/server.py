"""An asynchronous parameter server: it sums pushed gradients, and steps when a batch is complete.

Synchronous servers (``staleness=0``) update in ``parallel.update_worker``.
"""

from collections.abc import Callable, Sequence

import torch

from lockstep.comm.exchange import Exchange
from lockstep.comm.shared_memory.work_queue import Push, WorkQueue
from lockstep.comm.sparse.row_versions import RowVersions
from lockstep.parallel.owned_group import OwnedGroup
from lockstep.parallel.parameter_server.batch_sum import BatchSum
from lockstep.parallel.parameter_server.slot_journal import SlotJournal
from lockstep.parallel.parameter_server.update_rollback import SecondCopy
from lockstep.parallel.parameter_server.worker_proxy import WorkerProxy
from lockstep.parallel.updater_interface import BoundPiece, Updater


class ParameterServer:
    """Steps the pieces of the weights that one rank owns.

    Args:
        number: of the server, among the servers.
        queue: the table of work.
        exchange: where workers write gradients.
        group: the parameters.
        pieces: those that this server owns.
        updater: steps them.
        notes: where servers record their slots.
        copy: undoes an interrupted update; None without one.
        proxies: for workers on other hosts that use this server.
        row_versions: where changed rows are recorded for other hosts; None on one host.
    """

    def __init__(
        self,
        number: int,
        queue: WorkQueue,
        *,
        exchange: Exchange,
        group: OwnedGroup,
        pieces: Sequence[BoundPiece],
        updater: Updater,
        notes: SlotJournal,
        copy: SecondCopy | None,
        proxies: Sequence[WorkerProxy],
        row_versions: RowVersions | None,
    ) -> None:
        self.number = number
        self.proxies = proxies
        self._queue = queue
        self._exchange, self._group, self._pieces = exchange, group, pieces
        self._updater, self._notes, self._copy = updater, notes, copy
        self._row_versions = row_versions
        self._sums: dict[int, BatchSum] = {}  # of incomplete batches, by step
        self._is_restartable = False

    def begin(self, *, is_restartable: bool) -> None:
        """Training begins; if it is restartable, record the slots after every update."""
        self._is_restartable = is_restartable
        if self._copy is not None:
            self._copy.take()
        self._note_slots(self._queue.slot(self.number))
        for proxy in self.proxies:
            proxy.begin()

    def serve(self, is_over: Callable[[], bool]) -> None:
        """Add up pushed gradients, and step, until ``is_over``."""
        while not is_over():
            for proxy in self.proxies:
                proxy.check()
            found = self._queue.next_push()
            if found is None:
                self._queue.wait(lambda: is_over() or self._has_push_or_error())
                continue
            worker, push = found
            step = push.part.step
            if not self._queue.is_applied(step):
                self._add(worker, push)
            self._queue.note_taken(worker)
            if step in self._sums and not self._sums[step].missing:
                self._apply(step, self._sums.pop(step))

    def end(self) -> None:
        """All batches are in the weights."""
        for proxy in self.proxies:
            proxy.end()
        if self._copy is not None:
            self._copy.check(self.number)

    def _has_push_or_error(self) -> bool:
        has_failed = any(proxy.error is not None for proxy in self.proxies)
        return has_failed or self._queue.next_push() is not None

    def _add(self, worker: int, push: Push) -> None:
        total = self._sums.setdefault(push.part.step, BatchSum(missing=push.num_parts))
        total.losses = [old + new for old, new in zip(total.losses, push.losses, strict=True)]
        if push.weight:
            rows = self._exchange.rows_of(self._group.number)
            gradients = [rows.published(worker, piece) for piece in self._group.pieces]
            total.add(gradients, push.weight)
        total.missing -= 1

    def _apply(self, step: int, total: BatchSum) -> None:
        with self._queue.alone():
            next_slot = 1 - self._queue.slot(self.number)
            with self._queue.updating(step, (*total.losses, bool(total.weight))):
                if total.weight:
                    for bound, gradient in zip(self._pieces, total.means(), strict=True):
                        bound.tensor.grad = gradient
                    self._updater.step()
                    self._note_changed_rows()
                self._note_slots(next_slot)
            if self._copy is not None and total.weight:
                self._copy.follow(
                    {bound.piece.parameter: bound.tensor.grad for bound in self._pieces}
                )

    def _note_changed_rows(self) -> None:
        if self._row_versions is None:
            return
        version = self._queue.version(self.number)
        for bound in self._pieces:
            gradient: torch.Tensor | None = bound.tensor.grad
            if gradient is not None and gradient.is_sparse:
                self._row_versions.note(bound.piece, gradient.coalesce().indices()[0], version)

    def _note_slots(self, slot: int) -> None:
        if self._is_restartable:
            self._notes.write(self.number, slot, self._updater.slots())
