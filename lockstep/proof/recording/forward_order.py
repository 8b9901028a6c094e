"""The order of the modules in the first forward pass, and the shortest dtype that they compute in.

Hooks note both and are removed after the first step. They do nothing while torch.compile traces,
so that the graph is the one without them; the order is then that of registration.
"""

from typing import Any

import torch
from torch import nn

from lockstep.proof.recording.names import Names
from lockstep.proof.recording.record_frames import Computation


class ForwardOrder:
    """Notes the modules of a model that have parameters or buffers, as they are called."""

    def __init__(self, model: nn.Module) -> None:
        self._order: dict[str, None] = {}
        self._dtype = ""
        canonical = Names(model)
        self._handles = [
            module.register_forward_hook(self._hook(canonical(name)))
            for name, module in model.named_modules()
            if any(True for _ in module.parameters(recurse=False))
            or any(True for _ in module.buffers(recurse=False))
        ]

    def _hook(self, name: str) -> Any:
        def note(_module: Any, _args: Any, output: Any) -> None:
            if not torch.compiler.is_compiling():
                self._note(name, output)

        return note

    def _note(self, name: str, output: Any) -> None:
        self._order.setdefault(name)
        if isinstance(output, torch.Tensor) and output.is_floating_point():
            seen = str(output.dtype).removeprefix("torch.")
            if not self._dtype or output.dtype.itemsize < getattr(torch, self._dtype).itemsize:
                self._dtype = seen

    @property
    def has_seen(self) -> bool:
        """Whether a module was called."""
        return bool(self._order)

    def remove(self) -> Computation:
        """Remove the hooks; returns what they have noted."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        return Computation(self._dtype, tuple(self._order))
