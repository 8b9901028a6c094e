"""What ``fit`` of a Keras model was told, and where that begins."""

from dataclasses import dataclass

from lockstep.frontends.keras.fit.tasks import Telling


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """What ``fit`` was told.

    Attributes:
        epochs: the number of the last, plus one.
        initial_epoch: the number of the first.
        shuffle: take arrays in a new order every epoch.
        evaluates: the epochs that end with an evaluation.
        is_one_batch: this is ``train_on_batch``.
        restarts: how often to go on after the loss of a process.
    """

    epochs: int
    initial_epoch: int
    shuffle: bool
    evaluates: tuple[int, ...]
    is_one_batch: bool = False
    restarts: int = 0


@dataclass(frozen=True, kw_only=True)
class FitStart:
    """Where a training begins, and what host 0's callbacks want of it; see ``KerasFitTask``."""

    epoch: int
    step: int
    before_steps: bool
    tells: Telling
    evaluation_tells: Telling
    evaluation_may_stop: bool
    watches_validation: bool
