"""A hook that runs before every operation that reads tensors."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class ReadHook(TorchDispatchMode):
    """Within the block, calls a function with each tensor that an operation is about to read.

    It sees the operations of forward passes and of backward passes on a CPU, also those of views.

    Args:
        before_read: the function.
    """

    def __init__(self, before_read: Callable[[torch.Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._before_read = before_read

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if _reads(func):
            for value in (*args, *(kwargs or {}).values()):
                for one in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(one, torch.Tensor):
                        self._before_read(one)
        return func(*args, **(kwargs or {}))


@cache
def _reads(func: Any) -> bool:
    """True if an operation reads values: not if it makes a view, or a tensor of the same shape."""
    name = func._schema.name.rpartition("::")[2]
    infos = [one.alias_info for one in func._schema.returns]
    is_view = any(info is not None and not info.is_write for info in infos)
    return not (is_view or name.startswith("new_") or name.endswith("_like"))
