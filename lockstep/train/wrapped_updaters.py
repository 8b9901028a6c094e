"""Updaters around another: they keep a tensor beside every parameter, and act around each step.

What they keep is cut as the parameters are: each rank has its pieces of it, in memory that all
ranks map, and nothing is sent. Rank 0's dict of whole tensors outlives the ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn, optim

from lockstep.comm.gradients import TensorSpec, cut_piece
from lockstep.parallel.update import BoundPiece, PieceSlots, SlotKey, Updater
from lockstep.train.training_state import TrainingState, copy_onto
from lockstep.train.updaters import TorchUpdater


@dataclass(frozen=True)
class Companion:
    """A piece of a parameter, and the same piece of what is kept beside it."""

    bound: BoundPiece
    kept: torch.Tensor


class WrappedUpdater(Updater):
    """Does what the inner one does.

    Args:
        inner: the updater around which it is.
        kept: whole tensors by parameter name; filled here.
        dtype: of what is kept; None for the parameter's.
    """

    slot: ClassVar[str]  # what its tensors are called beside the optimizer's own slots

    def __init__(
        self,
        inner: "TorchUpdater | WrappedUpdater",
        kept: dict[str, torch.Tensor],
        dtype: torch.dtype | None = None,
    ) -> None:
        self.inner = inner
        self.kept = kept
        self.dtype = dtype
        self.owner = inner.owner
        self.is_known: bool = inner.is_known
        self.is_elementwise = inner.is_elementwise
        self._companions: list[Companion] = []

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The model's parameters by name."""
        return self.inner.parameters

    @property
    def optimizer(self) -> optim.Optimizer:
        """The user's."""
        return self.inner.optimizer

    def bind(self, pieces: Sequence[BoundPiece]) -> None:
        self._companions = [
            Companion(bound, cut_piece(self._kept_of(bound.name), bound.piece)) for bound in pieces
        ]
        self.inner.bind(pieces)

    def _kept_of(self, name: str) -> torch.Tensor:
        if name not in self.kept:
            self.kept[name] = torch.zeros_like(self.parameters[name], dtype=self.dtype).detach()
        return self.kept[name]

    def slot_keys(self) -> list[SlotKey]:
        own = [
            SlotKey(parameter=name, slot=self.slot, dtype=self.dtype)
            for name, parameter in self.parameters.items()
            if parameter.requires_grad
        ]
        return [*self.inner.slot_keys(), *own]

    @torch.no_grad()
    def store_slots(self, store: Mapping[SlotKey, torch.Tensor]) -> None:
        own = {key: place for key, place in store.items() if key.slot == self.slot}
        self.inner.store_slots({key: place for key, place in store.items() if key not in own})
        for key, place in own.items():
            before = self.kept.get(key.parameter)
            if before is not None and before is not place:
                place.copy_(before)
            self.kept[key.parameter] = place

    def options_spec(self) -> TensorSpec | None:
        return self.inner.options_spec()

    def share_options(self, tensor: torch.Tensor) -> None:
        self.inner.share_options(tensor)

    def publish_options(self) -> None:
        """See ``TorchUpdater.publish_options``."""
        self.inner.publish_options()

    def look_again(self) -> None:
        self.inner.look_again()

    def step(self) -> None:
        self.inner.step()

    def slots(self, *, with_stored: bool = False) -> list[PieceSlots]:
        return self.inner.slots(with_stored=with_stored)

    def take_slots(self, pieces: Sequence[PieceSlots]) -> None:
        """See ``TorchUpdater.take_slots``."""
        self.inner.take_slots(pieces)

    def stored(self) -> list[tuple[str, torch.Tensor]]:
        return [*self.inner.stored(), *self.kept.items()]

    def state(self) -> dict[str, Any]:
        return self.inner.state()

    def load_state(self, state: TrainingState) -> None:
        self.inner.load_state(state)

    def _keep(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """From now on keep tensors with these values."""
        before = dict(self.kept)
        self.kept.clear()
        for name, value in tensors.items():
            self.kept[name] = copy_onto(before.get(name), value, self.parameters[name])

    def recover(self) -> list[str]:
        return self.inner.recover()

    def options(self) -> list[dict[str, Any]]:
        return self.inner.options()

    def set_options(self, options: list[dict[str, Any]]) -> None:
        self.inner.set_options(options)
