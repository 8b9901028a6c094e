"""Callbacks, with Keras's method names. They run on rank 0, on the user's own objects."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from lockstep.errors import OptionError
from lockstep.launch.health.failure import noting_on
from lockstep.train.trainer_protocol import TrainerProtocol

Logs = dict[str, Any]


class Callback:
    """Base of callbacks: override what you need.

    ``self.trainer`` and ``self.model`` are set before the first call. All ranks get what a callback
    changes before training continues. At any time it may set ``self.trainer.stop_training = True``,
    options of ``self.trainer.optimizer.param_groups``, weights and buffers of ``self.model``. In
    ``on_epoch_begin`` and ``on_epoch_end`` it may also freeze or unfreeze parameters, change the
    mode of modules, set attributes of modules, add parameter groups and change the optimizer's
    state, which is complete there; on several devices reading it elsewhere is an error, unless
    ``takes_state`` has announced it. It may call ``evaluate`` and ``predict``, which then run on
    rank 0 alone.

    Attributes:
        is_observer: set this to True in a class whose callbacks change nothing: the other ranks
            then need not wait for them at every batch.
    """

    is_observer: bool = False
    trainer: TrainerProtocol
    model: nn.Module

    traced_steps: range | None = None
    """Steps of a ``fit``, from 0, whose traces of all ranks ``on_train_trace`` gets."""

    def acts_in(self, method: str) -> bool:
        """True if it does anything in the method of this name.

        Training does not stop for a callback that returns False. By default: if it overrides it.
        """
        return getattr(getattr(self, method), "__func__", None) is not getattr(Callback, method)

    @property
    def kind(self) -> str:
        """The name of its class in a training's state."""
        return type(self).__name__

    def state_dict(self) -> dict[str, Any]:
        """The state it needs to resume in another process: tensors, numbers, texts, lists, dicts.

        It becomes a part of ``trainer.state_dict()``; empty by default.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a ``state_dict``."""

    def takes_state(self, batch: int) -> bool:
        """True if it calls ``trainer.state_dict()`` in the next ``on_train_batch_end``.

        All ranks then send their state to rank 0. At the end of an epoch they always do. Called
        only after steps that have such a state: with local steps, those after which replicas
        average.
        """
        return False

    def set_trainer(self, trainer: TrainerProtocol) -> None:
        """Called before the first use in a ``fit``, ``evaluate`` or ``predict``."""
        self.trainer = trainer
        self.model = trainer.model

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Training begins."""

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Training has ended; ``logs`` are the last epoch's."""

    def on_train_error(self, error: BaseException) -> None:
        """Training has ended with an error, or with Ctrl-C: ``on_train_end`` is not called."""

    def on_train_trace(self, traces: list[bytes]) -> None:
        """The traced steps are over; by rank, what torch.profiler exports for Chrome."""

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


class ClosingCallback(Callback):
    """A callback that closes something when training ends, also by an error."""

    def _close(self, error: BaseException | None) -> None:
        """Training has ended, or failed with an error; also called if it never began."""

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._close(None)

    def on_train_error(self, error: BaseException) -> None:
        self._close(error)


def acting(callbacks: Sequence[Callback], method: str) -> list[Callback]:
    """The callbacks that do anything in a method."""
    return [callback for callback in callbacks if callback.acts_in(method)]


def stopping(callbacks: Sequence[Callback], method: str) -> list[Callback]:
    """The acting callbacks that all ranks wait for, since they may change something."""
    return [callback for callback in acting(callbacks, method) if not callback.is_observer]


def traced_steps(callbacks: Sequence[Callback], first_step: int) -> range | None:
    """The steps to trace for a callback, in a ``fit`` that begins with ``first_step``.

    Raises:
        OptionError: several do; torch's profiler takes one trace at a time.
    """
    wanted = [one.traced_steps for one in callbacks if one.traced_steps is not None]
    if len(wanted) > 1:
        raise OptionError(
            "Only one callback can trace steps.",
            received=f"{len(wanted)} of them",
            fix="Give the Trainer one Profiler.",
        )
    if not wanted:
        return None
    return range(first_step + wanted[0].start, first_step + wanted[0].stop)


@contextmanager
def told_of_errors(callbacks: Sequence[Callback]) -> Iterator[None]:
    """Tell callbacks if the block, a whole ``fit``, ends with an error."""
    try:
        yield
    except BaseException as error:
        for callback in callbacks:
            with noting_on(error):
                callback.on_train_error(error)
        raise
