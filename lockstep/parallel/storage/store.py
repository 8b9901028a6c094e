"""The stores: one copy of the parameters and of the optimizer's slots, mapped by every replica.

The script's own model is moved into its store in place (``Parameter.data``), so an optimizer step
of any rank changes the script's model, and ``model.state_dict()`` is always up to date. The slots
(momenta, averages) of the script's optimizer are likewise in a second store.
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Self

import torch
from torch import nn

from lockstep.comm.collectives.gradients import TensorSpec
from lockstep.comm.shared_memory.file_region import FileRegion
from lockstep.comm.shared_memory.shared_region import SharedRegion, dense_stride
from lockstep.errors import ModelError
from lockstep.parallel.storage.allocator import give_back_freed_memory, temporary_memory
from lockstep.parallel.updater_interface import SlotKey
from lockstep.plan.layout import flat_offsets

# Freed memory that may stay in the heap while parameters are moved.
_FREED_BYTES = 1 << 25

NamedParameters = Sequence[tuple[str, nn.Parameter]]


def tensor_spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    """A parameter's layout in memory; one with holes or overlaps becomes contiguous."""
    return TensorSpec(name, tuple(tensor.shape), dense_stride(tensor), tensor.dtype)


def slot_spec(key: SlotKey, parameter: torch.Tensor) -> TensorSpec:
    """A slot's layout in memory: that of its parameter."""
    spec = tensor_spec(f"{key.parameter}: {key.slot}", parameter)
    return replace(spec, dtype=key.dtype or spec.dtype)


class TensorStore:
    """A region that holds tensors, and views of it in their shapes.

    Attributes:
        is_elsewhere: the host's other ranks use them, or all but a part: between calls, and until
            it uses them, this process has no pages of them.
    """

    is_elsewhere = False

    def __init__(self, specs: Sequence[TensorSpec], region: SharedRegion) -> None:
        self.specs = tuple(specs)
        self.region = region
        offsets, _ = flat_offsets([spec.extent for spec in specs])
        self.views = [
            region.tensor(offset, spec.dtype, spec.shape, spec.stride)
            for offset, spec in zip(offsets, specs, strict=True)
        ]

    @classmethod
    def create(
        cls, specs: Sequence[TensorSpec], *, is_reserved: bool = True, directory: str | None = None
    ) -> Self:
        """A new store, all zeros.

        Args:
            specs: of its tensors.
            is_reserved: reserve the memory now; else its first user must reserve it.
            directory: of the file in which it lies; None for memory.
        """
        _, num_bytes = flat_offsets([spec.extent for spec in specs])
        if directory is not None:
            return cls(specs, FileRegion.create_in(directory, num_bytes))
        return cls(specs, SharedRegion.create(num_bytes, [] if is_reserved else [(0, num_bytes)]))

    def release_pages(self) -> None:
        """Release this process's pages, if other ranks use the tensors."""
        if self.is_elsewhere:
            self.region.release_pages()

    def copy(self) -> "TensorStore":
        """A new store with the same values."""
        other = TensorStore.create(self.specs)
        copy_to_views(other.views, self.views)
        other.region.release_pages()
        return other


@torch.no_grad()
def copy_to_views(views: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy values to views, from any device."""
    for view, value in zip(views, values, strict=True):
        view.copy_(value)


class ParameterStore(TensorStore):
    """The store of a model's parameters."""

    @classmethod
    def adopt(
        cls, parameters: NamedParameters, *, are_blank: bool = False, is_reserved: bool = True
    ) -> "ParameterStore":
        """Move parameters into a new store, in place.

        Args:
            parameters: by name.
            are_blank: they have no values to move.
            is_reserved: see ``create``.
        """
        check_separate(parameters)
        specs = [tensor_spec(name, parameter) for name, parameter in parameters]
        store = cls.create(specs, is_reserved=is_reserved)
        if are_blank:
            for view, (_, parameter) in zip(store.views, parameters, strict=True):
                parameter.data = view
        else:
            store.readopt(parameters)
        return store

    def fits(self, parameters: NamedParameters) -> bool:
        """True if the store was made for these parameters."""
        return self.specs == tuple(tensor_spec(name, parameter) for name, parameter in parameters)

    def readopt(self, parameters: NamedParameters) -> None:
        """Move parameters back whose memory was replaced (``p.data = ...``, ``.double()``).

        Raises:
            ModelError: a parameter has another shape.
        """
        moved = moved_parameters(self.views, parameters)
        if moved:  # rare; this runs after every step that a callback watches
            self._move_back(moved)

    @torch.no_grad()
    @temporary_memory()
    def _move_back(self, moved: Sequence[tuple[torch.Tensor, nn.Parameter]]) -> None:
        freed = 0
        for view, parameter in moved:
            overlaps = self.region.holds(parameter)  # another view of the same memory
            view.copy_(parameter.clone() if overlaps else parameter)
            set_data(parameter, view)
            freed += view.nbytes
            if freed > _FREED_BYTES:  # so that the model is not there twice
                give_back_freed_memory()
                freed = 0


def moved_parameters(
    views: Sequence[torch.Tensor], parameters: NamedParameters
) -> list[tuple[torch.Tensor, nn.Parameter]]:
    """The parameters that lie elsewhere than in these views, each with its view.

    Raises:
        ModelError: a parameter has another shape.
    """
    for view, (name, parameter) in zip(views, parameters, strict=True):
        if parameter.shape != view.shape:
            raise ModelError(
                "A parameter keeps its shape while it is trained.",
                received=f"{name!r} of shape {(*parameter.shape,)}, before {(*view.shape,)}",
                fix="Assign values of the same shape, or call fit with the changed model.",
            )
    return [
        (view, parameter)
        for view, (_, parameter) in zip(views, parameters, strict=True)
        if not _same_memory(parameter, view)
    ]


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Move a Parameter or buffer to ``data``; it stays the same object."""
    try:
        tensor.data = data
    except RuntimeError:  # torch allows it between CPU, CUDA and XPU only
        is_parameter = isinstance(tensor, nn.Parameter)
        other = nn.Parameter(data, tensor.requires_grad) if is_parameter else data.view_as(data)
        torch.utils.swap_tensors(tensor, other)


def move_model(model: nn.Module, device: torch.device) -> None:
    """Move a model and its gradients to a device; Parameters and buffers stay the same objects."""
    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    for module in recurrent:
        module._flat_weight_refs = []  # tensors with weak references cannot be swapped
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device != device:
            gradient = tensor.grad if tensor.is_leaf else None
            if gradient is not None:
                tensor.grad = None
            set_data(tensor, tensor.detach().to(device))
            if gradient is not None:
                tensor.grad = gradient.to(device)
    for module in recurrent:
        module._flat_weight_refs = [
            one if one is None else weakref.ref(one) for one in module._flat_weights
        ]
        module.flatten_parameters()


def _same_memory(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    return (
        tensor.device == view.device
        and tensor.data_ptr() == view.data_ptr()
        and tensor.dtype == view.dtype
        and tensor.stride() == view.stride()
    )


def check_separate(
    parameters: Iterable[tuple[str, nn.Parameter]], others: Iterable[tuple[str, torch.Tensor]] = ()
) -> None:
    """Check that parameters to be moved share no memory with each other, or with other tensors.

    Raises:
        ModelError: with the names of the two.
    """
    named = [
        *((name, tensor, True) for name, tensor in parameters),
        *((name, tensor, False) for name, tensor in others),
    ]
    spans = sorted((*_span(tensor), name, moves) for name, tensor, moves in named if tensor.numel())
    furthest: dict[tuple[int, bool], tuple[int, str]] = {}
    for base, start, end, name, moves in spans:
        for other_moves in {True, not moves}:  # two that stay may share memory
            until, other = furthest.get((base, other_moves), (start, ""))
            if until > start:
                raise ModelError(
                    "A Parameter lies in the same memory as another Parameter, buffer or attribute "
                    "of the model.",
                    received=f"{other!r} and {name!r}",
                    fix="Tie parameters by making them one Parameter, `b.weight = a.weight`; make "
                    "a buffer or attribute a copy, or the Parameter itself.",
                )
        furthest[base, moves] = max(furthest.get((base, moves), (end, name)), (end, name))


def check_attributes(model: nn.Module) -> None:
    """Check that no tensor that a model keeps as an attribute lies in a trained parameter's memory.

    Raises:
        ModelError: one does, and would keep the values of before, since parameters are moved.
    """
    trained = [one for one in model.named_parameters() if one[1].requires_grad]
    check_separate(trained, _attributes(model))


def _attributes(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that are attributes of modules, also in lists and dicts, but no Parameters."""
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            is_formed = f"{key}_orig" in module._parameters  # by each call, as spectral_norm does
            if key == "_buffers" or is_formed:
                continue
            held = list(value.values()) if isinstance(value, dict) else value
            for one in held if isinstance(held, list | tuple) else (held,):
                if type(one) is torch.Tensor and one.layout == torch.strided and not one.is_meta:
                    yield (f"{path}.{key}" if path else key), one


def _span(tensor: torch.Tensor) -> tuple[int, int, int]:
    """A storage, its first address of the tensor, and the one after the last.

    In host memory all storages are one: several may be of the same memory. On a device an address
    may be a handle, which says nothing of others.
    """
    reach = sum(
        (extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    start = tensor.data_ptr()
    base = 0 if tensor.device.type == "cpu" else tensor.untyped_storage().data_ptr()
    return base, start, start + (reach + 1) * tensor.element_size()
