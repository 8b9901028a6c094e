"""Passes of a rank that has its shards of the layers of some stages.

Consecutive ranks, those of a stage, run the same passes. Within a stage layers are divided as in
``tensor_passes``; what crosses a cut is whole, on each of these ranks. So each has the mail of a
pipeline that consists of the ranks at its place, and the schedule is that of a pipeline without
division.
"""

from typing import Any

from lockstep.comm.transports.process_group import ProcessGroups
from lockstep.data.map_style.sources import Batch
from lockstep.data.trees import Tree
from lockstep.parallel.batch_run import Run, Take
from lockstep.parallel.exchange.engine import Endpoint
from lockstep.parallel.loss.share_losses import ShareLoss
from lockstep.parallel.pipeline.microbatch_run import MicrobatchRun
from lockstep.parallel.pipeline.stage_passes import StagePasses
from lockstep.parallel.tensor.shard_gradients import (
    ShardGradients,
    divided_parameters,
    made_whole,
)
from lockstep.parallel.tensor.tensor_passes import DividedPasses
from lockstep.parallel.training_step import TrainingStep
from lockstep.parallel.workload import Workload


class _Run(MicrobatchRun):
    """A microbatch in a stage whose layers are divided."""

    def _send(self, number: int, tree: Any) -> None:
        if number not in self._sent:
            super()._send(number, made_whole(tree))


class DividedStagePasses(DividedPasses, StagePasses):
    """Passes over stages whose layers are divided.

    Args:
        work: common to all ranks.
        endpoint: of this rank.
        process: its process groups, if the Plan has any.
        options: see ``StagePasses``.
    """

    _run_of = _Run

    def __init__(
        self,
        work: Workload,
        *,
        endpoint: Endpoint,
        process: ProcessGroups | None,
        **options: Any,
    ) -> None:
        super().__init__(work, **options)
        place = self._rank % work.plan.tensor_degree
        self.leads = place == 0
        self._first = self._rank - place
        self._layers = divided_parameters(work, endpoint, self._exchange, process)
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
