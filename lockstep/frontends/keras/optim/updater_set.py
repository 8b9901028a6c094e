"""Several Keras optimizers, each with variables of its own: one steps at a time, or all."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import keras

from lockstep.frontends.keras.optim.updater import KerasUpdater
from lockstep.train.optim.updater_sets import UpdaterSet


class OptimizerList(list[Any]):
    """Several optimizers, as the owner of their slots."""

    def is_of(self, optimizers: Sequence[Any]) -> bool:
        """Whether these are the same optimizers."""
        return list(map(id, self)) == list(map(id, optimizers))


def parts_of(optimizer: Any) -> list[Any]:
    """The optimizers that an optimizer consists of: several of a ``MultiOptimizer``."""
    if not isinstance(optimizer, keras.optimizers.MultiOptimizer):
        return [optimizer]
    return [one for one in optimizer.optimizers if one.built]


class KerasUpdaterSet(UpdaterSet):
    """Steps several Keras optimizers.

    Args:
        optimizers: in the order of their turns.
        variables: the model's variables by the names of their Parameters.
        whole: the ``MultiOptimizer`` that they belong to: all of them step every time; None if
            they take turns.
    """

    def __init__(
        self, optimizers: OptimizerList, variables: Mapping[str, Any], whole: Any = None
    ) -> None:
        updaters = {}
        for number, optimizer in enumerate(optimizers):
            own = set(map(id, optimizer._trainable_variables))
            named = {name: one for name, one in variables.items() if id(one) in own}
            updaters[f"{optimizer.name}_{number}"] = KerasUpdater(optimizer, named)
        super().__init__(optimizers, updaters)
        self._whole = whole
        self._in_turn = whole is None

    def __getstate__(self) -> dict[str, Any]:
        """What helpers need: the updaters."""
        return {**vars(self), "owner": None, "_whole": None}

    def step(self) -> None:
        """Step the optimizer whose turn it is, or all."""
        for updater in [self._updaters[self.turn]] if self._in_turn else self._updaters:
            updater.step()
        if self._whole is not None:
            self._whole._iterations.assign_add(1)

    def unshared_slots(self, *, has_copies: bool = False) -> list[Any]:
        """See ``KerasUpdater.unshared_slots``."""
        each = (one.unshared_slots(has_copies=has_copies) for one in self._updaters)
        return [*chain.from_iterable(each)]
