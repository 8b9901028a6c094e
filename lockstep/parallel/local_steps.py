"""Local steps: a rank trains on its part of each batch without waiting for the others."""

from abc import ABC, abstractmethod
from typing import Any

from lockstep.parallel.training_step import StepResult


class LocalSteps(ABC):
    """What Workers of such ranks do beyond other Workers.

    Attributes:
        has_own_optimizer: this rank has its own parameters and slots.
    """

    has_own_optimizer: bool

    @property
    @abstractmethod
    def has_diverged(self) -> bool:
        """True if the weights of the ranks differ."""

    @abstractmethod
    def results_of_epoch(self, own: list[StepResult]) -> list[StepResult]:
        """This rank's results of an epoch, so that the sum over ranks counts each sample once."""

    def resume_from(self, progress: Any) -> None:
        """Begin the epoch at ``progress``, or at its start if None."""
        return

    def hold_updates(self) -> None:
        """On rank 0, after a process has died: let no update be interrupted by ending the rest."""
        return
