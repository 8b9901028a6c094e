"""Simulates replicas of local SGD in one process, one after the other.

``lockstep.LocalSGDStrategy`` promises this result, not that of one device. Like ``Reference``, this
simulation shares no code with the implementation that it checks.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn, optim
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.plan.averaging import AveragedUpdate, Nesterov
from lockstep.proof.compressed import SimulatedHosts
from lockstep.proof.reference import Record, Reference


class Replicas:
    """Trains replicas step by step.

    Args:
        references: one for each replica; each trains on its share of each batch.
        update: when and how they average.
        steps_per_epoch: batches of an epoch.
        hosts: hosts that compress the changes of their replicas; None without compression.
        host_of: the host of each replica.
    """

    def __init__(
        self,
        references: Sequence[Reference],
        update: AveragedUpdate,
        steps_per_epoch: int,
        hosts: SimulatedHosts | None = None,
        host_of: Callable[[int], int] = lambda replica: 0,
    ) -> None:
        self.references = references
        self._hosts = hosts
        self._host_of = host_of
        self._update = update
        self._steps_per_epoch = steps_per_epoch
        self._weights = [0.0 for _ in references]
        self._steps = 0
        self._since = 0
        first = references[0].model
        self._averages = [one.detach().clone() for one in _weights_of(first)]  # the last ones
        self._momenta: list[torch.Tensor | None] = [None for _ in self._averages]

    def step(
        self,
        num_shares: int,
        weights: Sequence[float],
        before_update: Callable[[dict[str, nn.Parameter]], None],
    ) -> list[Record]:
        """Make a step of every replica.

        Args:
            num_shares: see ``Reference.step``.
            weights: the weight of each replica's part of the batch.
            before_update: as in ``Reference.step``, for the first replica.
        """
        if self._since and self._steps % self._steps_per_epoch == 0:
            self._average()
        for number, reference in enumerate(self.references):
            reference.step(num_shares, None if number else before_update)
            self._weights[number] += weights[number]
        self._steps, self._since = self._steps + 1, self._since + 1
        if self._since == self._update.every:
            self._average()
        return [reference.record() for reference in self.references]

    @torch.no_grad()
    def _average(self) -> None:
        if total := sum(self._weights):
            parts = [weight / total for weight in self._weights]
            models = [reference.model for reference in self.references]
            weights = [list(_weights_of(model)) for model in models]
            for number, own in enumerate(zip(*weights, strict=True)):
                _set_all(own, self._stepped(number, self._mean_of(number, own, parts)))
            for buffers in zip(*(model.buffers() for model in models), strict=True):
                is_float = buffers[0].is_floating_point()
                _set_all(buffers, _mean(buffers, parts) if is_float else buffers[0])
            if self._update.averages_optimizer:
                self._average_slots(parts)
        self._weights = [0.0 for _ in self.references]
        self._since = 0

    def _mean_of(
        self, number: int, weights: Sequence[torch.Tensor], parts: Sequence[float]
    ) -> torch.Tensor:
        """The average of a parameter; with compression, of the changes as hosts receive them."""
        if self._hosts is None:
            return _mean(weights, parts)
        start = self._averages[number]
        changes = [torch.zeros_like(start) for _ in range(self._hosts.num_hosts)]
        for replica, (weight, part) in enumerate(zip(weights, parts, strict=True)):
            changes[self._host_of(replica)] += part * (weight - start)
        return start + self._hosts.sum(str(number), changes)

    def _stepped(self, number: int, mean: torch.Tensor) -> torch.Tensor:
        """The parameter after the outer optimizer's step on its average."""
        if self._update.outer is not None:
            mean = self._outer_step(self._update.outer, number, mean)
        self._averages[number] = mean.clone()
        return mean

    def _outer_step(self, outer: Nesterov, number: int, mean: torch.Tensor) -> torch.Tensor:
        weight = nn.Parameter(self._averages[number].clone())
        weight.grad = self._averages[number] - mean
        sgd = optim.SGD([weight], lr=outer.lr, momentum=outer.momentum, nesterov=outer.momentum > 0)
        if self._momenta[number] is not None:
            sgd.state[weight]["momentum_buffer"] = self._momenta[number]
        sgd.step()
        self._momenta[number] = sgd.state[weight].get("momentum_buffer")
        return weight.detach()

    def _average_slots(self, parts: Sequence[float]) -> None:
        models = [list(_weights_of(reference.model)) for reference in self.references]
        for weights in zip(*models, strict=True):
            found: list[tuple[dict[str, Any], float]] = [
                (slots, part)
                for reference, weight, part in zip(self.references, weights, parts, strict=True)
                if (slots := reference.optimizer.state.get(weight))
            ]
            for name, value in found[0][0].items() if found else ():
                if isinstance(value, torch.Tensor) and value.shape == weights[0].shape:
                    values = [slots[name] for slots, _ in found]
                    _set_all(values, _mean(values, [part for _, part in found]))


def is_synchronous(update: AveragedUpdate, optimizer: optim.Optimizer, model: nn.Module) -> bool:
    """True if averages equal synchronous training: at every step, of plain SGD, no BatchNorm."""
    return (
        update.every == 1
        and update.outer is None
        and type(optimizer) is optim.SGD
        and all(not group["momentum"] for group in optimizer.param_groups)
        and not any(isinstance(module, _BatchNorm) for module in model.modules())
    )


def _weights_of(model: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for parameter in model.parameters() if parameter.requires_grad)


def _mean(values: Sequence[torch.Tensor], parts: Sequence[float]) -> torch.Tensor:
    return torch.stack([value * part for value, part in zip(values, parts, strict=True)]).sum(0)


def _set_all(tensors: Sequence[torch.Tensor], value: torch.Tensor) -> None:
    value = value.clone()
    for tensor in tensors:
        tensor.copy_(value)
