"""Passes of a rank that has its shards of divided layers.

Consecutive ranks, those of a replica, run the same shares. The first gives the loss, the outputs,
and the gradients of parameters that are whole; see ``shard_gradients`` for those of divided ones.
"""

from typing import Any

import torch

from lockstep.comm.transports.process_group import ProcessGroups
from lockstep.data.map_style.sources import Batch
from lockstep.data.trees import Tree
from lockstep.parallel.batch_run import Run
from lockstep.parallel.data_parallel.model_passes import ModelPasses
from lockstep.parallel.data_parallel.passes import Passes
from lockstep.parallel.exchange.engine import Endpoint
from lockstep.parallel.loss.share_losses import LossAdapter
from lockstep.parallel.tensor.parameters import DividedParameters
from lockstep.parallel.tensor.shard_gradients import (
    ShardGradients,
    divided_parameters,
    made_whole,
)
from lockstep.parallel.workload import Workload

GROUP = 0
"""The only group of a Plan without stages."""


class DividedPasses(Passes):
    """What passes over a model, or over stages, have in common whose layers are divided.

    Attributes:
        leads: this rank is the first of those that run the same passes.
    """

    _layers: DividedParameters
    _keeps_output = False  # the loss takes a divided output

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
    """Passes over a model whose layers are divided.

    Args:
        work: common to all ranks.
        endpoint: of this rank.
        process: its process groups, if the Plan has any.
        options: see ``ModelPasses``.
    """

    def __init__(
        self,
        work: Workload,
        *,
        endpoint: Endpoint,
        process: ProcessGroups | None,
        **options: Any,
    ) -> None:
        super().__init__(work, **options)
        self.leads = self._rank % work.plan.tensor_degree == 0
        self._layers = divided_parameters(work, endpoint, self._exchange, process)
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
        row = self._row_of(share)
        if share + 1 == min(self._mine.stop, run.num_filled) or self._row_of(share + 1) != row:
            self._shards.put(row)
