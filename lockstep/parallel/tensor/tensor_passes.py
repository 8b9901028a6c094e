"""Passes of a rank that has its shards of divided layers.

Consecutive ranks, those of a replica, run the same shares. The first gives the loss, the outputs,
and the gradients of parameters that are whole. Each puts its parts of the gradients of divided ones
in their places, or, where ranks share no memory, sends them to the first.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from lockstep.comm.transports.process_group import ProcessGroups
from lockstep.data.map_style.sources import Batch
from lockstep.data.trees import Tree, map_tensors
from lockstep.parallel.batch_run import Run
from lockstep.parallel.data_parallel.model_passes import ModelPasses
from lockstep.parallel.exchange.engine import Endpoint
from lockstep.parallel.loss.share_losses import LossAdapter
from lockstep.parallel.tensor.divided_tensor import DividedTensor
from lockstep.parallel.tensor.parameters import DividedParameters
from lockstep.parallel.tensor.shard_exchange import (
    SLOT_BYTES,
    SentShards,
    ShardExchange,
    SlotExchange,
)
from lockstep.parallel.workload import Workload
from lockstep.plan.splits import TensorSplits

GROUP = 0
"""The only group of a Plan without stages."""


class TensorPasses(ModelPasses):
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
        tensor = work.plan.tensor
        assert tensor is not None
        place = self._rank % work.plan.tensor_degree
        self.leads = place == 0
        exchange = self._shard_exchange(tensor, endpoint, process)
        parameters = dict(work.model.named_parameters())
        splits = {one.name: one.split for one in tensor.parameters}
        self._layers = DividedParameters(parameters, splits, exchange)
        names = [one.name for one in self._group.gradients.tensors]
        self._parts = {
            number: name for number, name in enumerate(names) if self._layers.is_divided(name)
        }

    def _shard_exchange(
        self, tensor: TensorSplits, endpoint: Endpoint, process: ProcessGroups | None
    ) -> ShardExchange:
        degree = self._plan.tensor_degree
        replica, place = divmod(self._rank, degree)
        ranks = self._plan.tensor_ranks(replica)
        shards = [tensor.shards_of(one, degree) for one in range(degree)]
        if degree == 1:
            return ShardExchange(tensor.num_shards, shards[0])
        transport = endpoint.tensor_transport(replica, process)
        if transport is not None:
            return SentShards(tensor.num_shards, place, shards, ranks, transport)
        assert self._exchange.board is not None
        meet = partial(self._exchange.board.meet_ranks, ranks)
        return SlotExchange(tensor.num_shards, shards[place], _slots(endpoint, replica), meet)

    _keeps_output = False  # the loss takes a divided output

    @property
    def _forms_gradients(self) -> bool:
        return False  # factors of a part's gradient are no factors of a row

    # --- training --------------------------------------------------------------------------------

    def begin(self, run: Run) -> None:
        super().begin(run)
        self._layers.clear()
        self._keeps_output = (
            run.is_training
            and not run.is_observed
            and self._loss is not None
            and self._loss.takes_parts
        )
        if not self.leads:
            run.is_observed = False

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
        return output if self._keeps_output else map_tensors(_whole, output)

    def _put_loss(self, share: int) -> None:
        if self.leads:
            super()._put_loss(share)

    def _put(self, run: Run, share: int, gradients: list[torch.Tensor | None]) -> None:
        rest = self._keep(gradients)
        if self.leads:
            super()._put(run, share, rest)
        else:
            self._losses.pop(share)
        self._clear_gradients()
        row = self._row_of(share)
        if share + 1 == min(self._mine.stop, run.num_filled) or self._row_of(share + 1) != row:
            self._put_parts(row, self._parts)

    def _keep(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Keep gradients of divided parameters' uses as a whole; returns the others."""
        rest = list(gradients)
        for number, name in self._parts.items():
            self._layers.keep(name, rest[number])
            rest[number] = None
        return rest

    def _put_parts(self, row: int, numbers: Iterable[int]) -> None:
        """Put this rank's parts of the gradients of a row's shares in their places."""
        taken = {number: self._layers.take_gradient(self._parts[number]) for number in numbers}
        found = {number: one for number, one in taken.items() if one is not None}
        if not found:
            return
        if self.leads or not self._layers.exchange.shards_elsewhere:
            self._place_parts(row, found)
        else:
            self._layers.exchange.bring_to_first(_by_shard(found.values()))

    def _place_parts(self, row: int, found: Mapping[int, dict[int, list[torch.Tensor]]]) -> None:
        """Put parts in place, and those of other ranks that come here."""
        self._exchange.gradients[GROUP].open_places(found)
        places = self._exchange.gradients[GROUP].places(row)
        formed: list[torch.Tensor | None] = [None] * len(self._trainable)
        blocks: list[tuple[torch.Tensor, torch.Tensor]] = []
        coming: dict[int, list[torch.Tensor]] = {}
        for number, own in found.items():
            place = self._trainable[number].detach().clone() if places is None else places[number]
            formed[number] = place
            of_shard = partial(self._layers.blocks, self._parts[number], place)
            for shard, parts in own.items():
                blocks += zip(of_shard(shard), parts, strict=True)
            for shard in self._layers.exchange.shards_elsewhere:
                theirs = of_shard(shard)
                parts = [one if one.is_contiguous() else torch.empty_like(one) for one in theirs]
                coming.setdefault(shard, []).extend(parts)
                blocks += [
                    pair for pair in zip(theirs, parts, strict=True) if pair[0] is not pair[1]
                ]
        self._layers.exchange.bring_to_first(coming)
        for place, block in blocks:
            place.copy_(block)
        if self.leads and any(one is not None for one in formed):
            self._exchange.write(GROUP, row, formed)


def _by_shard(
    found: Iterable[Mapping[int, Sequence[torch.Tensor]]],
) -> dict[int, list[torch.Tensor]]:
    """Parts of gradients, dense, of all parameters."""
    by_shard: dict[int, list[torch.Tensor]] = {}
    for own in found:
        for shard, blocks in own.items():
            by_shard.setdefault(shard, []).extend(block.contiguous() for block in blocks)
    return by_shard


def _slots(endpoint: Endpoint, replica: int) -> torch.Tensor:
    """The memory in which the shards of a replica meet."""
    assert endpoint.region is not None
    offset = endpoint.spec.mail_offsets[replica]
    shape = (2, SLOT_BYTES)
    slots: torch.Tensor = endpoint.region.tensor(offset, torch.uint8, shape, (SLOT_BYTES, 1))
    return slots


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DividedTensor):
        return tensor
    settled = tensor.settled()
    return settled.whole() if isinstance(settled, DividedTensor) else settled
