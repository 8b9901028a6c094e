"""Options of a Keras ``fit``."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """Options of ``fit``.

    Attributes:
        epochs: the number of the last epoch, plus one.
        initial_epoch: the number of the first.
        shuffle: True to read arrays in a new order every epoch.
        evaluates: the epochs that end with an evaluation.
        is_one_batch: True in ``train_on_batch``.
        restarts: how often to resume after the loss of a process.
    """

    epochs: int
    initial_epoch: int
    shuffle: bool
    evaluates: tuple[int, ...]
    is_one_batch: bool = False
    restarts: int = 0
