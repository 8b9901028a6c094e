"""Several optimizers with separate parameters, which step one at a time."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from lockstep.train.checkpointing.training_state import TrainingState
from lockstep.train.optim.combined_updater import CombinedUpdater
from lockstep.train.optim.optimizers import Optimizers
from lockstep.train.optim.updaters import TorchUpdater

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
