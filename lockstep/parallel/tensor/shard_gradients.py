"""A rank's divided parameters, and the way of their gradients to the exchange.

Of consecutive ranks that run the same passes the first, which leads, gives the gradients of
parameters that are whole. Each puts its parts of the gradients of divided ones in their places, in
the row of the first, or, where ranks share no memory, sends them to the first.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch

from lockstep.comm.exchange import Exchange
from lockstep.comm.transports.process_group import ProcessGroups
from lockstep.data.trees import Tree, map_tensors
from lockstep.parallel.exchange.engine import Endpoint
from lockstep.parallel.tensor.divided_tensor import DividedTensor
from lockstep.parallel.tensor.parameters import DividedParameters
from lockstep.parallel.tensor.shard_exchange import (
    SLOT_BYTES,
    SentShards,
    ShardExchange,
    SlotExchange,
)
from lockstep.parallel.workload import Workload


def divided_parameters(
    work: Workload, endpoint: Endpoint, exchange: Exchange, process: ProcessGroups | None
) -> DividedParameters:
    """The divided parameters of a rank.

    Args:
        work: common to all ranks.
        endpoint: of this rank.
        exchange: its end of the exchange.
        process: its process groups, if the Plan has any.
    """
    tensor = work.plan.tensor
    assert tensor is not None
    parameters = dict(work.model.named_parameters())
    splits = {one.name: one.split for one in tensor.parameters}
    shards = _shard_exchange(endpoint, exchange, process)
    divides_time = tensor.by_time is not None
    return DividedParameters(parameters, splits, shards, divides_time=divides_time)


def _shard_exchange(
    endpoint: Endpoint, exchange: Exchange, process: ProcessGroups | None
) -> ShardExchange:
    plan, degree = endpoint.plan, endpoint.plan.tensor_degree
    tensor = plan.tensor
    assert tensor is not None
    number, place = divmod(endpoint.rank, degree)
    ranks = plan.tensor_ranks(number)
    shards = [tensor.shards_of(one, degree) for one in range(degree)]
    if degree == 1:
        return ShardExchange(tensor.num_shards, shards[0])
    transport = endpoint.tensor_transport(number, process)
    if transport is not None:
        return SentShards(tensor.num_shards, place, shards, ranks, transport)
    assert exchange.board is not None
    meet = partial(exchange.board.meet_ranks, ranks)
    return SlotExchange(tensor.num_shards, shards[place], _slots(endpoint, number), meet)


def _slots(endpoint: Endpoint, number: int) -> torch.Tensor:
    """The memory in which the shards of ranks that divide layers together meet."""
    assert endpoint.region is not None
    plan = endpoint.plan
    offset = endpoint.spec.mail_offsets[number - plan.num_ranks // plan.tensor_degree]
    shape = (2, SLOT_BYTES)
    slots: torch.Tensor = endpoint.region.tensor(offset, torch.uint8, shape, (SLOT_BYTES, 1))
    return slots


class ShardGradients:
    """A rank's parts of the gradients of a group's divided parameters.

    Args:
        layers: the divided parameters.
        exchange: this rank's end of the exchange.
        group: the number of the group.
        parameters: that the group trains, by name.
        leads: this rank is the first of those that run the same passes.

    Attributes:
        names: of the divided parameters, by number in the group.
    """

    def __init__(
        self,
        layers: DividedParameters,
        exchange: Exchange,
        group: int,
        parameters: Mapping[str, torch.Tensor],
        *,
        leads: bool,
    ) -> None:
        self._layers = layers
        self._exchange = exchange
        self._group = group
        self._parameters = list(parameters.values())
        self._leads = leads
        self.names = {
            number: name for number, name in enumerate(parameters) if layers.is_divided(name)
        }

    def write(self, row: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Write the gradients of parameters that are whole; see ``keep``."""
        rest = self.keep(gradients)
        if self._leads:
            self._exchange.write(self._group, row, rest)

    def keep(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Keep gradients of divided parameters' uses as a whole; returns the others."""
        rest = list(gradients)
        for number, name in self.names.items():
            self._layers.keep(name, rest[number])
            rest[number] = None
        return rest

    def put(self, row: int, numbers: Iterable[int] | None = None) -> None:
        """Put this rank's parts of the gradients of a row in their places.

        Args:
            row: which.
            numbers: of the parameters; None for all.
        """
        wanted = self.names if numbers is None else numbers
        taken = {number: self._layers.take_gradient(self.names[number]) for number in wanted}
        found = {number: one for number, one in taken.items() if one is not None}
        if not found:
            return
        if self._leads or not self._layers.exchange.shards_elsewhere:
            self._place(row, found)
        else:
            self._layers.exchange.bring_to_first(_by_shard(found.values()))

    def _place(self, row: int, found: Mapping[int, dict[int, list[torch.Tensor]]]) -> None:
        """Put parts in place, and those of other ranks that come here."""
        gradients = self._exchange.gradients[self._group]
        gradients.open_places(found)
        places = gradients.places(row)
        formed: list[torch.Tensor | None] = [None] * len(self._parameters)
        blocks: list[tuple[torch.Tensor, torch.Tensor]] = []
        coming: dict[int, list[torch.Tensor]] = {}
        for number, own in found.items():
            place = self._parameters[number].detach().clone() if places is None else places[number]
            formed[number] = place
            of_shard = partial(self._layers.blocks, self.names[number], place)
            for shard, parts in own.items():
                blocks += zip(of_shard(shard), parts, strict=True)
            for shard in self._layers.exchange.shards_elsewhere:
                theirs = of_shard(shard)
                parts = [_dense_like(one) for one in theirs]
                coming.setdefault(shard, []).extend(parts)
                blocks += [
                    pair for pair in zip(theirs, parts, strict=True) if pair[0] is not pair[1]
                ]
        self._layers.exchange.bring_to_first(coming)
        for place, block in blocks:
            place.copy_(block)
        if self._leads and any(one is not None for one in formed):
            self._exchange.write(self._group, row, formed)


def _dense_like(place: torch.Tensor) -> torch.Tensor:
    """The place itself, or memory for it in the order of its elements, in which they are sent."""
    if place.is_contiguous():
        return place
    return torch.empty_like(place, memory_format=torch.contiguous_format)


def _by_shard(
    found: Iterable[Mapping[int, Sequence[torch.Tensor]]],
) -> dict[int, list[torch.Tensor]]:
    """Parts of gradients, dense, of all parameters."""
    by_shard: dict[int, list[torch.Tensor]] = {}
    for own in found:
        for shard, blocks in own.items():
            by_shard.setdefault(shard, []).extend(block.contiguous() for block in blocks)
    return by_shard


def made_whole(tree: Tree) -> Tree:
    """A tree with whole tensors in place of divided ones; every rank calls it."""
    return map_tensors(_whole, tree)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DividedTensor):
        return tensor
    settled = tensor.settled()
    return settled.whole() if isinstance(settled, DividedTensor) else settled
