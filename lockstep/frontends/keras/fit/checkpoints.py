"""Checkpoints of a Keras model: the callback that turns them on, and the state of callbacks.

Checkpoints are those of a Trainer (``train.checkpointing.checkpoints``): the same files, written by
the same thread. Keras's callbacks have no ``state_dict``, so the state of one is those of its
attributes that have changed since ``on_train_begin``.
"""

import os
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import torch
from keras.src.callbacks import BackupAndRestore, ProgbarLogger

from lockstep.checkpoint.trees import Tree, flattened
from lockstep.errors import CheckpointError, OptionError
from lockstep.train.callbacks.callback import Callback
from lockstep.train.checkpointing import checkpoints as files
from lockstep.train.checkpointing.training_state import copied
from lockstep.train.resume.differences import OnDifference
from lockstep.train.validation.checks import check_restarts

_ARRAY = "numpy array"


class OptionCallback(keras.callbacks.Callback):  # type: ignore[misc]  # Keras is untyped
    """A callback that is an option of ``fit`` under a strategy, and does nothing itself."""

    def on_train_begin(self, logs: Any = None) -> None:
        """Check that Lockstep trains the model.

        Raises:
            OptionError: Keras itself does.
        """
        if "_lockstep" not in vars(self.model):
            raise OptionError(
                f"lockstep.keras.{type(self).__name__} is for models that train under a strategy.",
                received=f"{self.model.name!r}, a model of plain Keras",
                fix="Make or compile it in `with strategy.scope():`, with "
                "lockstep.SingleDeviceStrategy() for one device; or use "
                "keras.callbacks.BackupAndRestore.",
            )


class Checkpoint(OptionCallback):
    """Where and how often ``model.fit(callbacks=[...])`` writes checkpoints.

    For models made or compiled in the scope of a strategy. The same script, started again, resumes
    at the next batch and gives the same bits, also on another number of devices; a ``fit`` that had
    ended trains nothing and has the same history. Each ``fit`` has a folder of its own. On several
    hosts host 0 reads and writes.

    The state of other callbacks is what has changed of their attributes since training began:
    numbers, texts, arrays, and lists, tuples and dicts of these. A callback with ``state_dict()``
    and ``load_state_dict()`` gives its state itself.

    Args:
        directory: the folder, which need not exist yet; or a URL that fsspec opens, as in
            ``s3://bucket/run``.
        every: ``"epoch"``, ``"100 steps"`` or ``"60s"``. The end of a ``fit`` is always written.
        keep: how many checkpoints are kept, the newest.
        on_difference: what to do if the script has changed in a way that changes the result:
            ``"error"``, ``"take new"`` or ``"keep"``, as of ``lockstep.Checkpoint``. A
            ``LearningRateSchedule`` is the script's, and no part of a checkpoint.

    Raises:
        OptionError: an argument is invalid; in ``fit``, the model has no strategy.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        every: str = "epoch",
        keep: int = 3,
        on_difference: OnDifference = "error",
    ) -> None:
        super().__init__()
        self.files = files.Checkpoint(directory, every, keep, on_difference)


class Restarts(OptionCallback):
    """How often ``model.fit(callbacks=[...])`` resumes after the loss of a process or a host.

    The result has the same bits, as with ``lockstep.Trainer.fit(restarts=...)``. On one host new
    processes resume from the last copy of the training in memory: for repeated steps callbacks are
    not called again, and their changes are applied again. On several hosts training resumes from
    the newest checkpoint, on disk or in the memory of host 0 or 1. That needs a ``Checkpoint``
    among the callbacks, and ``lockstep run --restarts`` or another launcher that restarts scripts:
    repeated steps call all callbacks, which have the state that the ``Checkpoint`` has of them.

    Args:
        most: how often; at least 0.

    Raises:
        OptionError: an invalid number; in ``fit``, the model has no strategy.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        check_restarts(most)
        self.most = most


def restarts_in(callbacks: Any) -> int:
    """The number of restarts that the callbacks of a ``fit`` allow."""
    return max((one.most for one in _flat_list(callbacks) if isinstance(one, Restarts)), default=0)


def checkpoint_in(callbacks: Any) -> Checkpoint | None:
    """The ``Checkpoint`` among the callbacks of a ``fit``; None without.

    Args:
        callbacks: as ``fit`` takes them.

    Raises:
        OptionError: there are several, or a ``BackupAndRestore`` as well.
    """
    each = _flat_list(callbacks)
    found = [one for one in each if isinstance(one, Checkpoint)]
    others = [one for one in each if isinstance(one, BackupAndRestore)]
    if not found:
        return None
    if len(found) > 1 or others:
        raise OptionError(
            "Only one callback can say where a fit resumes.",
            received=" and ".join(type(one).__name__ for one in (*found, *others)),
            fix="Remove the others.",
        )
    return found[0]


def _flat_list(callbacks: Any) -> list[Any]:
    """Callbacks, which ``fit`` takes in any structure, as a list."""
    listed = getattr(callbacks, "callbacks", callbacks)
    return [one for one in keras.tree.flatten(listed) if one is not None]


class CheckpointedCallback(Callback):
    """A Keras callback as a part of the training's state.

    Args:
        callback: the callback.
    """

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        self._begun: dict[str, Tree] | None = None  # its attributes when training began

    @property
    def kind(self) -> str:
        return type(self._callback).__name__

    def begin(self) -> None:
        """Training has begun."""
        self._begun = copied(self._plain_attributes())

    def state_dict(self) -> dict[str, Any]:
        if hasattr(self._callback, "state_dict"):
            own: dict[str, Any] = self._callback.state_dict()
            return own
        begun = self._begun or {}
        return {
            name: value
            for name, value in self._plain_attributes().items()
            if name not in begun or not _is_same(value, begun[name])
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._begun is None:
            return  # it is loaded again after ``on_train_begin``, which resets most callbacks
        if hasattr(self._callback, "load_state_dict"):
            self._callback.load_state_dict(state)
        else:
            if getattr(self._callback, "monitor_op", self) is None:
                self._callback._set_monitor_op()  # Keras's: it changes ``min_delta``, once
            vars(self._callback).update({name: _from_tree(value) for name, value in state.items()})

    def _plain_attributes(self) -> dict[str, Tree]:
        """Attributes that can be written to a file."""
        found = {}
        for name, value in vars(self._callback).items():
            tree = _to_tree(value)
            try:
                flattened(tree)
            except CheckpointError:  # a reference to another object
                continue
            found[name] = tree
        return found


class FitSnapshot:
    """The state before a ``fit`` that checkpoints lack, to begin again in the same process.

    Args:
        model: the model to be trained.
        trainer: of the model; None before it is made.
        callbacks: as ``fit`` takes them.
    """

    def __init__(self, model: Any, trainer: Any, callbacks: Any) -> None:
        self._iterations = getattr(model.optimizer, "_iterations", None)
        self._steps = 0 if self._iterations is None else int(self._iterations.value)
        self._epochs = 0 if trainer is None else trainer.runner.epochs_trained
        self._callbacks = [
            (one, {*vars(one)}, copied(CheckpointedCallback(one)._plain_attributes()))
            for one in (_flat_list(callbacks) if restarts_in(callbacks) else ())
        ]

    def restore(self, trainer: Any) -> None:
        """Restore the state; the model's trainer may be new."""
        if self._iterations is not None:
            self._iterations.assign(self._steps)
        if trainer is not None:
            trainer.runner.epochs_trained = self._epochs
        for callback, names, plain in self._callbacks:
            for name in {*vars(callback)} - names:
                delattr(callback, name)
            vars(callback).update(
                {name: _from_tree(value) for name, value in copied(plain).items()}
            )


def checkpointed_callbacks(callbacks: Any) -> list[Callback]:
    """Those of Keras's list of callbacks that have a state."""
    left = (OptionCallback, ProgbarLogger)
    return [CheckpointedCallback(one) for one in callbacks.callbacks if not isinstance(one, left)]


def _to_tree(value: Any) -> Tree:
    """A value with its arrays as tensors."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {_ARRAY: torch.from_numpy(value.copy())}
    if type(value) is dict:
        return {key: _to_tree(one) for key, one in value.items()}
    return type(value)(map(_to_tree, value)) if type(value) in (list, tuple) else value


def _from_tree(tree: Tree) -> Any:
    """The value of which ``_to_tree`` made the tree."""
    if isinstance(tree, Mapping):
        if [*tree] == [_ARRAY]:
            return tree[_ARRAY].numpy()
        return {key: _from_tree(one) for key, one in tree.items()}
    return type(tree)(map(_from_tree, tree)) if isinstance(tree, list | tuple) else tree


def _is_same(one: Tree, other: Tree) -> bool:
    (tensors, values), (others, other_values) = flattened(one), flattened(other)
    return values == other_values and all(
        torch.equal(tensor, others[name]) for name, tensor in tensors.items()
    )
