"""Passes of a rank that has its shards of divided layers.

Consecutive ranks, those of a replica, run the same shares. The first gives the loss, the outputs,
and the gradients of parameters that are whole; see ``shard_gradients`` for those of divided ones.
"""

from typing import Any

import torch

from lockstep.comm.transports.process_group import ProcessGroups
from lockstep.data.map_style.sources import Batch
from lockstep.data.trees import Tree
from lockstep.parallel.batch_run import Run, Take
from lockstep.parallel.data_parallel.model_passes import ModelPasses
from lockstep.parallel.data_parallel.passes import Passes
from lockstep.parallel.exchange.engine import Endpoint
from lockstep.parallel.loss.share_losses import LossAdapter, ShareLoss
from lockstep.parallel.pipeline.microbatch_run import MicrobatchRun
from lockstep.parallel.pipeline.stage_passes import StagePasses
from lockstep.parallel.sharding.residency import Residency
from lockstep.parallel.sharding.sharded_passes import ShardedPasses
from lockstep.parallel.tensor.shard_gradients import ShardGradients, divided_parameters, made_whole
from lockstep.parallel.training_step import TrainingStep
from lockstep.parallel.workload import Workload

GROUP = 0
"""The only group of a Plan without stages."""


class DividedPasses(Passes):
    """What passes over a model, or over stages, have in common whose layers are divided.

    Args:
        work: common to all ranks.
        endpoint: of this rank.
        process: its process groups, if the Plan has any.
        options: see ``ModelPasses`` and ``StagePasses``.

    Attributes:
        leads: this rank is the first of those that run the same passes.
    """

    _keeps_output = False  # the loss takes a divided output

    def __init__(
        self, work: Workload, *, endpoint: Endpoint, process: ProcessGroups | None, **options: Any
    ) -> None:
        super().__init__(work, **options)
        self._first = self._rank - self._rank % work.plan.tensor_degree
        self.leads = self._rank == self._first
        self._layers = divided_parameters(work, endpoint, self._exchange, process)

    @property
    def _forms_gradients(self) -> bool:
        return False  # factors of a part's gradient are no factors of a row

    def begin(self, run: Run) -> None:
        super().begin(run)
        self._layers.clear()
        takes_parts = self._loss is not None and self._loss.takes_parts
        self._keeps_output = run.is_training and not run.is_observed and takes_parts
        if not self.leads:
            run.is_observed = False


class TensorPasses(DividedPasses, ModelPasses):
    """Passes over a model whose layers are divided."""

    def __init__(self, work: Workload, **options: Any) -> None:
        super().__init__(work, **options)
        names = [one.name for one in self._group.gradients.tensors]
        trained = dict(zip(names, self._trainable, strict=True))
        self._shards = ShardGradients(
            self._layers, self._exchange, GROUP, trained, leads=self.leads
        )

    def _run_together(self, run: Run, shares: list[int], body: Any) -> None:
        with self._layers.running():
            super()._run_together(run, shares, body)

    def _run_share(self, run: Run, shares: list[int], body: Any, share: int) -> None:
        with self._layers.running():  # this may be another thread
            super()._run_share(run, shares, body, share)

    def _try_on_halves(self, run: Run, batch: Batch) -> None:
        with self._layers.gradients_aside():
            super()._try_on_halves(run, batch)

    def _check_added(self, loss: LossAdapter, batch: Batch) -> None:
        with self._layers.gradients_aside():
            super()._check_added(loss, batch)

    def _watched_call(self, batch: Batch) -> Tree:
        output = super()._watched_call(batch)
        return output if self._keeps_output else made_whole(output)

    def _put_loss(self, share: int) -> None:
        if self.leads:
            super()._put_loss(share)

    def _put(self, run: Run, share: int, gradients: list[torch.Tensor | None]) -> None:
        rest = self._shards.keep(gradients)
        if self.leads:
            super()._put(run, share, rest)
        else:
            self._losses.pop(share)
        self._clear_gradients()
        row = self._row_of[share]
        if share + 1 == min(self._mine.stop, run.num_filled) or self._row_of[share + 1] != row:
            self._shards.put(row)


class ShardedTensorPasses(TensorPasses, ShardedPasses):
    """Passes over a model whose layers are divided, and whose parameters are.

    A unit's parameters are there while it is used, as in ``parallel.sharding``: parts of them are
    views of its memory.

    Args:
        work: common to all ranks.
        residency: of this rank's parameters.
        options: see ``TensorPasses``.
    """

    def __init__(self, work: Workload, *, residency: Residency, **options: Any) -> None:
        super().__init__(work, residency=residency, **options)
        self._hands_over = False  # parts of gradients are brought together first
        self._row: int | None = None  # of the backward pass under way
        self._send = residency.complete
        residency.complete = self._complete

    def _backward(self, run: Run, shares: list[int]) -> None:
        self._row = self._row_of[shares[-1]]
        super()._backward(run, shares)
        self._row = None

    def _complete(self, bucket: int) -> None:
        """Backward has left a unit for the last time: its gradients go to those who update it."""
        if self._row is not None:
            self._put_bucket(self._row, bucket)
        self._send(bucket)

    def _put_bucket(self, row: int, bucket: int) -> None:
        buckets = self._group.gradients.buckets
        numbers = [number for number, own in enumerate(buckets) if own == bucket]
        gradients: list[torch.Tensor | None] = [None] * len(self._trainable)
        for number in numbers:
            parameter = self._trainable[number]
            gradients[number], parameter.grad = parameter.grad, None
        self._shards.write(row, gradients)
        self._shards.put(row, [number for number in numbers if number in self._shards.names])


class _Run(MicrobatchRun):
    """A microbatch in a stage whose layers are divided."""

    def _send(self, number: int, tree: Any) -> None:
        if number not in self._sent:
            super()._send(number, made_whole(tree))


class DividedStagePasses(DividedPasses, StagePasses):
    """Passes over stages whose layers are divided.

    What crosses a cut is whole, on each rank of a stage. So each has the mail of a pipeline that
    consists of the ranks at its place, and the schedule is that of a pipeline without division.
    """

    _run_of = _Run

    def __init__(self, work: Workload, **options: Any) -> None:
        super().__init__(work, **options)
        self._shards = [
            ShardGradients(
                self._layers,
                self._exchange,
                group.number,
                dict(zip(group.names, group.members, strict=True)),
                leads=self.leads,
            )
            for group in self._groups
        ]

    def _run(self, handler: Any, action: Any, now: TrainingStep) -> None:
        with self._layers.running():
            super()._run(handler, action, now)
        if not self.leads:
            now.batch.parts.clear()

    def infer(self, run: Run, take: Take) -> None:
        with self._layers.running():
            super().infer(run, take)

    def _output(
        self, microbatch_run: MicrobatchRun, batch: Batch | None, *, recompute: bool
    ) -> Tree:
        output = super()._output(microbatch_run, batch, recompute=recompute)
        return output if self._keeps_output else made_whole(output)

    def _write_loss(self, share: int, loss: ShareLoss) -> None:
        if self.leads:
            super()._write_loss(share, loss)

    def hand_in(self) -> None:
        for group, shards in zip(self._groups, self._shards, strict=True):
            rows = group.spec.row_ranks
            row = rows.index(self._first) if rows else 0
            shards.write(row, [one.grad for one in group.members])
            shards.put(row)
