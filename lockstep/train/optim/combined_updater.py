"""The base of updaters that consist of others."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from lockstep.parallel.updater_interface import BoundPiece, PieceSlots, SlotKey, Updater


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
