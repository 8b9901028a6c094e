"""The average of replicas that take local steps.

It is computed like the sum of gradients: every replica writes a row in shared memory, and sums its
slice of all rows in a fixed tree. The row is its change since the last average, times its part of
the loss weight since then. So values that no replica has changed keep their bits, and the bits of
the others do not depend on timing.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from lockstep.comm.collectives.gradient_spec import GradientSpec
from lockstep.comm.collectives.gradients import TensorSpec
from lockstep.comm.exchange import Exchange
from lockstep.comm.exchange_spec import GroupSpec
from lockstep.errors import ModelError
from lockstep.parallel.exchange.compressed_tensors import compressions
from lockstep.parallel.storage.store import tensor_spec
from lockstep.parallel.updater_interface import Updater
from lockstep.parallel.workload import Workload
from lockstep.plan.averaging import AveragedUpdate, Nesterov
from lockstep.plan.layout import elementwise_slices
from lockstep.plan.program.compression import Compression
from lockstep.plan.spec import Plan


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The averaged tensors of a model, by name: trained parameters, and buffers.

    Flags are taken from the first replica.
    """
    return {
        **{name: one for name, one in model.named_parameters() if one.requires_grad},
        **{name: one for name, one in model.named_buffers() if one.dtype != torch.bool},
    }


def _slots(updater: Updater) -> dict[str, torch.Tensor]:
    return {
        _slot_name(part.name, slot): value
        for part in updater.slots(with_stored=True)
        for slot, value in part.slots.items()
        if isinstance(value, torch.Tensor)
    }


def _slot_name(parameter: str, slot: str) -> str:
    return f"{parameter}: {slot}"


def averaged_groups(work: Workload) -> tuple[GroupSpec, ...]:
    """The layout of the averaged tensors, with a row for each rank that has them.

    The groups are empty if nothing is trained.
    """
    if work.updater is None:
        return tuple(_group(group.ranks, ()) for group in work.groups)
    return tuple(
        _averaged_group(work, work.updater, ranks, names) for ranks, names in _holders(work).items()
    )


def _group(
    ranks: tuple[int, ...], tensors: Sequence[TensorSpec], how: tuple[Compression | None, ...] = ()
) -> GroupSpec:
    return GroupSpec(
        ranks=ranks,
        row_ranks=ranks,
        gradients=GradientSpec(
            num_shares=len(ranks), tensors=tuple(tensors), row_limits=(0,) * len(tensors)
        ),
        compressions=how and (*how, *(None for _ in tensors[len(how) :])),
    )


def _holders(work: Workload) -> dict[tuple[int, ...], set[str]]:
    """Names of the parameters and buffers that the same ranks have, by these ranks.

    Tensors that no stage uses in training do not change.
    """
    plan = work.plan
    if plan.pipeline is None:
        buffers = {name for name, _ in work.model.named_buffers()}
        return {group.ranks: {*group.names, *buffers} for group in work.groups}
    found = {group.ranks: set(group.names) for group in work.groups}
    seen: set[str] = set()
    for stage, part in zip(plan.pipeline.stages, work.partitions[True].parts, strict=True):
        found.setdefault(stage.ranks, set()).update({*part.buffers} - seen)
        seen |= {*part.buffers}
    return found


def _averaged_group(
    work: Workload, updater: Updater, ranks: tuple[int, ...], names: set[str]
) -> GroupSpec:
    plan = work.plan
    assert isinstance(plan.update, AveragedUpdate)
    weights = {name: one for name, one in _weights(work.model).items() if name in names}
    parameters = {name: one for name, one in weights.items() if isinstance(one, nn.Parameter)}
    how = compressions(plan, ranks, [tensor_spec(name, one) for name, one in parameters.items()])
    tensors = [tensor_spec(name, one) for name, one in weights.items()]
    if plan.update.averages_optimizer:  # before the first step there are none yet
        tensors += [
            tensor_spec(_slot_name(key.parameter, key.slot), parameters[key.parameter])
            for key in updater.slot_keys()
            if key.parameter in parameters
        ]
    return _group(ranks, tensors, how)


class _GroupAverage:
    """One rank's part in the average of a group.

    Args:
        number: of the group.
        group: the group.
        plan: the Plan.
        rank: this rank.
        exchange: this rank's end.

    Attributes:
        specs: the averaged tensors.
        writes: this is the first of the replica's ranks that have the group in the same memory,
            and writes for the replica.
    """

    def __init__(
        self, number: int, group: GroupSpec, plan: Plan, rank: int, exchange: Exchange
    ) -> None:
        self.specs: Sequence[TensorSpec] = group.gradients.tensors
        replica, count = rank // plan.ranks_per_replica, len(group.ranks)
        self.writes = rank == min(
            other for other in group.ranks if other // plan.ranks_per_replica == replica
        )
        self._number, self._row = number, group.ranks.index(rank)
        self._exchange, self._rows = exchange, exchange.gradients[number]
        slices = elementwise_slices(group.gradients.extents, count, count)
        self._rows.divide(dict(zip(group.ranks, slices, strict=True)))
        self._pieces = slices[self._row]

    def put(self, row: Sequence[torch.Tensor | None]) -> None:
        """Write this rank's row."""
        self._exchange.write(self._number, self._row, row)

    def sum(self) -> None:
        """Sum this rank's pieces, after all ranks have written."""
        self._rows.gather(self._pieces, self._rows.reduce_scatter(self._pieces))
        self._rows.commit()

    def sums(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The sums by name, after all ranks have summed."""
        for number, spec in enumerate(self.specs):
            total = self._rows.summed(number)
            if total is not None:
                yield spec.name, total


class Averaging:
    """One rank's part in averaging.

    Args:
        work: with this replica's model and updater.
        rank: this rank.
        exchange: this rank's end, with the groups of ``averaged_groups``.
        groups: these.
    """

    def __init__(
        self, work: Workload, rank: int, exchange: Exchange, groups: Sequence[GroupSpec]
    ) -> None:
        assert isinstance(work.plan.update, AveragedUpdate)
        assert work.updater is not None
        self._update = work.plan.update
        self._is_first = rank < work.plan.ranks_per_replica
        self._model = work.model
        self._updater = work.updater
        self._exchange = exchange
        self._averages = [
            _GroupAverage(number, group, work.plan, rank, exchange)
            for number, group in enumerate(groups)
            if rank in group.ranks
        ]
        self._is_divided = work.plan.ranks_per_replica > 1
        self._start: dict[str, torch.Tensor] = {}
        self._has_begun = False

    @torch.no_grad()
    def begin(self) -> None:
        """Keep the present weights, which are equal on all replicas, before local steps."""
        if not self._has_begun:
            self._exchange.barrier()  # the others have copied the first replica's weights
        self._has_begun = True
        values = _weights(self._model)
        for name in (spec.name for each in self._averages for spec in each.specs):
            if name in self._start:
                self._start[name].copy_(values[name])
            elif name in values:
                self._start[name] = values[name].clone()

    @torch.no_grad()
    def average(self, part: float) -> None:
        """Set all replicas to their average; every rank calls it.

        Args:
            part: this replica's fraction of the loss weight since the last average.
        """
        exchange, weights = self._exchange, _weights(self._model)
        slots = _slots(self._updater) if self._update.averages_optimizer else {}
        exchange.begin_pass()
        for each in self._averages:
            each.put(self._row(each.specs, weights, slots, part if each.writes else 0.0))
        exchange.collect(0)
        for each in self._averages:
            each.sum()
        exchange.barrier()
        for each in self._averages:
            for name, total in each.sums():
                if name in slots:
                    slots[name].copy_(total)
                elif name in weights:
                    self._change_by(name, weights[name], total, writes=each.writes)
        if self._is_divided:  # one rank has written weights that several ranks map
            exchange.barrier()

    def _row(
        self,
        specs: Sequence[TensorSpec],
        weights: Mapping[str, torch.Tensor],
        slots: Mapping[str, torch.Tensor],
        part: float,
    ) -> list[torch.Tensor | None]:
        """This replica's row: changes of weights, and whole slots."""
        return [
            self._change(spec, weights[spec.name], part)
            if spec.name in self._start
            else _part_of(slots.get(spec.name), part)
            for spec in specs
        ]

    def _change(self, spec: TensorSpec, value: torch.Tensor, part: float) -> torch.Tensor | None:
        start = self._start[spec.name]
        if value.shape != start.shape or value.dtype != start.dtype:
            raise _reshaped(spec, value)
        # The difference of equal infinite values is NaN.
        change = (value - start).masked_fill_(value == start, 0)
        if spec.dtype.is_floating_point or spec.dtype.is_complex:
            return _part_of(change, part)
        return change if self._is_first else None  # a count, taken from the first replica

    def _change_by(
        self, name: str, value: torch.Tensor, change: torch.Tensor, *, writes: bool
    ) -> None:
        """Set a weight or buffer to its start and the replicas' average change."""
        outer, is_parameter = self._update.outer, isinstance(value, nn.Parameter)
        if outer is not None and is_parameter:
            change = nesterov(outer, change, self._updater.velocity(name))
        if writes or not is_parameter:
            torch.add(self._start[name], change, out=value.detach())


def nesterov(outer: Nesterov, change: torch.Tensor, velocity: torch.Tensor) -> torch.Tensor:
    """A parameter's change by the outer optimizer, from the replicas' average change.

    It is ``torch.optim.SGD(lr, momentum, nesterov=True)`` on the gradient ``-change``.

    Args:
        outer: the optimizer.
        change: the average's, minus the gradient.
        velocity: minus torch's momentum buffer; changed here.
    """
    velocity.mul_(outer.momentum).add_(change)
    return change.add(velocity, alpha=outer.momentum).mul_(outer.lr)


def _part_of(value: torch.Tensor | None, part: float) -> torch.Tensor | None:
    """None if the replica has not trained: its value may be NaN."""
    return None if value is None or part == 0 else value * part


def _reshaped(spec: TensorSpec, value: torch.Tensor) -> ModelError:
    return ModelError(
        "A tensor that replicas average must keep its shape and dtype.",
        received=f"a buffer {spec.name!r} of shape {tuple(value.shape)}, {value.dtype}, "
        f"which was of shape {spec.shape}, {spec.dtype}",
        fix="Change the buffer in place, or use MirroredStrategy.",
    )
