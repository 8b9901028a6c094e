"""The proxy of a worker on another host: two threads of a server.

One takes parts for the worker, and sends them with the changed weights; the other writes the
worker's gradients to its row. So servers find all workers in shared memory.
"""

import threading
from collections.abc import Callable, Sequence

from lockstep.comm.collectives.gradients import cut_piece
from lockstep.comm.collectives.shm_gradient_buffer import SharedGradientBuffer
from lockstep.comm.shared_memory.work_queue import WorkQueue
from lockstep.comm.sparse.row_versions import RowVersions
from lockstep.comm.sparse.sparse_rows import SparseRows
from lockstep.parallel.owned_group import OwnedGroup
from lockstep.parallel.parameter_server.worker_messages import (
    Ask,
    Done,
    Fresh,
    Grant,
    Halted,
    HandedIn,
    Inbox,
    Outbox,
)
from lockstep.plan.layout import Piece


class FreshWeights:
    """The weights that servers have changed since the last call.

    Args:
        queue: has the versions of the weights.
        group: the parameters.
        served: the pieces of each server.
        changed: the changed rows of sparse pieces.
    """

    def __init__(
        self,
        queue: WorkQueue,
        group: OwnedGroup,
        served: Sequence[Sequence[Piece]],
        changed: RowVersions,
    ) -> None:
        self._queue = queue
        self._group = group
        self._served = served
        self._changed = changed
        self._versions = [0 for _ in served]

    def begin(self) -> None:
        """All hosts have the present weights."""
        self._versions = [self._queue.version(server) for server in range(len(self._served))]

    def take(self) -> list[Fresh]:
        """All changes."""
        return [
            self._of(server)
            for server, version in enumerate(self._versions)
            if self._queue.version(server) != version
        ]

    def _of(self, server: int) -> Fresh:
        """The changes of one server, copied between two of its updates."""
        while True:
            version = self._queue.settled_version(server)
            fresh = self._copied(server)
            if self._queue.version(server) == version:
                self._versions[server] = version
                return fresh

    def _copied(self, server: int) -> Fresh:
        dense, rows = [], []
        for piece in self._served[server]:
            member = self._group.members[piece.parameter].detach()
            cut = cut_piece(member, piece)
            if self._group.is_sparse(piece.parameter):
                numbers = self._changed.since(piece, self._versions[server])
                rows.append(SparseRows(numbers, cut.view(-1, member.shape[1])[numbers]))
            else:
                dense.append(cut.clone())
        return Fresh(server, dense, rows)


class ProxyEndedError(Exception):
    """The proxy is no longer needed."""


class WorkerProxy:
    """The proxy of one worker.

    Args:
        worker: its rank.
        queue_of: makes the worker's view of the queue, from the check that runs while waiting.
        asks: its requests.
        grants: the replies.
        pushes: its gradients.
        rows: the gradients of all workers, for this proxy alone.
        weights: makes the ``FreshWeights`` of a view of the queue.

    Attributes:
        error: that ended a thread; or None.
    """

    def __init__(
        self,
        worker: int,
        *,
        queue_of: Callable[[Callable[[float], None]], WorkQueue],
        asks: Inbox,
        grants: Outbox,
        pushes: Inbox,
        rows: SharedGradientBuffer,
        weights: Callable[[WorkQueue], FreshWeights],
    ) -> None:
        self.error: BaseException | None = None
        self._worker = worker
        self._asks, self._grants, self._pushes = asks, grants, pushes
        self._rows = rows
        self._is_abandoned = False
        # Each thread has its own view to wait on.
        self._taking, self._pushing = (queue_of(self._look_around) for _ in range(2))
        self._weights = weights(self._taking)
        self._threads: list[threading.Thread] = []

    def begin(self) -> None:
        """Begin an epoch; the worker has the present weights."""
        self._weights.begin()
        self._threads = [
            threading.Thread(target=self._run, args=(part,), name="lockstep-proxy", daemon=True)
            for part in (self._grant, self._hand_in)
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """End an epoch, after the worker has pushed all its parts."""
        for thread in self._threads:
            thread.join()
        self.check()

    def check(self) -> None:
        """Raise the error of a thread."""
        if self.error is not None:
            raise self.error

    def abandon(self) -> None:
        """End the threads after a failure, when the mail is closed."""
        self._is_abandoned = True
        for thread in self._threads:
            thread.join()

    def _look_around(self, waited_seconds: float) -> None:
        if self._is_abandoned:
            raise ProxyEndedError

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # raised in the thread that serves
            self.error = error

    # --- the thread that grants parts ------------------------------------------------------------

    def _grant(self) -> None:
        while isinstance(message := self._asks.take(Ask, Done), Ask):
            self._grants.put(self._granted(message))
        queue, times = self._taking, message.times
        queue.wait(lambda: queue.are_settled(times))
        self._grants.put(Grant(None, False, 0, queue.is_halted, self._weights.take()))

    def _granted(self, ask: Ask) -> Grant:
        queue, part = self._taking, None
        while not queue.is_halted or not ask.opens:
            if ask.opens or queue.is_opened(ask.step):
                part = queue.take(ask.step, ask.num_parts)
            if part is not None or not ask.opens or queue.is_opened(ask.step):
                break
            queue.wait(lambda: queue.may_take(ask.step) or queue.is_halted)
        return Grant(
            part=part,
            has_more=part is not None and queue.has_free(ask.step),
            oldest=queue.oldest_open(ask.step),
            is_halted=queue.is_halted,
            weights=[] if part is None else self._weights.take(),
        )

    # --- the thread that receives gradients ------------------------------------------------------

    def _hand_in(self) -> None:
        while not isinstance(message := self._pushes.take(HandedIn, Halted, Done), Done):
            if isinstance(message, Halted):
                self._pushing.halt()
            else:
                self._push(message)
        self._pushing.settle(message.times)

    def _push(self, message: HandedIn) -> None:
        self._pushing.wait(self._pushing.is_taken)
        if message.gradients:
            self._rows.begin_pass()
            self._rows.write(
                self._worker,
                [
                    one.as_gradient(len(self._rows.base(number)))
                    if isinstance(one, SparseRows)
                    else one
                    for number, one in enumerate(message.gradients)
                ],
            )
        self._pushing.push(message.push)
