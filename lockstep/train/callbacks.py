"""Callbacks, with Keras's method names. They run on rank 0, on the user's own objects."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from lockstep.train.trainer import Trainer

Logs = dict[str, Any]


class Callback:
    """Base of callbacks: override what you need.

    ``self.trainer`` and ``self.model`` are set before the first call. What a callback changes is
    brought to all ranks before training goes on. At any time it may set
    ``self.trainer.stop_training = True``, options of ``self.trainer.optimizer.param_groups``,
    weights and buffers of ``self.model``. In ``on_epoch_begin`` and ``on_epoch_end`` it may also
    freeze or thaw parameters, put modules in another mode, set attributes of modules, add parameter
    groups and change the optimizer's state, which it finds whole there. It may call ``evaluate``
    and ``predict``, which then run on rank 0 alone.

    Attributes:
        is_observer: a class whose callbacks only look on and change nothing sets this to True: then
            the other ranks need not wait for them at every batch.
    """

    is_observer: bool = False
    trainer: "Trainer"
    model: "nn.Module"

    def set_trainer(self, trainer: "Trainer") -> None:
        """Called before the first use in a ``fit``, ``evaluate`` or ``predict``."""
        self.trainer = trainer
        self.model = trainer.model

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Training begins."""

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Training has ended; ``logs`` are the last epoch's."""

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Epoch number ``epoch`` (from 0) begins."""

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """An epoch has ended; ``logs`` has its loss, metrics and validation values."""

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Batch number ``batch`` of the epoch begins."""

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """A batch has been trained on; ``logs`` has its loss and size."""

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Evaluation or validation begins."""

    def on_test_end(self, logs: Logs | None = None) -> None:
        """Evaluation or validation has ended; ``logs`` has its loss and metrics."""

    def on_predict_begin(self, logs: Logs | None = None) -> None:
        """Prediction begins."""

    def on_predict_end(self, logs: Logs | None = None) -> None:
        """Prediction has ended."""


def watches_batches(callbacks: list[Callback]) -> bool:
    """Whether any callback acts on single batches, so that ranks must wait for it at each."""
    return _overrides(callbacks, "on_train_batch_begin", "on_train_batch_end")


def watches_beginnings(callbacks: list[Callback]) -> bool:
    """Whether any callback acts where an epoch begins."""
    return _overrides(callbacks, "on_epoch_begin")


def _overrides(callbacks: list[Callback], *names: str) -> bool:
    return any(
        getattr(type(callback), name) is not getattr(Callback, name)
        for callback in callbacks
        if not callback.is_observer
        for name in names
    )
