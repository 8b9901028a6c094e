"""The velocities of an outer optimizer, which steps on the average of replicas.

They are kept here beside the weights, for what a run's state is made of; who averages moves them
(``parallel.averaging``). All replicas have the same.
"""

from collections.abc import Mapping
from typing import Any

import torch

from lockstep.parallel.update import SlotKey
from lockstep.train.training_state import TrainingState
from lockstep.train.wrapped_updaters import WrappedUpdater


class OuterUpdater(WrappedUpdater):
    """Keeps a velocity for every weight that is stepped."""

    slot = "velocity"

    @property
    def velocities(self) -> Mapping[str, torch.Tensor]:
        """By the parameter's name."""
        return self.kept

    def slot_keys(self) -> list[SlotKey]:
        return self.inner.slot_keys()

    def state(self) -> dict[str, Any]:
        return {**super().state(), "velocities": dict(self.kept)}

    def load_state(self, state: TrainingState) -> None:
        super().load_state(state)
        self._keep(state.velocities)
