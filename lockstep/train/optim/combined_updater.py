"""The base of updaters that consist of others."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lockstep.parallel.updater_interface import BoundPiece, PieceSlots, SlotKey, Updater
from lockstep.train.checkpointing.training_state import TrainingState
from lockstep.train.optim.optimizers import Optimizers
from lockstep.train.optim.updaters import TorchUpdater


class CombinedUpdater(Updater):
    """Divides pieces and slots among other updaters, and joins theirs.

    Args:
        owner: whose slots these are.
        updaters: in order; each has ``parameters`` of its own.
    """

    def __init__(self, owner: object, updaters: Sequence[Any]) -> None:
        self.owner = owner
        self._updaters = updaters
        self._of = {name: each for each in updaters for name in each.parameters}
        self.is_known = all(updater.is_known for updater in updaters)
        self.is_elementwise = all(updater.is_elementwise for updater in updaters)

    def step_on(self, device: torch.device | None) -> None:
        for updater in self._updaters:
            updater.step_on(device)

    def bind(self, pieces: Sequence[BoundPiece]) -> None:
        for updater, own in self._divided(pieces, lambda piece: piece.name):
            updater.bind(own)

    def slot_keys(self) -> list[SlotKey]:
        keys = [key for updater in self._updaters for key in updater.slot_keys()]
        return keys if self.is_elementwise else []

    def store_slots(self, store: Mapping[SlotKey, torch.Tensor]) -> None:
        for updater, own in self._divided(list(store), lambda key: key.parameter):
            updater.store_slots({key: store[key] for key in own})

    def slots(self, *, with_stored: bool = False) -> list[PieceSlots]:
        return [
            part for updater in self._updaters for part in updater.slots(with_stored=with_stored)
        ]

    def take_slots(self, pieces: Sequence[PieceSlots]) -> None:
        """See ``TorchUpdater.take_slots``."""
        for updater, own in self._divided(pieces, lambda piece: piece.name):
            updater.take_slots(own)

    def publish_options(self) -> None:
        """See ``TorchUpdater.publish_options``."""
        for updater in self._updaters:
            updater.publish_options()

    def reload_weights(self) -> None:
        for updater in self._updaters:
            updater.reload_weights()

    def write_back_slots(self) -> None:
        for updater in self._updaters:
            updater.write_back_slots()

    def stored(self) -> list[tuple[str, torch.Tensor]]:
        return [each for updater in self._updaters for each in updater.stored()]

    def recover(self) -> list[str]:
        return [name for updater in self._updaters for name in updater.recover()]

    def options(self) -> list[dict[str, Any]]:
        return [options for updater in self._updaters for options in updater.options()]

    def set_options(self, options: list[dict[str, Any]]) -> None:
        rest = list(options)
        for updater in self._updaters:
            count = len(updater.options())
            updater.set_options(rest[:count])
            rest = rest[count:]

    def _divided(
        self, items: Sequence[Any], name_of: Callable[[Any], str]
    ) -> Iterator[tuple[Any, list[Any]]]:
        """Each updater with its items; those of untrained parameters are left out."""
        for updater in self._updaters:
            yield updater, [item for item in items if self._of.get(name_of(item)) is updater]


_OWNER = "optimizer"  # of a parameter group, in a state: the optimizer's name


class UpdaterSet(CombinedUpdater):
    """Steps one of several optimizers: the one whose turn it is.

    Args:
        owner: whose slots these are.
        updaters: by name, in the order of their turns; each has ``parameters`` of its own.
    """

    def __init__(self, owner: object, updaters: Mapping[str, Any]) -> None:
        super().__init__(owner, list(updaters.values()))
        self._names = list(updaters)

    @classmethod
    def of_torch(
        cls, optimizers: Optimizers, parameters: Mapping[str, nn.Parameter]
    ) -> "UpdaterSet":
        """The updaters of torch optimizers, given a model's parameters by name."""
        updaters = {}
        for key, optimizer in optimizers.items():
            own = {id(one) for group in optimizer.param_groups for one in group["params"]}
            named = {name: one for name, one in parameters.items() if id(one) in own}
            updaters[key] = TorchUpdater(optimizer, named)
        return cls(optimizers, updaters)

    def step(self) -> None:
        self._updaters[self.turn].step()

    def state(self) -> dict[str, Any]:
        optimizer: dict[str, Any] = {}
        options: list[dict[str, Any]] = []
        own: dict[str, Any] = {}
        for name, updater in zip(self._names, self._updaters, strict=True):
            parts = updater.state()
            for parameter, slots in parts.get("optimizer", {}).items():
                prefix = "" if parameter else f"{name}/"  # slots of the optimizer itself
                optimizer.setdefault(parameter, {}).update(
                    {f"{prefix}{slot}": value for slot, value in slots.items()}
                )
            options += [{**group, _OWNER: name} for group in parts.get("options", ())]
            if "own" in parts:
                own[name] = parts["own"][""]
        return {"optimizer": optimizer, "options": options, "own": own}

    def load_state(self, state: TrainingState) -> None:
        for name, updater in zip(self._names, self._updaters, strict=True):
            groups = [group for group in state.options if group[_OWNER] == name]
            plain = [{key: one for key, one in own.items() if key != _OWNER} for own in groups]
            slots = {key: own for key, own in state.optimizer.items() if key in updater.parameters}
            prefix = f"{name}/"
            common = {
                slot.removeprefix(prefix): value
                for slot, value in state.optimizer.get("", {}).items()
                if slot.startswith(prefix)
            }
            slots |= {"": common} if common else {}
            own = {"": state.own[name]} if name in state.own else {}
            updater.load_state(replace(state, optimizer=slots, options=plain, own=own))
