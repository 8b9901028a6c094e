"""Values of a model's parameters and buffers, by name: taken, set, and copied to go back to.

Values are put back in place: the Parameters, and the shared memory that they may lie in, stay the
same, so values taken under any strategy are right under any.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lockstep.train.training_state import bits_of


def values_of(model: nn.Module, *, with_parameters: bool = True) -> dict[str, torch.Tensor]:
    """A model's buffers, and parameters before them, by name; tied ones once."""
    named = dict(model.named_parameters()) if with_parameters else {}
    return {name: one.detach() for name, one in (*named.items(), *model.named_buffers())}


@torch.no_grad()
def set_values(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Give parameters and buffers these values; what is not named stays as it is."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        value = values.get(name, tensor)
        if value is not tensor:
            tensor.copy_(value)


class WeightCopy:
    """The values of a model's parameters and buffers, tied ones once.

    Args:
        model: whose values to copy.
        with_parameters: not only its buffers.
    """

    def __init__(self, model: nn.Module, *, with_parameters: bool = True) -> None:
        self._with_parameters = with_parameters
        self.values = {name: value.clone() for name, value in self._of(model).items()}

    @classmethod
    def of(cls, values: Mapping[str, torch.Tensor]) -> "WeightCopy":
        """A copy that has these values."""
        copy = cls(nn.Module())
        copy.values.update(values)
        return copy

    def _of(self, model: nn.Module) -> dict[str, torch.Tensor]:
        return values_of(model, with_parameters=self._with_parameters)

    @torch.no_grad()
    def refresh(self, model: nn.Module) -> None:
        """Copy the values that the model has now."""
        for name, value in self._of(model).items():
            self.values[name].copy_(value)

    def give_back(self, model: nn.Module) -> None:
        """Give the model the values that were copied."""
        set_values(model, self.values)

    def changed(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The tensors of which the model has other values now, or that were not there, by name."""
        return {
            name: value
            for name, value in self._of(model).items()
            if name not in self.values or not _is_same(self.values[name], value)
        }


def _is_same(one: torch.Tensor, other: Any) -> bool:
    is_alike = one.dtype == other.dtype and one.shape == other.shape
    return is_alike and bits_of(one).equal(bits_of(other))
