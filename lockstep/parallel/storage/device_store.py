"""Stores of ranks on accelerators: each has its tensors in its own device's memory.

The script's process has the initial tensors of all ranks. It sends them as in a store that a host's
ranks share: in a shared region, written when a call is sent, which each rank copies to its device
and closes.

Tensors that only other ranks train (a stage's parameters) are in host memory on rank 0. The other
ranks write them there when rank 0 needs them.
"""

from collections.abc import Sequence
from typing import Self

import torch
from torch import nn

from lockstep.comm.collectives.gradients import TensorSpec, views_in
from lockstep.comm.shared_memory.shared_region import SharedRegion
from lockstep.parallel.storage.store import (
    NamedParameters,
    TensorStore,
    copy_to_views,
    moved_parameters,
    set_data,
    tensor_spec,
)
from lockstep.plan.layout import flat_offsets

# Tensors in memory that rank 0 maps, and the tensors on a device with their values.
Mirror = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]

# Mirrors of parameters, and of slots.
Mirrors = tuple[Sequence[Mirror], Sequence[Mirror]]


class DeviceStore(TensorStore):
    """Tensors in a device's memory, and a region that sends their values to other ranks.

    Args:
        specs: of the tensors.
        views: the tensors.
    """

    def __init__(self, specs: Sequence[TensorSpec], views: list[torch.Tensor]) -> None:
        self.specs = tuple(specs)
        self.views = views

    @classmethod
    def zeros(cls, specs: Sequence[TensorSpec], device: torch.device) -> Self:
        """A new store, all zeros."""
        _, num_bytes = flat_offsets([spec.extent for spec in specs])
        buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        return cls(specs, views_in(buffer, specs))

    @classmethod
    def of(cls, parameters: NamedParameters) -> Self:
        """A store of parameters in place; one with holes in its memory is moved."""
        specs = [tensor_spec(name, parameter) for name, parameter in parameters]
        for spec, (_, parameter) in zip(specs, parameters, strict=True):
            if parameter.stride() != spec.stride:
                parameter.data = torch.empty_strided(
                    spec.shape, spec.stride, dtype=spec.dtype, device=parameter.device
                ).copy_(parameter)
        return cls(specs, [parameter.data for _, parameter in parameters])

    @torch.no_grad()
    def readopt(self, parameters: NamedParameters) -> None:
        """See ``ParameterStore.readopt``."""
        for view, parameter in moved_parameters(self.views, parameters):
            view.copy_(parameter.clone())  # it may overlap the view
            set_data(parameter, view)

    @torch.no_grad()
    def publish(self) -> None:
        """Write the values to a region that others can open."""
        _, num_bytes = flat_offsets([spec.extent for spec in self.specs])
        self.region = SharedRegion.create(num_bytes)
        copy_to_views(TensorStore(self.specs, self.region).views, self.views)


@torch.no_grad()
def flatten_recurrent(
    model: nn.Module, parameters: Sequence[nn.Parameter], views: Sequence[torch.Tensor]
) -> None:
    """Move the weights of each recurrent layer to one piece of memory, as cuDNN wants them.

    Args:
        model: on this thread's current device; where that has no cuDNN nothing moves.
        parameters: of the model.
        views: of the same memory as the parameters; they follow.
    """
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    for parameter, view in zip(parameters, views, strict=True):
        if parameter.data_ptr() != view.data_ptr():
            view.set_(parameter.data)  # type: ignore[call-overload]


@torch.no_grad()
def on_device(views: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copies of tensors, in a device's memory, with the same strides."""
    copies = [
        torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device=device)
        for view in views
    ]
    copy_to_views(copies, views)
    return copies
