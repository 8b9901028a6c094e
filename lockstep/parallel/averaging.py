"""The average of what replicas have come to that each step on parameters of their own.

It is formed like the sum of gradients: every replica puts up a row, in shared memory, and sums its
slice of all rows, always in the same tree. What it puts up is its change since the last average,
times its part of all that was trained on since. So what no replica has changed stays as it is, bit
by bit, and the bits of the rest do not depend on who came when.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lockstep.comm.exchange import Exchange, GroupSpec
from lockstep.comm.gradient_spec import GradientSpec
from lockstep.comm.gradients import TensorSpec
from lockstep.errors import ModelError
from lockstep.parallel.compressed_tensors import compressions
from lockstep.parallel.store import tensor_spec
from lockstep.parallel.update import Updater
from lockstep.parallel.workload import Workload
from lockstep.plan.averaging import AveragedUpdate, Nesterov
from lockstep.plan.compression import Compression
from lockstep.plan.layout import elementwise_slices

# The only group of a Plan without stages.
_GROUP = 0


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


def averaged_group(work: Workload) -> GroupSpec:
    """The layout of what is averaged, with a row for each replica; empty if nothing is trained."""
    plan, updater = work.plan, work.updater
    assert isinstance(plan.update, AveragedUpdate)
    ranks = tuple(range(plan.num_ranks))
    tensors: list[TensorSpec] = []
    how: tuple[Compression | None, ...] = ()
    if updater is not None:
        now = Averaged.of(plan.update, work.model, updater)
        tensors = [tensor_spec(name, one) for name, one in now.parameters.items()]
        how = compressions(plan, ranks, tensors)
        tensors += [tensor_spec(name, one) for name, one in now.buffers.items()]
        if plan.update.averages_optimizer:  # before the first step there are none yet
            tensors += [
                tensor_spec(_slot_name(key.parameter, key.slot), now.parameters[key.parameter])
                for key in updater.slot_keys()
            ]
    return GroupSpec(
        ranks=ranks,
        row_ranks=ranks,
        gradients=GradientSpec(
            num_shares=len(ranks), tensors=tuple(tensors), row_limits=(0,) * len(tensors)
        ),
        compressions=how and (*how, *(None for _ in tensors[len(how) :])),
    )


class Averaging:
    """One rank's part in averaging.

    Args:
        work: with this replica's model and updater.
        rank: this rank.
        exchange: this rank's end, whose only group is as ``averaged_group`` says.
        specs: what is averaged, in the group's order.
    """

    def __init__(
        self, work: Workload, rank: int, exchange: Exchange, specs: Sequence[TensorSpec]
    ) -> None:
        assert isinstance(work.plan.update, AveragedUpdate)
        assert work.updater is not None
        self._update = work.plan.update
        self._rank = rank
        self._model = work.model
        self._updater = work.updater
        self._exchange = exchange
        self._specs = specs
        extents = [spec.extent for spec in specs]
        slices = elementwise_slices(extents, work.plan.num_ranks, work.plan.num_ranks)
        exchange.gradients[_GROUP].divide(dict(enumerate(slices)))
        self._pieces = slices[rank]
        self._start: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def begin(self) -> None:
        """The replicas are alike, and are going to train apart."""
        if not self._start:
            self._exchange.barrier()  # the others have copied the first one's weights by now
        now = self._now()
        for name, value in (*now.parameters.items(), *now.buffers.items()):
            if name in self._start:
                self._start[name].copy_(value)
            else:
                self._start[name] = value.clone()

    @torch.no_grad()
    def average(self, part: float) -> None:
        """Have all replicas be their average; every rank calls it.

        Args:
            part: of all that was trained on since they were alike, how much this replica has.
        """
        now, exchange = self._now(), self._exchange
        group = exchange.gradients[_GROUP]
        exchange.begin_pass()
        exchange.put(_GROUP, self._rank, self._row(now, part))
        exchange.collect(0)
        group.gather(self._pieces, group.reduce(self._pieces))
        group.commit()
        exchange.barrier()
        for number, spec in enumerate(self._specs):
            total = group.summed(number)
            if total is not None:
                self._take(now, spec.name, total)

    def _now(self) -> Averaged:
        return Averaged.of(self._update, self._model, self._updater)

    def _row(self, now: Averaged, part: float) -> list[torch.Tensor | None]:
        """What this replica adds to the average: changes of weights, and whole slots."""
        changed = {**now.parameters, **now.buffers}
        return [
            self._change(spec, changed[spec.name], part)
            if spec.name in self._start
            else _part_of(now.slots.get(spec.name), part)
            for spec in self._specs
        ]

    def _change(self, spec: TensorSpec, value: torch.Tensor, part: float) -> torch.Tensor | None:
        start = self._start[spec.name]
        if value.shape != start.shape or value.dtype != start.dtype:
            raise _reshaped(spec, value)
        # Of what is infinite and has not changed, the difference is no number.
        change = (value - start).masked_fill_(value == start, 0)
        if spec.dtype.is_floating_point or spec.dtype.is_complex:
            return _part_of(change, part)
        return change if self._rank == 0 else None  # a count: the first replica's

    def _take(self, now: Averaged, name: str, total: torch.Tensor) -> None:
        if name in now.slots:
            now.slots[name].copy_(total)
        elif name in now.buffers:
            torch.add(self._start[name], total, out=now.buffers[name])
        elif name in now.parameters:
            outer, parameter = self._update.outer, now.parameters[name].detach()
            if outer is not None:
                total = nesterov(outer, total, self._updater.velocities[name])
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
        "What replicas average must keep its shape and dtype.",
        received=f"a buffer {spec.name!r} of shape {tuple(value.shape)}, {value.dtype}, "
        f"which was of shape {spec.shape}, {spec.dtype}",
        fix="Write into the buffer, or use MirroredStrategy.",
    )
