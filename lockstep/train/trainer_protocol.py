"""The Trainer's interface for callbacks and for modules that work for a Trainer.

It is a protocol, so that these modules need not import the Trainer, which imports them.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import nn

from lockstep.plan.spec import Plan


class TrainerProtocol(Protocol):
    """The interface of a ``Trainer``; see there.

    Attributes:
        model: the model that is trained.
        optimizer: updates it; None if it is not trained.
        metrics: by name.
        callbacks: called during every ``fit``.
        schedule: of the learning rate, or None.
        stop_training: set to True to end training after the step under way.
        strategy: where and how it trains; None for one device.
        precision: of training.
        seed: of all random numbers in training.
        batch_size: of the last ``fit``; None before.
    """

    model: nn.Module
    optimizer: Any
    metrics: Any
    callbacks: list[Any]
    schedule: Any
    stop_training: bool
    strategy: Any
    precision: str
    seed: int
    batch_size: int | None

    @property
    def plan(self) -> Plan:
        """The Plan of the last call."""

    @property
    def timeout_seconds(self) -> float:
        """Longest wait for a helper."""

    def log_names(self) -> list[str]:
        """Names of the values that an epoch may have in the history."""

    @property
    def fit(self) -> Callable[..., Any]:
        """Train."""

    def evaluate(self, data: Any, *, batch_size: int | None = None) -> dict[str, Any]:
        """Loss and metrics over data."""

    def predict(self, inputs: Any, *, batch_size: int | None = None) -> Any:
        """The model's outputs."""

    def save(self, path: Any) -> None:
        """Write the weights."""

    def load(self, path: Any) -> None:
        """Read weights."""

    def state_dict(self) -> dict[str, Any]:
        """The whole state of the training."""

    def load_state_dict(self, state: Any) -> None:
        """Resume from a state."""

    def averaged(self) -> AbstractContextManager[None]:
        """Within the block the model has the averaged weights."""

    def rewound(self) -> AbstractContextManager[None]:
        """Restore the training's state after the block."""
