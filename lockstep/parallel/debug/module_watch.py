"""What modules take and return in a step, and the gradients of what they return: for proofs.

Hooks on all modules note these values while a step runs, share by share, in the order in which they
are computed. Modules that a pipeline runs instruction by instruction are not called, and so not
noted; those inside of them are. What is computed once more in a backward pass is not noted again.
"""

import math
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from lockstep.data.trees import map_tensors, tensors_of

INPUT, OUTPUT, GRADIENT = "input", "output", "gradient"


@dataclass(frozen=True)
class Spot:
    """Where a value was noted.

    Attributes:
        kind: ``INPUT`` or ``OUTPUT`` of a module, or the ``GRADIENT`` of an output.
        module: its name.
        call: how often it was called before, for this share.
        part: number of the tensor, of those that it takes or returns.
    """

    kind: str
    module: str
    call: int = 0
    part: int = 0


@dataclass(frozen=True, kw_only=True)
class Flip:
    """One unit in the last place that is added to a value, for a proof to find.

    Attributes:
        kind: ``OUTPUT``, or ``GRADIENT`` of an output.
        name: of the module.
        rank: which computes it.
        step: of training, from 0.
    """

    kind: str
    name: str
    rank: int
    step: int


@dataclass(frozen=True, kw_only=True)
class WatchedSteps:
    """What a training is to note.

    Attributes:
        steps: whose values.
        flip: what to change; None for nothing.
    """

    steps: range
    flip: Flip | None = None


# By share, in order.
Noted = dict[int, list[tuple[Spot, torch.Tensor]]]


class ModuleWatch:
    """Notes values of a model.

    Args:
        model: the model.
        flip: to be made in the step under way.
    """

    def __init__(self, model: nn.Module, flip: Flip | None = None) -> None:
        self._model = model
        self._flip = flip
        self._noted: Noted = {}
        self._here = threading.local()  # shares with BatchNorm run in threads, side by side

    @contextmanager
    def watching(self) -> Iterator[Noted]:
        """Within the block values are noted; they are what it gives."""
        self.begin(0)
        noted: Noted = {}
        self._noted = noted
        handles = [
            register(name, module)
            for name, module in self._model.named_modules()
            for register in (self._before, self._after)
        ]
        try:
            yield noted
        finally:
            for handle in handles:
                handle.remove()
            self._noted = {}

    def begin(self, share: int) -> None:
        """A share's forward pass begins in this thread; what was noted of it does not count."""
        self._here.share = share
        self._here.calls = Counter()
        self._noted.pop(share, None)

    def _before(self, name: str, module: nn.Module) -> Any:
        def note(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._note(INPUT, name, (args, kwargs))

        return module.register_forward_pre_hook(note, with_kwargs=True)

    def _after(self, name: str, module: nn.Module) -> Any:
        def note(_: nn.Module, __: Any, output: Any) -> Any:
            if not _is_first_time():
                return None
            is_due = self._is_due(OUTPUT, name)
            if is_due:
                output = map_tensors(_flipped, output)
            self._note(OUTPUT, name, output)
            share, call = self._here.share, self._here.calls[name]
            for part, tensor in enumerate(tensors_of(output)):
                if tensor.requires_grad:
                    spot = Spot(GRADIENT, name, call, part)
                    tensor.register_hook(partial(self._note_gradient, share, spot))
            self._here.calls[name] += 1
            return output if is_due else None

        return module.register_forward_hook(note)

    def _note_gradient(self, share: int, spot: Spot, gradient: torch.Tensor) -> torch.Tensor:
        if self._is_due(GRADIENT, spot.module):
            gradient = _flipped(gradient)
        self._noted.setdefault(share, []).append((spot, gradient.detach().clone()))
        return gradient

    def _note(self, kind: str, name: str, tree: Any) -> None:
        if not _is_first_time():
            return
        found = self._noted.setdefault(self._here.share, [])
        call = self._here.calls[name]
        found += [
            (Spot(kind, name, call, part), tensor.detach().clone())
            for part, tensor in enumerate(tensors_of(tree))
            if tensor.layout == torch.strided
        ]

    def _is_due(self, kind: str, name: str) -> bool:
        flip = self._flip
        return flip is not None and (flip.kind, flip.name) == (kind, name)


def _is_first_time() -> bool:
    """Whether this is no recomputation within a backward pass."""
    return torch._C._current_graph_task_id() == -1


def _flipped(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose first element is one unit in the last place larger, with its history."""
    if not tensor.is_floating_point() or not tensor.numel():
        return tensor
    change = torch.zeros_like(tensor).detach()
    _flip_first(flipped := tensor.detach().clone())
    change.view(-1)[0] = (flipped - tensor.detach()).reshape(-1)[0]
    return tensor + change


@torch.no_grad()
def _flip_first(tensor: torch.Tensor) -> None:
    first = tensor[(0,) * tensor.dim()]
    first.copy_(torch.nextafter(first, torch.full_like(first, math.inf)))
