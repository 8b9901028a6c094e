"""Several Keras optimizers, each with variables of its own, of which one steps at a time."""

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.frontends.keras.updater import KerasUpdater
from lockstep.train.updater_sets import UpdaterSet


class OptimizerList(list[Any]):
    """Several optimizers: what owns their slots."""

    def is_of(self, optimizers: Sequence[Any]) -> bool:
        """Whether these are the same optimizers."""
        return list(map(id, self)) == list(map(id, optimizers))


class KerasUpdaterSet(UpdaterSet):
    """Steps one of several Keras optimizers.

    Args:
        optimizers: in the order of their turns.
        variables: the model's variables by the names of their Parameters.
    """

    def __init__(self, optimizers: OptimizerList, variables: Mapping[str, Any]) -> None:
        updaters = {}
        for number, optimizer in enumerate(optimizers):
            own = set(map(id, optimizer._trainable_variables))
            named = {name: one for name, one in variables.items() if id(one) in own}
            updaters[f"{optimizer.name}_{number}"] = KerasUpdater(optimizer, named)
        super().__init__(optimizers, updaters)

    def unshared_slots(self) -> list[Any]:
        """See ``KerasUpdater.unshared_slots``."""
        return [slot for updater in self._updaters for slot in updater.unshared_slots()]
