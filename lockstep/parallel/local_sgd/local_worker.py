"""The Worker of a replica that steps on its own, and averages with the others now and then.

Between two averages it is a device alone: a Worker of a Plan with one rank trains on this replica's
part of each batch, on its own parameters, and waits for nobody. Or a replica is a pipeline, and
each of its ranks has a Worker of a Plan with that pipeline alone. Evaluation and prediction divide
their batches as any data parallel Plan does, or hybrid; by then the replicas are alike.
"""

import math
from dataclasses import replace
from typing import Any

import torch

from lockstep.data.iterable.read_ahead import Read
from lockstep.errors import NonFiniteError
from lockstep.launch.health.failure import add_note
from lockstep.parallel.batch_run import StepBatch
from lockstep.parallel.build import build_worker, open_passes, what_it_has
from lockstep.parallel.exchange.engine import Endpoint
from lockstep.parallel.exchange.exchange_layout import exchange_spec, work_of_replica
from lockstep.parallel.local_sgd.averaging import Averaging
from lockstep.parallel.training_step import StepResult
from lockstep.parallel.update import PieceSlots, Updater
from lockstep.parallel.worker import Worker
from lockstep.parallel.workload import Workload
from lockstep.plan.makers.averaging import AveragedUpdate
from lockstep.plan.makers.replicas import part_of_replica


class LocalWorker(Worker):
    """See the module, and ``build_local_worker``.

    Args:
        work: what the replicas have in common.
        alone: trains this replica, or this rank's stages of it.
        averaging: with the others.
        options: see ``Worker``.
    """

    trains_apart = True
    has_own_optimizer = True

    def __init__(
        self, work: Workload, *, alone: Worker, averaging: Averaging, **options: Any
    ) -> None:
        super().__init__(work, groups=(), **options)
        assert isinstance(self.plan.update, AveragedUpdate)
        self.updater = alone.updater
        self._alone = alone
        self.replica = self.rank // self.plan.ranks_per_replica
        alone.first_share = self.plan.shares_of(self.replica)[0]
        if alone.board is not None and self.board is not None:  # its ranks stop together
            alone.board.wants_halt = self.board.wants_end
        self._averaging = averaging
        self._every = self.plan.update.every
        self._weight = 0.0  # of what was trained on since the replicas were alike
        self._num_steps = 0  # likewise
        self._is_over = False

    def train_step(self, batch: StepBatch) -> StepResult:
        """One step on this replica's part of the batch, of which the result tells.

        Raises:
            NonFiniteLossError, LossError: see ``Worker.train_step``; on this rank only.
        """
        assert self.board is not None
        self.board.step = batch.step
        if not self._num_steps:
            self._averaging.begin()
        self.board.glance()
        result = self._train_alone(batch)
        self._weight += result.weight
        self._num_steps += 1
        if self._num_steps == self._every:
            self.settle()
        if self.keeps_pace:
            self.barrier()
        return result

    def _train_alone(self, batch: StepBatch) -> StepResult:
        part = part_of_replica(self.plan, self.replica, len(batch.indices))
        if not part:
            return StepResult(total=0.0, weight=0.0, num_samples=0)
        self._alone.passes.reading = self.passes.reading
        try:
            own = batch.indices[part.start : part.stop]
            return self._alone.train_step(replace(batch, indices=own))
        except NonFiniteError as error:
            add_note(
                error,
                f"Shares and samples are counted within replica {self.replica}'s part of the "
                f"batch: samples {part.start} to {part.stop - 1}.",
            )
            raise

    def settle(self, *, is_last: bool = False) -> None:
        """Have the replicas be alike: average what they have come to, if anything.

        Each comes here when it is due, or when the user wants out: then all find that it is over.
        """
        if self._is_over:
            return
        assert self.board is not None
        told = self.board.tell([self._weight, is_last])
        total = math.fsum(weight for weight, _ in told[:: self.plan.ranks_per_replica])
        if total:
            self._averaging.average(self._weight / total)
        else:
            self.barrier()  # all have heard it before anybody tells anything else
        self._weight, self._num_steps = 0.0, 0
        self._is_over = any(last for _, last in told)

    @property
    def is_apart(self) -> bool:  # type: ignore[override]  # of any other Worker it is never so
        return self._num_steps > 0

    @property
    def is_halted(self) -> bool:
        if not self._num_steps or self.keeps_pace:
            return super().is_halted
        if self._alone.board is not None:
            return self._alone.is_halted
        return self.board is not None and self.board.wants_end()  # others are wherever they are

    def results_of_epoch(self, own: list[StepResult]) -> list[StepResult]:
        """All ranks of a replica know what it has done; the first tells."""
        if self._is_first:
            return own
        return [replace(one, total=0.0, weight=0.0, num_samples=0, is_skipped=False) for one in own]

    @property
    def _is_first(self) -> bool:
        """Of its replica."""
        return self.rank % self.plan.ranks_per_replica == 0

    def slots(self, *, with_stored: bool = False) -> list[PieceSlots]:
        """The first replica's are those that count."""
        return super().slots(with_stored=with_stored) if self.replica == 0 else []

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """The first replica's."""
        return self._alone.gradients() if self.replica == 0 else {}

    def bind_again(self) -> None:
        self._alone.bind_again()

    def gather_slots(self) -> None:
        """No other replica's count."""

    def reads(self, indices: torch.Tensor, step: int | None = None, turn: int = 0) -> list[Read]:
        if step is None:
            return super().reads(indices)
        part = part_of_replica(self.plan, self.replica, len(indices))
        return self._alone.reads(indices[part.start : part.stop], step, turn) if part else []

    def leaves_a_rank_idle(self, num_samples: int) -> bool:
        """Buffers are averaged."""
        return False


def build_local_worker(work: Workload, endpoint: Endpoint) -> LocalWorker:
    """Put the parts of a rank that trains together; for the arguments see ``build_worker``."""
    assert work.updater is not None
    exchange = endpoint.exchange()
    in_common = replace(work, updater=None, functions=())
    return LocalWorker(
        in_common,
        alone=build_alone(work, endpoint, work.updater),
        averaging=Averaging(work, endpoint.rank, exchange, endpoint.spec.groups),
        passes=open_passes(in_common, endpoint, exchange, ()),
        exchange=exchange,
        **what_it_has(work, endpoint.rank),
    )


def build_alone(work: Workload, endpoint: Endpoint, updater: Updater) -> Worker:
    """The Worker of one replica by itself: of what one device would do with its part of a batch.

    Of a replica that is a pipeline it is one rank's.
    """
    replica, rank = divmod(endpoint.rank, work.plan.ranks_per_replica)
    own = replace(work_of_replica(work, replica), updater=updater)
    spec = exchange_spec(own)
    region = None
    if own.plan.pipeline is not None:
        assert endpoint.region is not None
        offset = endpoint.spec.mail_offsets[replica - work.plan.num_replicas]
        region = endpoint.region.part(offset, spec.num_bytes)
    return build_worker(
        own,
        Endpoint(
            plan=own.plan,
            spec=spec,
            rank=rank,
            region=region,
            look_around=endpoint.look_around,
            device=endpoint.device,
        ),
    )
