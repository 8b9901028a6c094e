"""Hooks that run before every operation that reads tensors, and before every module's forward."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.capture.calls import uncompiled

# Views that torch makes of storages without memory, too.
_ALIASES = ("alias", "detach", "view")


@contextmanager
def reading(before_read: Callable[[list[Tensor]], None], device: torch.device) -> Iterator[None]:
    """Within the block, calls a function with the tensors that an operation is about to read.

    It sees the operations of forward passes and of backward passes, also reads by way of views.

    Args:
        before_read: the function.
        device: of the tensors. On an accelerator it is called before most views are made, too:
            torch makes none of a storage without memory.
    """
    with uncompiled(), _ReadHook(before_read, device):
        yield


class _ReadHook(TorchDispatchMode):
    def __init__(self, before_read: Callable[[list[Tensor]], None], device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._before_read = before_read
        self._needs_memory = _reads if device.type == "cpu" else _reads_or_views

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Otherwise torch imports torch.compile's modules to disable it, which takes a second."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if self._needs_memory(func):
            given = (*args, *(kwargs or {}).values())
            values = [one if isinstance(one, list | tuple) else (one,) for one in given]
            self._before_read([one for own in values for one in own if isinstance(one, Tensor)])
        return func(*args, **(kwargs or {}))


@cache
def _reads(func: Any) -> bool:
    """True if an operation reads values: not if it makes a view, or a tensor of the same shape."""
    return not _is_view(func) and _reads_or_views(func)


@cache
def _reads_or_views(func: Any) -> bool:
    """The same, or if it makes a view by strides."""
    name = func._schema.name.rpartition("::")[2]
    return not (name in _ALIASES or name.startswith("new_") or name.endswith("_like"))


def _is_view(func: Any) -> bool:
    infos = [one.alias_info for one in func._schema.returns]
    return any(info is not None and not info.is_write for info in infos)


@contextmanager
def entering(enter: Callable[[nn.Module], None]) -> Iterator[None]:
    """Within the block, ``enter`` is called with every module whose forward pass begins."""
    hook = register_module_forward_pre_hook(lambda module, inputs: enter(module))
    try:
        yield
    finally:
        hook.remove()


def is_in_backward() -> bool:
    """True in a backward pass: also in that of a trial, within a forward pass."""
    return torch._C._current_graph_task_id() != -1
