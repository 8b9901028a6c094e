"""Weight averaging: a second set of weights that follows the trained ones smoothly.

Each rank averages the pieces that it updates, right after their update, so averaging costs every
rank its part and no communication.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lockstep.errors import OptionError
from lockstep.train.training_state import TrainingState
from lockstep.train.updaters import TorchUpdater
from lockstep.train.wrapped_updaters import Companion, WrappedUpdater


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
        is_number = isinstance(decay, int | float) and not isinstance(decay, bool)
        if not (is_number and 0 <= self.decay < 1):
            raise OptionError(
                "`decay` must be a number from 0 to below 1.",
                received=f"decay={decay!r}",
                fix="Use 0.999, for example.",
            )


@dataclass
class Averages:
    """The averages of a model's weights.

    Attributes:
        ema: how they are formed.
        by_name: whole tensors, of the trainable parameters.
        num_updates: that they have seen.
        begun: the names of those that there are.
        is_applied: the model has the averaged weights now.
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
                "Averages are of weights after updates.",
                received="no update yet",
                fix="Call fit first.",
            )
        weights = {
            name: parameter for name, parameter in model.named_parameters() if name in self.begun
        }
        trained = {name: parameter.detach().clone() for name, parameter in weights.items()}
        _set(weights, self.by_name)
        self.is_applied = True
        try:
            yield
        finally:
            self.is_applied = False
            _set(weights, trained)


@torch.no_grad()
def _set(weights: dict[str, nn.Parameter], values: dict[str, torch.Tensor]) -> None:
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
        self._trainable = {name for name, one in self.parameters.items() if one.requires_grad}

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
        averages.begun |= self._trainable  # other ranks have begun theirs
        averages.num_updates += 1

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
