"""The Worker of a replica that takes local steps, and averages with the others periodically.

Between two averages an inner Worker trains on this replica's part of each batch, on its own
parameters, without waiting: its Plan has one rank, or one pipeline, of which it is a rank.
Evaluation and prediction divide batches as data parallel or hybrid Plans do; the replicas are
averaged by then.
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
from lockstep.parallel.local_steps import LocalSteps
from lockstep.parallel.training_step import StepResult
from lockstep.parallel.updater_interface import PieceSlots, Updater
from lockstep.parallel.worker import Worker
from lockstep.parallel.workload import Workload
from lockstep.plan.averaging import AveragedUpdate
from lockstep.plan.makers.replicas import part_of_replica


class LocalWorker(Worker, LocalSteps):
    """See the module, and ``build_local_worker``.

    Args:
        work: common to the replicas.
        inner: trains this replica, or this rank's stages of it.
        averaging: averages the replicas.
        options: see ``Worker``.
    """

    has_own_optimizer = True

    def __init__(
        self, work: Workload, *, inner: Worker, averaging: Averaging, **options: Any
    ) -> None:
        super().__init__(work, groups=(), **options)
        assert isinstance(self.plan.update, AveragedUpdate)
        self.updater = inner.updater
        self._inner = inner
        self.replica = self.rank // self.plan.ranks_per_replica
        self._first_share = self.plan.shares_of(self.replica)[0]
        self._is_synchronous = False
        if inner.board is not None and self.board is not None:  # its ranks stop together
            inner.board.wants_halt = self.board.wants_end
        self._averaging = averaging
        self._every = self.plan.update.every
        self._weight = 0.0  # of the losses since the last average
        self._num_steps = 0  # since the last average
        self._is_over = False

    def begin_training(
        self, *, is_synchronous: bool, is_restartable: bool, is_watched: bool
    ) -> None:
        self._is_synchronous = is_synchronous

    @property
    def local_steps(self) -> LocalSteps:
        return self

    def train_step(self, batch: StepBatch) -> StepResult:
        """Train on this replica's part of the batch; the result is of that part.

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
            self.synchronise()
        if self._is_synchronous:
            self.barrier()
        return result

    def _train_alone(self, batch: StepBatch) -> StepResult:
        part = part_of_replica(self.plan, self.replica, len(batch.indices))
        if not part:
            return StepResult(total=0.0, weight=0.0, num_samples=0)
        self._inner.passes.reading = self.passes.reading
        try:
            own = batch.indices[part.start : part.stop]
            part_of_batch = replace(batch, indices=own, first_share=self._first_share)
            return self._inner.train_step(part_of_batch)
        except NonFiniteError as error:
            add_note(
                error,
                f"Shares and samples are counted within replica {self.replica}'s part of the "
                f"batch: samples {part.start} to {part.stop - 1}.",
            )
            raise

    def synchronise(self, *, is_last: bool = False) -> None:
        """Average the replicas, if any has trained since the last average.

        Every rank calls it when an average is due, or when the user stops training: then all
        ranks learn that it is the last one.
        """
        if self._is_over:
            return
        assert self.board is not None
        weights = self.board.all_gather([self._weight, is_last])
        total = math.fsum(weight for weight, _ in weights[:: self.plan.ranks_per_replica])
        if total:
            self._averaging.average(self._weight / total)
        else:
            self.barrier()  # all have read the values before any rank writes new ones
        self._weight, self._num_steps = 0.0, 0
        self._is_over = any(last for _, last in weights)

    @property
    def has_diverged(self) -> bool:
        return self._num_steps > 0

    @property
    def is_halted(self) -> bool:
        if not self._num_steps or self._is_synchronous:
            return super().is_halted
        if self._inner.board is not None:
            return self._inner.is_halted
        return self.board is not None and self.board.wants_end()  # others are at other steps

    def results_of_epoch(self, own: list[StepResult]) -> list[StepResult]:
        """The first rank of each replica returns its results; all its ranks have the same."""
        if self._is_first:
            return own
        return [replace(one, total=0.0, weight=0.0, num_samples=0, is_skipped=False) for one in own]

    @property
    def _is_first(self) -> bool:
        """True on the first rank of a replica."""
        return self.rank % self.plan.ranks_per_replica == 0

    def slots(self, *, with_stored: bool = False) -> list[PieceSlots]:
        """The first replica's slots."""
        return super().slots(with_stored=with_stored) if self.replica == 0 else []

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """The first replica's gradients."""
        return self._inner.gradients() if self.replica == 0 else {}

    def rebind(self) -> None:
        self._inner.rebind()

    def gather_slots(self) -> None:
        """Nothing to gather: slots are taken from the first replica."""

    def reads(
        self, indices: torch.Tensor, step: int | None = None, turn: int = 0, first_share: int = 0
    ) -> list[Read]:
        if step is None:
            return super().reads(indices)
        part = part_of_replica(self.plan, self.replica, len(indices))
        own = indices[part.start : part.stop]
        return self._inner.reads(own, step, turn, self._first_share) if part else []

    def leaves_a_rank_idle(self, num_samples: int) -> bool:
        """Buffers are averaged."""
        return False


def build_local_worker(work: Workload, endpoint: Endpoint) -> LocalWorker:
    """The Worker of a rank that takes local steps; for the arguments see ``build_worker``."""
    assert work.updater is not None
    exchange = endpoint.exchange(endpoint.process_groups())
    in_common = replace(work, updater=None, functions=())
    return LocalWorker(
        in_common,
        inner=build_inner_worker(work, endpoint, work.updater),
        averaging=Averaging(work, endpoint.rank, exchange, endpoint.spec.groups),
        passes=open_passes(in_common, endpoint, exchange, ()),
        exchange=exchange,
        **what_it_has(work, endpoint.rank),
    )


def build_inner_worker(work: Workload, endpoint: Endpoint, updater: Updater) -> Worker:
    """The Worker that trains one replica, or one rank of a replica that is a pipeline."""
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
