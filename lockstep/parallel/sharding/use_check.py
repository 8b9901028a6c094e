"""Looks at every operation that reads memory."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class UseCheck(TorchDispatchMode):
    """Within the block, in passes forward and backward.

    Args:
        check: called with each tensor whose values an operation reads, before it does.
    """

    def __init__(self, check: Callable[[torch.Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._check = check

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if _reads(func):
            for value in (*args, *(kwargs or {}).values()):
                for one in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(one, torch.Tensor):
                        self._check(one)
        return func(*args, **(kwargs or {}))


@cache
def _reads(func: Any) -> bool:
    """True if an operation reads values, and not only shapes: no views, no new tensors."""
    name = func._schema.name.rpartition("::")[2]
    infos = [one.alias_info for one in func._schema.returns]
    is_view = any(info is not None and not info.is_write for info in infos)
    return not (is_view or name.startswith("new_") or name.endswith("_like"))
