"""Residency: the parameters of a unit are in memory while a pass uses them, and at no other time.

A rank keeps the pieces that it updates. Before a unit's forward pass the ranks gather the other
pieces to where they belong, and after it they free that memory; likewise in backward, when autograd
needs a saved parameter. The addresses stay the same. So the user's Parameters stay what they are,
and what autograd has saved of them is valid again when it is used (Rajbhandari et al., "ZeRO",
SC20, level 3; Zhao et al., "PyTorch FSDP", VLDB 2023).

All ranks gather the units in the Plan's order, one after the other, in forward and in reverse in
backward: also those that a rank's pass skips, and in a pass for which a rank has no samples. So a
rank never waits for a unit that another rank does not use.

In the first steps, in which the model is tried on parts of the batch, all parameters are there. In
these it is checked that the units are used in their order, and each parameter in its unit.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.comm.collectives.gradients import cut_piece
from lockstep.comm.collectives.sharded_reduce import ShardedReduce
from lockstep.comm.shared_memory.shared_region import discard
from lockstep.errors import ModelError
from lockstep.plan.layout import Piece

_FORWARD, _BACKWARD = 1, -1


class Residency:
    """One rank's end.

    Args:
        model: the model.
        modules: those of units, and their numbers.
        parameters: the trainable parameters, in order.
        units: the unit of each; None for one that stays.
        gradients: of these parameters, which also gathers their values. The gradients of unit n are
            its bucket n + 1.
        pieces: that this rank keeps.
        names: of the units.

    Attributes:
        numbers: of the parameters in units.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        modules: Mapping[nn.Module, int],
        parameters: Sequence[torch.Tensor],
        units: Sequence[int | None],
        gradients: ShardedReduce,
        pieces: Sequence[Piece],
        names: Sequence[str],
    ) -> None:
        self._model = model
        self._modules = modules
        self._names = names
        self._gradients = gradients
        self._tensors: list[dict[int, torch.Tensor]] = [{} for _ in names]
        for number, (parameter, unit) in enumerate(zip(parameters, units, strict=True)):
            if unit is not None:
                self._tensors[unit][number] = parameter.detach()
        self._kept = [
            [cut_piece(own[one.parameter], one) for one in pieces if one.parameter in own]
            for own in self._tensors
        ]
        self._spans = sorted(  # first address, one after the last, and unit
            (one.data_ptr(), one.data_ptr() + one.nbytes, unit)
            for unit, own in enumerate(self._tensors)
            for one in own.values()
        )
        self._starts = [start for start, _, _ in self._spans]
        self.numbers = frozenset(number for own in self._tensors for number in own)
        self._last = len(names) - 1
        self._present = set(range(len(names)))
        self._at = -1  # the unit that is in use, or was last
        self._direction = _FORWARD
        self._is_whole = True  # until the first release
        self._is_tried = False
        self._rounds = [0, 0]  # forward and backward passes of this batch, made so far
        self._num_rounds = 0
        self._num_backward = 0
        self._forward_first = False

    # --- what is there ---------------------------------------------------------------------------

    def hold_all(self) -> None:
        """Between steps: gather all units, and keep them; every rank calls it."""
        self._gradients.free()
        for unit in range(len(self._names)):
            self._gather(unit)
        self._is_whole = True

    def release(self) -> None:
        """Free all but this rank's pieces."""
        for unit in sorted(self._present):
            self._free(unit)
        self._is_whole = False

    @torch.no_grad()
    def abandon(self) -> bool:
        """After a failure: put NaN where other ranks' parts are away; True if any are."""
        away = set(range(len(self._names))) - self._present
        for unit in away:
            own = [one.clone() for one in self._kept[unit]]
            for tensor in self._tensors[unit].values():
                tensor.fill_(math.nan)
            for place, value in zip(self._kept[unit], own, strict=True):
                place.copy_(value)
        return bool(away)

    def _gather(self, unit: int) -> None:
        if unit not in self._present:
            self._gradients.all_gather(self._tensors[unit], all_pieces=True)
            self._present.add(unit)

    def _free(self, unit: int) -> None:
        self._present.discard(unit)
        for tensor in self._tensors[unit].values():
            discard(tensor, self._kept[unit])

    # --- the passes over a batch -----------------------------------------------------------------

    def begin(
        self, num_rounds: int, *, is_training: bool, is_tried: bool, forward_first: bool
    ) -> None:
        """Begin a batch; every rank calls it.

        Args:
            num_rounds: the most passes that any rank makes.
            is_training: they go backward, too.
            is_tried: the model is tried on parts of the batch.
            forward_first: no pass goes backward before all have gone forward.
        """
        self._num_rounds = num_rounds
        self._num_backward = num_rounds if is_training else 0
        self._rounds = [0, 0]
        self._forward_first = forward_first
        self._is_tried = is_tried
        if is_tried:
            self.hold_all()
        elif is_training and self._is_whole:
            self.release()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward pass."""
        self._rounds[0] += 1
        self._start(_FORWARD)
        checks = _UseCheck(self) if self._is_tried else nullcontext()
        saved = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        hook = register_module_forward_pre_hook(self._enter)
        try:
            with checks, saved:
                yield
        finally:
            hook.remove()
        self._move_to(self._last)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward pass."""
        self._rounds[1] += 1
        self._start(_BACKWARD)
        hook = register_module_forward_pre_hook(self._enter)  # for what is computed again
        try:
            yield
        finally:
            hook.remove()
        self._move_to(0)

    def finish_forward(self) -> None:
        """Before a backward pass: take part in the forward passes that other ranks make first."""
        while self._forward_first and self._rounds[0] < self._num_rounds:
            with self.forward():
                pass

    def finish(self) -> None:
        """Take part in the passes that other ranks still make; every rank calls it."""
        self.finish_forward()
        while self._rounds[0] < self._num_rounds or self._rounds[1] < self._num_backward:
            if self._rounds[0] < self._num_rounds:
                with self.forward():
                    pass
            if self._rounds[1] < self._num_backward:
                with self.backward():
                    pass

    def _start(self, direction: int) -> None:
        """Begin at the first unit in a direction, of which a pass before may have left it."""
        self._direction = direction
        first = 0 if direction == _FORWARD else self._last
        self._at = first - direction
        if self._is_whole:
            return
        for unit in sorted(self._present - {first}):
            self._free(unit)
        if first in self._present:
            self._at = first

    def _move_to(self, unit: int) -> None:
        """Go to a unit, by way of all units before it."""
        while (unit - self._at) * self._direction > 0:
            before, self._at = self._at, self._at + self._direction
            if not self._is_whole:
                self._advance(before)

    def _advance(self, before: int) -> None:
        if self._direction == _BACKWARD and before <= self._last and self._is_last_round:
            self._gradients.complete_down_to(before + 1)
        self._gather(self._at)
        if before in self._present:
            self._free(before)

    @property
    def _is_last_round(self) -> bool:
        return self._rounds[1] == self._num_backward

    # --- where units are used --------------------------------------------------------------------

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        """A module's forward pass begins."""
        if module is self._model and self._is_whole:
            self._at = -1
        unit = self._modules.get(module)
        if unit is not None:
            self._use(unit)

    def _use(self, unit: int) -> None:
        """A unit's parameters are used now."""
        if unit == self._at:
            return
        if (unit - self._at) * self._direction < 0:
            if self._direction == _BACKWARD and self._is_whole:
                return
            raise ModelError(
                "Units of sharded parameters must be used in their order, each at one time.",
                received=f"{self._names[unit]!r} after {self._names[self._at]!r}",
                fix="Name them as one unit, or in the order in which the model runs them: "
                "FullyShardedStrategy(units=[...]).",
            )
        self._move_to(unit)

    def check_use(self, tensor: torch.Tensor) -> None:
        """Check that an operation reads a unit's memory within the unit.

        Raises:
            ModelError: it does so outside.
        """
        place = self._place_of(tensor)
        if place is None or self._spans[place][2] == self._at:
            return
        start, _, unit = self._spans[place]
        named = self._model.named_parameters()
        raise ModelError(
            "A sharded parameter is used outside of its unit, where other ranks' parts of it are "
            "not there.",
            received=f"{next(name for name, one in named if one.data_ptr() == start)!r} of unit "
            f"{self._names[unit]!r}, used "
            + (f"in unit {self._names[self._at]!r}" if self._at >= 0 else "before any unit"),
            fix="Name both as one unit, or leave this one out so that it stays on every rank: "
            "FullyShardedStrategy(units=[...]).",
        )

    # --- what autograd saves ---------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int, int | None]:
        """A tensor that autograd saves, its version, and the unit in whose memory it lies."""
        place = self._place_of(tensor)
        return tensor, tensor._version, None if place is None else self._spans[place][2]

    def _unpack(self, packed: tuple[torch.Tensor, int, int | None]) -> torch.Tensor:
        tensor, version, unit = packed
        if unit is not None:
            if not self._is_whole:
                self._use(unit)
        elif tensor._version != version:  # torch does not check this where there are hooks
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a tensor of shape {tuple(tensor.shape)} is at version "
                f"{tensor._version}; expected version {version} instead."
            )
        return tensor

    def _place_of(self, tensor: torch.Tensor) -> int | None:
        """The number of the span in which a tensor lies."""
        if tensor.layout != torch.strided or not tensor.numel():
            return None
        place = bisect_right(self._starts, tensor.data_ptr()) - 1
        return place if place >= 0 and tensor.data_ptr() < self._spans[place][1] else None


class _UseCheck(TorchDispatchMode):
    """Checks every operation of a forward pass that reads a unit's memory."""

    def __init__(self, residency: Residency) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._residency = residency

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        # A trial on parts of the batch goes backward within the forward pass.
        is_forward = torch._C._current_graph_task_id() == -1
        if is_forward and not _makes_view(func):
            for value in (*args, *(kwargs or {}).values()):
                for one in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(one, torch.Tensor):
                        self._residency.check_use(one)
        return func(*args, **(kwargs or {}))


def _makes_view(func: Any) -> bool:
    """True if an operation only looks at its input's memory in another shape."""
    infos = [one.alias_info for one in func._schema.returns]
    return any(info is not None and not info.is_write for info in infos)
