"""The average of what replicas have come to that each step on parameters of their own.

It is formed like the sum of gradients: every replica publishes a row, in shared memory, and sums
its slice of all rows, always in the same tree. What it publishes is its change since the last
average, times its part of all that was trained on since. So what no replica has changed stays as it
is, bit by bit, and the bits of the rest do not depend on who came when.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lockstep.comm.collectives.gradient_spec import GradientSpec
from lockstep.comm.collectives.gradients import TensorSpec
from lockstep.comm.exchange import Exchange
from lockstep.comm.exchange_spec import GroupSpec
from lockstep.errors import ModelError
from lockstep.parallel.exchange.compressed_tensors import compressions
from lockstep.parallel.storage.store import tensor_spec
from lockstep.parallel.update import Updater
from lockstep.parallel.workload import Workload
from lockstep.plan.layout import elementwise_slices
from lockstep.plan.makers.averaging import AveragedUpdate, Nesterov
from lockstep.plan.program.compression import Compression
from lockstep.plan.spec import Plan


@dataclass(frozen=True, kw_only=True)
class Averaged:
    """What a replica has that is averaged, by name.

    Attributes:
        parameters: those that are trained.
        buffers: numbers; a flag is none, and the first replica's counts.
        slots: of the optimizer, as far as it has made them, if they are averaged.
    """

    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    slots: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, update: AveragedUpdate, model: nn.Module, updater: Updater) -> "Averaged":
        """What there is now."""
        has_slots = update.averages_optimizer
        return cls(
            parameters={name: one for name, one in model.named_parameters() if one.requires_grad},
            buffers={name: one for name, one in model.named_buffers() if one.dtype != torch.bool},
            slots=_slots(updater) if has_slots else {},
        )


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
    """The layout of what is averaged, with a row for each rank that has it.

    The groups are empty if nothing is trained.
    """
    if work.updater is None:
        return tuple(_group(group.ranks, ()) for group in work.groups)
    return tuple(
        _averaged_group(work, work.updater, ranks, names) for ranks, names in _holders(work).items()
    )


def _group(
    ranks: tuple[int, ...],
    tensors: Sequence[TensorSpec],
    how: tuple[Compression | None, ...] = (),
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

    What no stage uses in training does not change.
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
    now = Averaged.of(plan.update, work.model, updater)
    parameters = {name: one for name, one in now.parameters.items() if name in names}
    tensors = [tensor_spec(name, one) for name, one in parameters.items()]
    how = compressions(plan, ranks, tensors)
    tensors += [tensor_spec(name, one) for name, one in now.buffers.items() if name in names]
    if plan.update.averages_optimizer:  # before the first step there are none yet
        tensors += [
            tensor_spec(_slot_name(key.parameter, key.slot), parameters[key.parameter])
            for key in updater.slot_keys()
            if key.parameter in parameters
        ]
    return _group(ranks, tensors, how)


class _GroupAverage:
    """One rank's part in what the ranks of a group average.

    Args:
        number: the group's.
        group: the group.
        plan: the Plan.
        rank: this rank.
        exchange: this rank's end.

    Attributes:
        specs: what is averaged.
        tells: of the ranks of a replica that have it, in the same memory, this is the first: it
            speaks for the replica.
    """

    def __init__(
        self, number: int, group: GroupSpec, plan: Plan, rank: int, exchange: Exchange
    ) -> None:
        self.specs: Sequence[TensorSpec] = group.gradients.tensors
        replica, count = rank // plan.ranks_per_replica, len(group.ranks)
        self.tells = rank == min(
            other for other in group.ranks if other // plan.ranks_per_replica == replica
        )
        self._number, self._row = number, group.ranks.index(rank)
        self._exchange, self._rows = exchange, exchange.gradients[number]
        slices = elementwise_slices(group.gradients.extents, count, count)
        self._rows.divide(dict(zip(group.ranks, slices, strict=True)))
        self._pieces = slices[self._row]

    def put(self, row: Sequence[torch.Tensor | None]) -> None:
        """What this rank adds to the sums."""
        self._exchange.write(self._number, self._row, row)

    def sum(self) -> None:
        """Sum this rank's pieces; all have put what they have."""
        self._rows.gather(self._pieces, self._rows.reduce_scatter(self._pieces))
        self._rows.commit()

    def sums(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The sums by name, when all have formed theirs."""
        for number, spec in enumerate(self.specs):
            total = self._rows.summed(number)
            if total is not None:
                yield spec.name, total


class Averaging:
    """One rank's part in averaging.

    Args:
        work: with this replica's model and updater.
        rank: this rank.
        exchange: this rank's end, whose groups are as ``averaged_groups`` says.
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
        """The replicas are alike, and are going to train apart."""
        if not self._has_begun:
            self._exchange.barrier()  # the others have copied the first one's weights by now
        self._has_begun = True
        now = self._now()
        values = {**now.parameters, **now.buffers}
        for name in (spec.name for each in self._averages for spec in each.specs):
            if name in self._start:
                self._start[name].copy_(values[name])
            elif name in values:
                self._start[name] = values[name].clone()

    @torch.no_grad()
    def average(self, part: float) -> None:
        """Have all replicas be their average; every rank calls it.

        Args:
            part: of all that was trained on since they were alike, how much this replica has.
        """
        now, exchange = self._now(), self._exchange
        exchange.begin_pass()
        for each in self._averages:
            each.put(self._row(each.specs, now, part if each.tells else 0.0))
        exchange.collect(0)
        for each in self._averages:
            each.sum()
        exchange.barrier()
        for each in self._averages:
            for name, total in each.sums():
                self._take(now, name, total, writes=each.tells)
        if self._is_divided:  # some weights are in the memory of several ranks, and one has written
            exchange.barrier()

    def _now(self) -> Averaged:
        return Averaged.of(self._update, self._model, self._updater)

    def _row(
        self, specs: Sequence[TensorSpec], now: Averaged, part: float
    ) -> list[torch.Tensor | None]:
        """What this replica adds to the average: changes of weights, and whole slots."""
        changed = {**now.parameters, **now.buffers}
        return [
            self._change(spec, changed[spec.name], part)
            if spec.name in self._start
            else _part_of(now.slots.get(spec.name), part)
            for spec in specs
        ]

    def _change(self, spec: TensorSpec, value: torch.Tensor, part: float) -> torch.Tensor | None:
        start = self._start[spec.name]
        if value.shape != start.shape or value.dtype != start.dtype:
            raise _reshaped(spec, value)
        # Of what is infinite and has not changed, the difference is no number.
        change = (value - start).masked_fill_(value == start, 0)
        if spec.dtype.is_floating_point or spec.dtype.is_complex:
            return _part_of(change, part)
        return change if self._is_first else None  # a count: the first replica's

    def _take(self, now: Averaged, name: str, total: torch.Tensor, *, writes: bool) -> None:
        if name in now.slots:
            now.slots[name].copy_(total)
        elif name in now.buffers:
            torch.add(self._start[name], total, out=now.buffers[name])
        elif name in now.parameters:
            outer, parameter = self._update.outer, now.parameters[name].detach()
            if outer is not None:
                total = nesterov(outer, total, self._updater.velocity(name))
            if writes:
                torch.add(self._start[name], total, out=parameter)


def nesterov(outer: Nesterov, change: torch.Tensor, velocity: torch.Tensor) -> torch.Tensor:
    """The change of a parameter that the outer optimizer makes of the replicas' average change.

    It is ``torch.optim.SGD(lr, momentum, nesterov=True)`` on the gradient ``-change``.

    Args:
        outer: the optimizer.
        change: the average's, minus the gradient.
        velocity: minus torch's momentum buffer; changed here.
    """
    velocity.mul_(outer.momentum).add_(change)
    return change.add(velocity, alpha=outer.momentum).mul_(outer.lr)


def _part_of(value: torch.Tensor | None, part: float) -> torch.Tensor | None:
    """Nothing, where the replica has not trained: it may be no number."""
    return None if value is None or part == 0 else value * part


def _reshaped(spec: TensorSpec, value: torch.Tensor) -> ModelError:
    return ModelError(
        "A tensor that replicas average must keep its shape and dtype.",
        received=f"a buffer {spec.name!r} of shape {tuple(value.shape)}, {value.dtype}, "
        f"which was of shape {spec.shape}, {spec.dtype}",
        fix="Change the buffer in place, or use MirroredStrategy.",
    )
