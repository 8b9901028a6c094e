"""Records the inputs, outputs and output gradients of modules in a step, for proofs.

Hooks on all modules record these values while a step runs, share by share, in the order of their
computation. Modules that a pipeline runs instruction by instruction are not called, and so not
recorded; those inside of them are. Values recomputed in a backward pass are not recorded again.

What is divided (``DividedTensor``) is recorded whole. If a module has used the parts of its output
itself, the gradient of this output is not recorded.
"""

import math
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from lockstep.data.trees import map_tensors, tensors_of
from lockstep.parallel.tensor.divided_tensor import leave_whole

INPUT, OUTPUT, GRADIENT = "input", "output", "gradient"


@dataclass(frozen=True)
class Spot:
    """The place of a recorded value.

    Attributes:
        kind: ``INPUT`` or ``OUTPUT`` of a module, or the ``GRADIENT`` of an output.
        module: its name.
        call: number of its earlier calls for this share.
        part: number of the tensor among its inputs or outputs.
    """

    kind: str
    module: str
    call: int = 0
    part: int = 0


@dataclass(frozen=True, kw_only=True)
class Flip:
    """A change of a value by one unit in the last place, which a proof must find.

    Attributes:
        kind: ``OUTPUT``, or ``GRADIENT`` of an output.
        name: of the module.
        rank: the rank that computes it.
        step: of training, from 0.
    """

    kind: str
    name: str
    rank: int
    step: int


@dataclass(frozen=True, kw_only=True)
class WatchedSteps:
    """The steps of a training to record.

    Attributes:
        steps: their numbers.
        flip: the value to change; None for nothing.
    """

    steps: range
    flip: Flip | None = None


# By share, in order.
Noted = dict[int, list[tuple[Spot, torch.Tensor]]]


class ModuleWatch:
    """Records values of a model.

    Args:
        model: the model.
        flip: the change to make in the current step.
    """

    def __init__(self, model: nn.Module, flip: Flip | None = None) -> None:
        self._model = model
        self._flip = flip
        self._noted: Noted = {}
        self._here = threading.local()  # shares with BatchNorm run in threads, side by side

    @contextmanager
    def watching(self) -> Iterator[Noted]:
        """Record values within the block; yields them."""
        self.begin(0)
        noted: Noted = {}
        self._noted = noted
        with ExitStack() as ending:
            ending.callback(setattr, self, "_noted", {})
            for name, module in self._model.named_modules():
                ending.callback(self._before(name, module).remove)
                ending.callback(self._after(name, module).remove)
            yield noted

    def begin(self, share: int) -> None:
        """Begin a share's forward pass in this thread; drops its earlier records."""
        self._here.share = share
        self._here.calls = Counter()
        self._noted.pop(share, None)

    def _before(self, name: str, module: nn.Module) -> Any:
        def note(_: nn.Module, args: Any, kwargs: Any) -> None:
            for tensor in tensors_of((args, kwargs)):
                leave_whole(tensor)
            self._note(INPUT, name, (args, kwargs))

        return module.register_forward_pre_hook(note, with_kwargs=True)

    def _after(self, name: str, module: nn.Module) -> Any:
        def note(_: nn.Module, __: Any, output: Any) -> Any:
            shows_gradient = [leave_whole(tensor) for tensor in tensors_of(output)]
            if not _is_first_time():
                return None
            is_due = self._is_due(OUTPUT, name)
            if is_due:
                output = map_tensors(_flipped, output)
            self._note(OUTPUT, name, output)
            share, call = self._here.share, self._here.calls[name]
            for part, tensor in enumerate(tensors_of(output)):
                if tensor.requires_grad and shows_gradient[part]:
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
    """False in a recomputation within a backward pass."""
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
