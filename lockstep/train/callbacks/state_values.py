"""Values of a model's parameters and buffers, by name: read, set, and copied to restore later.

Values are set in place: the Parameters, and the shared memory that they may use, stay the same, so
values read under any strategy are valid under any other.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lockstep.data.trees import bits_of
from lockstep.train.checkpointing.training_state import copied


def values_of(model: nn.Module, *, with_parameters: bool = True) -> dict[str, torch.Tensor]:
    """A model's buffers, and parameters before them, by name; tied ones once."""
    named = dict(model.named_parameters()) if with_parameters else {}
    return {name: one.detach() for name, one in (*named.items(), *model.named_buffers())}


@torch.no_grad()
def set_values(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Give parameters and buffers these values; others stay as they are."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        value = values.get(name, tensor)
        if value is not tensor and not value.is_meta:  # else it gets its value later
            if tensor.shape != value.shape:  # a buffer, resized by a forward pass of another rank
                tensor.resize_(value.shape)
            tensor.copy_(value)


@torch.no_grad()
def copied_values(
    model: nn.Module,
    before: Mapping[str, torch.Tensor] | None = None,
    *,
    with_parameters: bool = True,
) -> dict[str, torch.Tensor]:
    """Copies of these values: in the memory of earlier copies, if there are any."""
    found: dict[str, torch.Tensor] = copied(
        values_of(model, with_parameters=with_parameters), before
    )
    return found


def changed_values(
    before: Mapping[str, torch.Tensor], model: nn.Module, *, with_parameters: bool = True
) -> dict[str, torch.Tensor]:
    """The model's tensors whose values have changed, or that are new, by name."""
    return {
        name: value
        for name, value in values_of(model, with_parameters=with_parameters).items()
        if name not in before or not _is_same(before[name], value)
    }


def _is_same(one: torch.Tensor, other: Any) -> bool:
    is_alike = one.dtype == other.dtype and one.shape == other.shape
    return is_alike and bits_of(one).equal(bits_of(other))
