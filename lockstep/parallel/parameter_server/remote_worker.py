"""The Worker of a worker on another host than the servers, which have a ``worker_proxy`` for it.

It requests its next part before it computes the current one, so computation overlaps with sending
the last gradients and receiving the next part and the changed weights. The last part that it is
granted of a batch is computed in the next step.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lockstep.comm.collectives.gradients import Gradients
from lockstep.comm.p2p.tcp_p2p import MailChannels
from lockstep.comm.shared_memory.work_queue import Push
from lockstep.comm.sparse.sparse_rows import SparseRows
from lockstep.parallel.batch_run import StepBatch
from lockstep.parallel.owned_group import OwnedGroup
from lockstep.parallel.parameter_server.async_worker import AsyncWorker
from lockstep.parallel.parameter_server.push_pull import OwnWeights, Pusher, SentWeights
from lockstep.parallel.parameter_server.worker_messages import (
    Ask,
    Done,
    Grant,
    Halted,
    HandedIn,
    Inbox,
    Outbox,
)
from lockstep.parallel.training_step import StepResult
from lockstep.parallel.workload import Workload
from lockstep.plan.layout import Piece


class RemoteWorker(AsyncWorker):
    """One rank.

    Args:
        work: common to all ranks.
        server: the rank that is this one's proxy.
        mail: to its host.
        options: see ``AsyncWorker``.
    """

    _weights: SentWeights

    def __init__(self, work: Workload, *, server: int, mail: MailChannels, **options: Any) -> None:
        super().__init__(work, mail=mail, **options)
        assert self._inner is not None
        assert isinstance(self._inner.updater, Pusher)
        self._inner.updater.push_to = self._keep
        self._asks = Outbox(mail, self.rank, "asks", server)
        self._grants = Inbox(mail, self.rank, "grants", server)
        self._pushes = Outbox(mail, self.rank, "pushes", server)
        self._gradients: list[torch.Tensor | SparseRows | None] = []  # of the current part
        self._next: Grant | None = None  # granted and not yet computed
        self._oldest = 0  # the oldest batch that is not in the weights
        self._late: list[StepResult] = []  # results of parts computed after the last step
        self._has_halted = False

    def _own_weights(self, group: OwnedGroup, served: Sequence[Sequence[Piece]]) -> OwnWeights:
        return SentWeights(group, served)

    def _begin(self, step: int) -> None:
        self._weights.begin()
        self._late, self._oldest, self._has_halted = [], step, False
        super()._begin(step)

    # --- a step ----------------------------------------------------------------------------------

    def _oldest_open(self, step: int) -> int:
        return self._oldest

    def _computed_parts(self, batch: StepBatch) -> Iterator[StepResult]:
        """Compute parts of the batch until all are taken, except the last one granted."""
        self._ask(batch, opens=True)
        if self._next is not None:
            yield self._compute_next()
        while self._is_granted():
            assert self._next is not None
            if not self._next.has_more:
                return
            self._ask(batch, opens=True)
            yield self._compute_next()

    def _finish_open_batches(self) -> None:
        if self._next is not None:
            self._late.append(self._compute_next())
        for _, batch in sorted(self._opened.items()):
            self._ask(batch, opens=False)
            while self._is_granted():
                self._late.append(self._compute_next())
                self._ask(batch, opens=False)

    def _ask(self, batch: StepBatch, *, opens: bool) -> None:
        self._asks.put(Ask(batch.step, self._num_parts(len(batch.indices)), opens))

    def _is_granted(self) -> bool:
        """Receive the next grant; True if it has a part."""
        assert self._next is None
        grant = self._grants.take(Grant)
        self._oldest = grant.oldest
        self._has_halted |= grant.is_halted
        if grant.part is not None:
            self._next = grant
        return grant.part is not None

    def _compute_next(self) -> StepResult:
        grant, self._next = self._next, None
        assert grant is not None
        assert grant.part is not None
        self._weights.take(grant.weights)
        return self._compute(grant.part, self._opened[grant.part.step].observe)

    # --- what it computes ------------------------------------------------------------------------

    def _wait_for_row(self) -> None:
        self._gradients = []

    def _keep(self, gradients: Gradients) -> None:
        self._gradients = [
            SparseRows.of_gradient(one) if one is not None and one.is_sparse else one
            for one in gradients
        ]

    def _push(self, push: Push) -> None:
        self._pushes.put(HandedIn(push, self._gradients))

    # --- together --------------------------------------------------------------------------------

    def _finish_work(self) -> None:
        self._finish_open_batches()
        for box in (self._pushes, self._asks):
            box.put(Done(self._num_synchronised))
        self._weights.take(self._grants.take(Grant).weights)
        if self.rank == self.exchange.ranks_here.start:
            self._weights.show()

    def results_of_epoch(self, own: list[StepResult]) -> list[StepResult]:
        late, self._late = self._late, []
        return [*super().results_of_epoch(own), *late]

    def _halt(self) -> None:
        if not self._has_halted:
            self._has_halted = True
            self._pushes.put(Halted())

    @property
    def _must_halt(self) -> bool:
        return self._has_halted
