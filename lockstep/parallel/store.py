"""The parameter store: one copy of the parameters, mapped by every replica of a host.

The script's own model is moved into the store in place (``Parameter.data``), so an optimizer step
of any rank is a change of the script's model, and ``model.state_dict()`` is always the truth.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from lockstep.comm.exchange import TensorSpec
from lockstep.comm.shared_memory import SharedRegion
from lockstep.errors import ModelError, problem
from lockstep.plan.layout import flat_offsets

NamedParameters = Sequence[tuple[str, nn.Parameter]]


def tensor_spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    """How a parameter lies in memory; a layout with holes or overlaps becomes a contiguous one."""
    stride = tensor.stride() if is_dense(tensor) else torch.empty(tensor.shape).stride()
    return TensorSpec(name, tuple(tensor.shape), tuple(stride), tensor.dtype)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a block of memory without holes or overlaps."""
    expected = 1
    by_stride = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    for stride, extent in by_stride:
        if extent == 1:
            continue
        if stride != expected:
            return False
        expected *= extent
    return True


class ParameterStore:
    """A region that holds parameters, and views of it in their shapes."""

    def __init__(self, specs: Sequence[TensorSpec], region: SharedRegion) -> None:
        self.specs = tuple(specs)
        self.region = region
        offsets, _ = flat_offsets([spec.extent for spec in specs])
        self.views = [
            region.tensor(offset, spec.dtype, spec.shape, spec.stride)
            for offset, spec in zip(offsets, specs, strict=True)
        ]

    @classmethod
    def adopt(cls, parameters: NamedParameters) -> "ParameterStore":
        """Move parameters into a new store, in place."""
        check_separate(parameters)
        specs = [tensor_spec(name, parameter) for name, parameter in parameters]
        _, num_bytes = flat_offsets([spec.extent for spec in specs])
        store = cls(specs, SharedRegion.create(num_bytes))
        store.readopt(parameters)
        return store

    def fits(self, parameters: NamedParameters) -> bool:
        """Whether these are the parameters the store was made for."""
        return self.specs == tuple(tensor_spec(name, parameter) for name, parameter in parameters)

    @torch.no_grad()
    def readopt(self, parameters: NamedParameters) -> None:
        """Bring back parameters whose memory was exchanged (``p.data = ...``, ``.double()``)."""
        for view, (_, parameter) in zip(self.views, parameters, strict=True):
            if parameter.data_ptr() != view.data_ptr():
                view.copy_(parameter)
                parameter.data = view


def check_separate(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse distinct parameters that share memory: nothing says how to update them.

    Raises:
        ModelError: with the names of the two.
    """
    seen: dict[int, str] = {}
    for name, parameter in parameters:
        address = parameter.data_ptr()
        if parameter.numel() and address in seen:
            raise ModelError(
                problem(
                    "Two Parameters lie in the same memory.",
                    received=f"{seen[address]!r} and {name!r}",
                    fix="Tie them by making them one Parameter: `b.weight = a.weight`.",
                )
            )
        seen[address] = name
