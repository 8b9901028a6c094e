"""The Worker of a replica that steps on its own, and averages with the others now and then.

Between two averages it is a device alone: a Worker of a Plan with one rank trains on this replica's
part of each batch, on its own parameters, and waits for nobody. Evaluation and prediction divide
their batches as any data parallel Plan does; by then the replicas are alike.
"""

import math
from dataclasses import replace
from typing import Any

import msgspec
import torch

from lockstep.data.read_ahead import Read
from lockstep.errors import NonFiniteError
from lockstep.launch.failure import add_note
from lockstep.parallel.averaging import Averaging
from lockstep.parallel.build import build_worker, ruled_buffers
from lockstep.parallel.engine import Endpoint
from lockstep.parallel.exchange_layout import exchange_spec
from lockstep.parallel.groups import parameter_groups
from lockstep.parallel.model_passes import ModelPasses
from lockstep.parallel.passes import StepBatch
from lockstep.parallel.training_step import StepResult
from lockstep.parallel.update import PieceSlots, Updater
from lockstep.parallel.worker import Worker
from lockstep.parallel.workload import Workload
from lockstep.plan.averaging import AveragedUpdate
from lockstep.plan.decision import LocalUpdate
from lockstep.plan.shares import share_bounds
from lockstep.plan.spec import Plan


class LocalWorker(Worker):
    """See the module, and ``build_local_worker``.

    Args:
        work: what the replicas have in common.
        alone: trains this replica.
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
        alone.first_share = self.plan.shares_of(self.rank)[0]
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
        result = self._train_alone(batch)
        self._weight += result.weight
        self._num_steps += 1
        if self._num_steps == self._every:
            self.settle()
        if self.keeps_pace:
            self.barrier()
        return result

    def _train_alone(self, batch: StepBatch) -> StepResult:
        part = self._part_of(len(batch.indices))
        if not part:
            return StepResult(total=0.0, weight=0.0, num_samples=0)
        self._alone.passes.reading = self.passes.reading
        try:
            own = batch.indices[part.start : part.stop]
            return self._alone.train_step(replace(batch, indices=own))
        except NonFiniteError as error:
            add_note(
                error,
                f"Shares and samples are counted within replica {self.rank}'s part of the batch: "
                f"samples {part.start} to {part.stop - 1}.",
            )
            raise

    def _part_of(self, num_samples: int) -> range:
        """The samples of a batch that this replica trains on."""
        shares = self.plan.shares_of(self.rank)
        bounds = share_bounds(num_samples, self.plan.num_shares)
        return range(bounds[shares[0]][0], bounds[shares[-1]][1])

    def settle(self, *, is_last: bool = False) -> None:
        """Have the replicas be alike: average what they have come to, if anything.

        Each comes here when it is due, or when the user wants out: then all find that it is over.
        """
        if self._is_over:
            return
        assert self.board is not None
        told = self.board.tell([self._weight, is_last])
        total = math.fsum(weight for weight, _ in told)
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
        if self._num_steps and not self.keeps_pace:  # others are wherever they are
            return self.board is not None and self.board.wants_end()
        return super().is_halted

    def slots(self, *, with_stored: bool = False) -> list[PieceSlots]:
        """The first replica's are those that count."""
        return super().slots(with_stored=with_stored) if self.rank == 0 else []

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """The first replica's."""
        return self._alone.gradients() if self.rank == 0 else {}

    def gather_slots(self) -> None:
        """No other replica's count."""

    def reads(self, indices: torch.Tensor, step: int | None = None, turn: int = 0) -> list[Read]:
        if step is None:
            return super().reads(indices)
        part = self._part_of(len(indices))
        return self._alone.reads(indices[part.start : part.stop], step, turn) if part else []

    def leaves_a_rank_idle(self, num_samples: int) -> bool:
        """Buffers are averaged."""
        return False


def build_local_worker(work: Workload, endpoint: Endpoint) -> LocalWorker:
    """Put the parts of a rank that trains together; for the arguments see ``build_worker``."""
    assert work.updater is not None
    rank, group, exchange = endpoint.rank, endpoint.spec.groups[0], endpoint.exchange()
    common: dict[str, Any] = {"rank": rank, "exchange": exchange}
    in_common = replace(work, updater=None, functions=())
    return LocalWorker(
        in_common,
        alone=build_alone(work, endpoint, work.updater),
        averaging=Averaging(work, rank, exchange, group.gradients.tensors),
        passes=ModelPasses(in_common, group=group, trainable=(), device=endpoint.device, **common),
        ruled=ruled_buffers(work, rank),
        **common,
    )


def build_alone(work: Workload, endpoint: Endpoint, updater: Updater) -> Worker:
    """The Worker of one replica by itself: of what one device would do with its part of a batch."""
    plan = _plan_of_replica(work.plan, endpoint.rank)
    groups = parameter_groups(plan, work.model, [])
    own = replace(work, plan=plan, updater=updater, groups=groups)
    return build_worker(
        own,
        Endpoint(
            plan=plan,
            spec=exchange_spec(own),
            rank=0,
            region=None,
            look_around=endpoint.look_around,
            device=endpoint.device,
        ),
    )


def _plan_of_replica(plan: Plan, rank: int) -> Plan:
    shares = plan.shares_of(rank)
    return msgspec.structs.replace(
        plan,
        mesh=(),
        devices=(plan.devices[rank],),
        num_shares=len(shares),
        shares_per_row=len(shares),
        update=LocalUpdate(),
        hosts=(),
        compression=None,
        notes=(),
    )
