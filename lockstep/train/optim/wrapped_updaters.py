"""Updaters that wrap another: they keep a tensor beside every parameter, and act around each step.

These tensors are divided as the parameters are: each rank has its pieces, in memory that all ranks
map, and nothing is sent. Rank 0's dict of whole tensors outlives the ranks.

**Velocities** of an outer optimizer, which steps on the average of replicas, are kept here as a
part of the training's state; averaging changes them (``parallel.local_sgd.averaging``). All
replicas have the same.

**Master weights**: float32 copies for a model that is in bfloat16 throughout.

An update is often smaller than half the distance between two bfloat16 numbers, and would be lost.
So the optimizer steps a float32 copy of every weight, and the weight is that copy, rounded
(Micikevicius et al. 2018, Mixed Precision Training, section 3.1). Each rank has the copies of the
weights that it updates.

If a weight differs from its rounded copy, the script has set it: then the copy is set to it.

**Averages**: a second set of weights, an exponential moving average of the trained ones.

Each rank averages the pieces that it updates, right after their update, which needs no
communication.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import nn, optim

from lockstep.comm.collectives.gradients import TensorSpec
from lockstep.comm.shared_memory.file_region import is_in_file, write_behind
from lockstep.errors import OptionError
from lockstep.options import is_number
from lockstep.parallel.updater_interface import BoundPiece, PieceSlots, SlotKey
from lockstep.train.checkpointing.training_state import TrainingState, copy_onto
from lockstep.train.optim.combined_updater import CombinedUpdater
from lockstep.train.optim.stored_pieces import StoredPieces
from lockstep.train.optim.updaters import TorchUpdater


@dataclass(frozen=True)
class Companion:
    """A piece of a parameter, and the same piece of the tensor beside it."""

    bound: BoundPiece
    kept: torch.Tensor


class WrappedUpdater(CombinedUpdater):
    """Hands on to the inner updater what it does not do itself.

    Args:
        inner: the updater that it wraps.
        kept: whole tensors by parameter name; filled here.
        dtype: of these tensors; None for the parameter's.
    """

    slot: ClassVar[str]  # the name of its tensors beside the optimizer's own slots

    def __init__(
        self,
        inner: "TorchUpdater | WrappedUpdater",
        kept: dict[str, torch.Tensor],
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(inner.owner, [inner])
        self.inner = inner
        self.kept = kept
        self.dtype = dtype
        self._companions: list[Companion] = []
        self._stored_pieces = StoredPieces()
        self._is_in_file = False  # what is kept

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The model's parameters by name."""
        return self.inner.parameters

    @property
    def optimizer(self) -> optim.Optimizer:
        """The user's."""
        return self.inner.optimizer

    def bind(self, pieces: Sequence[BoundPiece]) -> None:
        self._stored_pieces = StoredPieces()
        self._companions = [
            Companion(bound, self._stored_pieces.of(self._kept_of(bound.name), bound))
            for bound in pieces
        ]
        self._is_in_file = any(is_in_file(one.kept) for one in self._companions)
        super().bind(pieces)

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
        return [*super().slot_keys(), *own]

    @torch.no_grad()
    def store_slots(self, store: Mapping[SlotKey, torch.Tensor]) -> None:
        own = {key: place for key, place in store.items() if key.slot == self.slot}
        super().store_slots({key: place for key, place in store.items() if key not in own})
        for key, place in own.items():
            before = self.kept.get(key.parameter)
            if before is not None and before is not place:
                place.copy_(before)
            self.kept[key.parameter] = place

    def options_spec(self) -> TensorSpec | None:
        return self.inner.options_spec()

    def share_options(self, tensor: torch.Tensor) -> None:
        self.inner.share_options(tensor)

    def step(self) -> None:
        self.inner.step()

    def write_back_slots(self) -> None:
        self._stored_pieces.write_back()
        super().write_back_slots()

    def stored(self) -> list[tuple[str, torch.Tensor]]:
        return [*super().stored(), *self.kept.items()]

    def state(self) -> dict[str, Any]:
        return self.inner.state()

    def load_state(self, state: TrainingState) -> None:
        self.inner.load_state(state)

    def _write_behind(self) -> None:
        """After a step: keep no memory for what is in a file."""
        if self._is_in_file:
            write_behind(one.kept.detach() for one in self._companions)

    def _keep(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace the kept tensors by some with these values."""
        before = dict(self.kept)
        self.kept.clear()
        for name, value in tensors.items():
            self.kept[name] = copy_onto(before.get(name), value, self.parameters[name])


class OuterUpdater(WrappedUpdater):
    """Keeps a velocity for every trained weight."""

    slot = "velocity"

    def velocity(self, name: str) -> torch.Tensor:
        return self._kept_of(name)

    def slot_keys(self) -> list[SlotKey]:
        return self.inner.slot_keys()

    def slots(self, *, with_stored: bool = False) -> list[PieceSlots]:
        """The inner updater's, and velocities: rank 0 does not have those of all stages."""
        own = () if with_stored else {one.bound.name for one in self._companions}
        return [
            *super().slots(with_stored=with_stored),
            *(
                PieceSlots(name=name, start=0, stop=0, slots={self.slot: self.kept[name]})
                for name in own
            ),
        ]

    def take_slots(self, pieces: Sequence[PieceSlots]) -> None:
        for part in pieces:
            if self.slot in part.slots:
                self._kept_of(part.name).copy_(part.slots[self.slot])
        super().take_slots([part for part in pieces if self.slot not in part.slots])

    def state(self) -> dict[str, Any]:
        return {**super().state(), "velocities": dict(self.kept)}

    def load_state(self, state: TrainingState) -> None:
        super().load_state(state)
        self._keep(state.velocities)


class MasterUpdater(WrappedUpdater):
    """Steps float32 copies, and rounds them to the weights."""

    slot = "master"

    def bind(self, pieces: Sequence[BoundPiece]) -> None:
        super().bind(pieces)
        self.reload_weights()
        self._companions = [
            replace(one, kept=one.kept.detach().requires_grad_()) for one in self._companions
        ]
        self.inner.bind([replace(one.bound, tensor=one.kept) for one in self._companions])

    @torch.no_grad()
    def reload_weights(self) -> None:
        for one in self._companions:
            weight = one.bound.tensor.detach()
            is_set = one.kept.to(weight.dtype) != weight
            one.kept.copy_(torch.where(is_set, weight.float(), one.kept))
        super().reload_weights()

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
        self._write_behind()

    def state(self) -> dict[str, Any]:
        return {**super().state(), "masters": dict(self.kept)}

    def load_state(self, state: TrainingState) -> None:
        super().load_state(state)
        # In a state from before the first step the copies are the weights.
        fresh = [name for name in self.kept if name not in state.masters]
        weights = {name: self.parameters[name].detach().float() for name in fresh}
        self._keep({**weights, **state.masters})


def with_masters(
    updater: TorchUpdater | WrappedUpdater, kept: dict[str, torch.Tensor]
) -> MasterUpdater:
    """An updater wrapped with master weights.

    Raises:
        OptionError: the optimizer is not torch's own, so it cannot step copies.
    """
    if not updater.is_known:
        raise OptionError(
            'precision="bf16" steps float32 copies of the weights, which needs one of torch\'s own '
            "optimizers.",
            received=type(updater.optimizer).__name__,
            fix='Use one of torch.optim without hooks, or precision="bf16-mixed".',
        )
    return MasterUpdater(updater, kept, torch.float32)


@dataclass(frozen=True)
class EMA:
    """An exponential moving average of the weights (Polyak and Juditsky 1992).

    After every update ``average = decay * average + (1 - decay) * weight``, the first time
    ``average = weight``, as in ``torch.optim.swa_utils`` and in Keras's optimizers.

    Args:
        decay: from 0 (the weights as they are) to below 1.

    Raises:
        OptionError: another decay.
    """

    decay: float = 0.999

    def __post_init__(self) -> None:
        decay: object = self.decay
        if not (is_number(decay) and 0 <= self.decay < 1):
            raise OptionError(
                "`decay` must be a number from 0 to below 1.",
                received=f"decay={decay!r}",
                fix="Use 0.999, for example.",
            )


@dataclass
class Averages:
    """The averages of a model's weights.

    Attributes:
        ema: the decay.
        by_name: whole tensors, of the trainable parameters.
        num_updates: averaged so far.
        begun: the names of the parameters that have an average.
        is_applied: True while the model has the averaged weights.
    """

    ema: EMA
    by_name: dict[str, torch.Tensor] = field(default_factory=dict)
    num_updates: int = 0
    begun: set[str] = field(default_factory=set)
    is_applied: bool = False

    @contextmanager
    def applied_to(self, model: nn.Module) -> Iterator[None]:
        """Within the block the model has the averaged weights.

        Raises:
            OptionError: there are none yet.
        """
        if not self.num_updates:
            raise OptionError(
                "Weights are averaged after updates, so there are no averages before the first.",
                received="no update yet",
                fix="Call fit first.",
            )
        weights = {
            name: parameter for name, parameter in model.named_parameters() if name in self.begun
        }
        trained = {name: parameter.detach().clone() for name, parameter in weights.items()}
        _set_weights(weights, self.by_name)
        self.is_applied = True
        try:
            yield
        finally:
            self.is_applied = False
            _set_weights(weights, trained)


@torch.no_grad()
def _set_weights(weights: dict[str, nn.Parameter], values: dict[str, torch.Tensor]) -> None:
    for name, weight in weights.items():
        weight.copy_(values[name])


class AveragingUpdater(WrappedUpdater):
    """Averages this rank's pieces after every step.

    Args:
        inner: the updater that steps.
        averages: kept up to date here.
        dtype: of the averages; None for the parameters'.
    """

    slot = "average"

    def __init__(
        self,
        inner: TorchUpdater | WrappedUpdater,
        averages: Averages,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(inner, averages.by_name, dtype)
        self._averages = averages
        self._trainable = {  # a parameter without elements is in no rank's pieces
            name for name, one in self.parameters.items() if one.requires_grad and one.numel()
        }

    @torch.no_grad()
    def step(self) -> None:
        super().step()
        averages = self._averages
        going = [one for one in self._companions if one.bound.name in averages.begun]
        new = [one for one in self._companions if one.bound.name not in averages.begun]
        if going:
            torch._foreach_lerp_(*_kept_and_weights(going), 1 - averages.ema.decay)
        if new:
            torch._foreach_copy_(*_kept_and_weights(new))
        self.count_steps(1)
        self._write_behind()

    def count_steps(self, number: int) -> None:
        self._averages.num_updates += number
        if number:
            self._averages.begun |= self._trainable  # other ranks have averaged theirs, too

    def state(self) -> dict[str, Any]:
        averages = self._averages
        weights = {name: one for name, one in self.kept.items() if name in averages.begun}
        own = {"num_updates": averages.num_updates, "weights": weights}
        return {**super().state(), "averages": own}

    def load_state(self, state: TrainingState) -> None:
        super().load_state(state)
        assert state.averages is not None
        self._keep(state.averages["weights"])
        self._averages.num_updates = state.averages["num_updates"]
        self._averages.begun = set(state.averages["weights"])


def _kept_and_weights(
    companions: Sequence[Companion],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [one.kept for one in companions], [one.bound.tensor for one in companions]
