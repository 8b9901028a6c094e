"""Master weights: a model that is in bfloat16 throughout, updated in float32.

An update is often smaller than half the distance between two bfloat16 numbers, and would be lost.
So the optimizer steps a float32 copy of every weight, and the weight is that copy, rounded
(Micikevicius et al. 2018, Mixed Precision Training, section 3.1). Each rank has the copies of what
it updates.

A weight that is no longer its copy, rounded, was set by somebody: then the copy is set to it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from lockstep.errors import OptionError
from lockstep.parallel.update import BoundPiece, SlotKey
from lockstep.train.training_state import TrainingState
from lockstep.train.updaters import TorchUpdater
from lockstep.train.wrapped_updaters import WrappedUpdater


class MasterUpdater(WrappedUpdater):
    """Steps float32 copies, and rounds them to the weights."""

    slot = "master"

    def bind(self, pieces: Sequence[BoundPiece]) -> None:
        super().bind(pieces)
        self.look_again()
        self._companions = [
            replace(one, kept=one.kept.detach().requires_grad_()) for one in self._companions
        ]
        self.inner.bind([replace(one.bound, tensor=one.kept) for one in self._companions])

    @torch.no_grad()
    def look_again(self) -> None:
        for one in self._companions:
            weight = one.bound.tensor.detach()
            is_set = one.kept.to(weight.dtype) != weight
            one.kept.copy_(torch.where(is_set, weight.float(), one.kept))
        super().look_again()

    def slot_keys(self) -> list[SlotKey]:
        return [replace(key, dtype=self.dtype) for key in super().slot_keys()]

    @torch.no_grad()
    def step(self) -> None:
        used = [one for one in self._companions if one.bound.tensor.grad is not None]
        for one in self._companions:
            gradient = one.bound.tensor.grad
            one.kept.grad = None if gradient is None else gradient.float()
        super().step()
        if used:
            torch._foreach_copy_([one.bound.tensor for one in used], [one.kept for one in used])
        for one in used:
            one.kept.grad = None

    def state(self) -> dict[str, Any]:
        return {**super().state(), "masters": dict(self.kept)}

    def load_state(self, state: TrainingState) -> None:
        super().load_state(state)
        # Of a state from before the first step the copies are the weights.
        fresh = [name for name in self.kept if name not in state.masters]
        weights = {name: self.parameters[name].detach().float() for name in fresh}
        self._keep({**weights, **state.masters})


def with_masters(
    updater: TorchUpdater | WrappedUpdater, kept: dict[str, torch.Tensor]
) -> MasterUpdater:
    """An updater with master weights around it.

    Raises:
        OptionError: an optimizer of which nobody knows how to give it other parameters.
    """
    if not updater.is_known:
        raise OptionError(
            'precision="bf16" steps float32 copies of the weights, which takes an optimizer of '
            "torch's own.",
            received=type(updater.optimizer).__name__,
            fix='Use one of torch.optim without hooks, or precision="bf16-mixed".',
        )
    return MasterUpdater(updater, kept, torch.float32)
