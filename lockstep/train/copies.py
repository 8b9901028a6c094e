"""Copies of weights and optimizers in memory of their own, to go back to.

Values are copied and put back in place: the Parameters, and the shared memory that they may lie in,
stay the same, so a copy taken under any strategy is right under any. What an optimizer keeps apart
from its slots and options (attributes of its own) is not covered.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn, optim


class WeightCopy:
    """The values of a model's parameters and buffers, tied ones once.

    Args:
        model: whose values to copy.
        with_parameters: not only its buffers.
    """

    def __init__(self, model: nn.Module, *, with_parameters: bool = True) -> None:
        self._with_parameters = with_parameters
        self._values = {name: value.detach().clone() for name, value in self._named(model)}

    def _named(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        if self._with_parameters:
            yield from model.named_parameters()
        yield from model.named_buffers()

    @torch.no_grad()
    def refresh(self, model: nn.Module) -> None:
        """Copy the values that the model has now."""
        for name, value in self._named(model):
            self._values[name].copy_(value)

    @torch.no_grad()
    def give_back(self, model: nn.Module) -> None:
        """Give the model the values that were copied."""
        for name, value in self._named(model):
            value.copy_(self._values[name])

    def changed(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The tensors of which the model has other values now, or that were not there, by name."""
        return {
            name: value.detach()
            for name, value in self._named(model)
            if name not in self._values or not _is_same(self._values[name], value)
        }


class OptimizerCopy:
    """An optimizer's slots and options.

    Args:
        optimizer: whose to copy.
    """

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self._state = {key: _copied(slots) for key, slots in optimizer.state.items()}
        self._groups = [
            (list(group["params"]), _copied(_options(group))) for group in optimizer.param_groups
        ]

    def give_back(self, optimizer: optim.Optimizer) -> None:
        """Give the optimizer what was copied; once, as it keeps what it gets."""
        optimizer.state.clear()
        optimizer.state.update(self._state)
        del optimizer.param_groups[len(self._groups) :]
        for group, (parameters, options) in zip(optimizer.param_groups, self._groups, strict=True):
            group.clear()
            group.update(params=parameters, **options)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    is_alike = one.dtype == other.dtype and one.shape == other.shape
    return is_alike and _bits(one).equal(_bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """What tells NaN from other NaN, and 0 from -0."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for key, value in values.items()
    }
