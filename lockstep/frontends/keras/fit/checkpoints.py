"""Checkpoints of a Keras model: the callback that asks for them, and what callbacks keep.

They are those of a Trainer (``train.checkpointing.checkpoints``): the same files, by the same
thread. What is Keras's own is here. Its callbacks have no ``state_dict``: what one has come to
since training began is what differs of its attributes from those that ``on_train_begin`` left.
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


class Asking(keras.callbacks.Callback):  # type: ignore[misc]  # Keras is untyped
    """A callback that asks something of ``fit`` under a strategy, and does nothing itself."""

    def on_train_begin(self, logs: Any = None) -> None:
        """See that somebody hears it.

        Raises:
            OptionError: Keras itself trains the model.
        """
        if "_lockstep" not in vars(self.model):
            raise OptionError(
                f"lockstep.keras.{type(self).__name__} is for models that train under a strategy.",
                received=f"{self.model.name!r}, a model of plain Keras",
                fix="Make or compile it in `with strategy.scope():`, with "
                "lockstep.SingleDeviceStrategy() for one device; or use "
                "keras.callbacks.BackupAndRestore.",
            )


class Checkpoint(Asking):
    """Where and how often ``model.fit(callbacks=[...])`` writes checkpoints.

    For models made or compiled in the scope of a strategy. The same script started again goes on at
    the very next batch, with the bits that it would have had, on another number of devices too; a
    ``fit`` that had ended trains nothing and has the same history. Each ``fit`` has a folder of its
    own. On several hosts host 0 reads and writes.

    Other callbacks go on with what their attributes have come to since training began: numbers,
    texts, arrays, and lists, tuples and dicts of these. One that has ``state_dict()`` and
    ``load_state_dict()`` says so itself.

    Args:
        directory: the folder, which need not be there yet; or a URL that fsspec opens, as in
            ``s3://bucket/run``.
        every: ``"epoch"``, ``"100 steps"`` or ``"60s"``. The end of a ``fit`` is written always.
        keep: how many checkpoints are kept, the newest.
        on_difference: what to do where the script has changed in a way that changes the result:
            ``"error"``, ``"take new"`` or ``"keep"``, as of ``lockstep.Checkpoint``. A
            ``LearningRateSchedule`` is the script's, and no part of a checkpoint.

    Raises:
        OptionError: an argument cannot be what it is; in ``fit``, the model has no strategy.
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


class Restarts(Asking):
    """How often ``model.fit(callbacks=[...])`` goes on after the loss of a process or a host.

    To the same bits, as ``lockstep.Trainer.fit(restarts=...)``. On one host with fresh processes,
    from the last copy of the training in memory: callbacks are not called again for steps that are
    made again, and what they have changed is changed again. On several hosts from the newest
    checkpoint, on disk or in the memory of host 0 or 1, with a ``Checkpoint`` among the callbacks,
    and ``lockstep run --restarts`` or another who starts scripts again: steps since then are made
    again with all callbacks, which go on with what a ``Checkpoint`` keeps of them.

    Args:
        most: how often; at least 0.

    Raises:
        OptionError: it is no such number; in ``fit``, the model has no strategy.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        check_restarts(most)
        self.most = most


def restarts_in(callbacks: Any) -> int:
    """How often to go on, as the callbacks of a ``fit`` say."""
    return max((one.most for one in _each(callbacks) if isinstance(one, Restarts)), default=0)


def checkpoint_in(callbacks: Any) -> Checkpoint | None:
    """The one that is among the callbacks of a ``fit``, if there is one.

    Args:
        callbacks: as ``fit`` takes them.

    Raises:
        OptionError: there are several, or a ``BackupAndRestore`` as well.
    """
    each = _each(callbacks)
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


def _each(callbacks: Any) -> list[Any]:
    """Callbacks, as ``fit`` takes them."""
    listed = getattr(callbacks, "callbacks", callbacks)
    return [one for one in keras.tree.flatten(listed) if one is not None]


class KeptCallback(Callback):
    """A callback of Keras's as a part of the training's state.

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
        self._begun = copied(self._plain())

    def state_dict(self) -> dict[str, Any]:
        if hasattr(self._callback, "state_dict"):
            own: dict[str, Any] = self._callback.state_dict()
            return own
        begun = self._begun or {}
        return {
            name: value
            for name, value in self._plain().items()
            if name not in begun or not _is_same(value, begun[name])
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._begun is None:
            return  # it is told once more when training has begun, which resets most callbacks
        if hasattr(self._callback, "load_state_dict"):
            self._callback.load_state_dict(state)
        else:
            if getattr(self._callback, "monitor_op", self) is None:
                self._callback._set_monitor_op()  # of Keras's: it changes ``min_delta``, once
            vars(self._callback).update({name: _own(value) for name, value in state.items()})

    def _plain(self) -> dict[str, Tree]:
        """Attributes that can be written."""
        found = {}
        for name, value in vars(self._callback).items():
            tree = _tree(value)
            try:
                flattened(tree)
            except CheckpointError:  # it refers to something else, and makes that anew
                continue
            found[name] = tree
        return found


class Beginning:
    """What a ``fit`` begins with beside its data, to begin once more in the same process.

    The rest is in the checkpoint with which it then goes on.

    Args:
        model: which is going to be trained.
        trainer: of the model; None where it was not made.
        callbacks: as ``fit`` takes them.
    """

    def __init__(self, model: Any, trainer: Any, callbacks: Any) -> None:
        self._iterations = getattr(model.optimizer, "_iterations", None)
        self._steps = 0 if self._iterations is None else int(self._iterations.value)
        self._epochs = 0 if trainer is None else trainer._epochs_trained
        self._callbacks = [
            (one, {*vars(one)}, copied(KeptCallback(one)._plain()))
            for one in (_each(callbacks) if restarts_in(callbacks) else ())
        ]

    def restore(self, trainer: Any) -> None:
        """Have all be so again; the model's trainer may have been made since."""
        if self._iterations is not None:
            self._iterations.assign(self._steps)
        if trainer is not None:
            trainer._epochs_trained = self._epochs
        for callback, names, plain in self._callbacks:
            for name in {*vars(callback)} - names:
                delattr(callback, name)
            vars(callback).update({name: _own(value) for name, value in copied(plain).items()})


def kept(callbacks: Any) -> list[Callback]:
    """Those of Keras's list of callbacks that keep something."""
    left = (Asking, ProgbarLogger)
    return [KeptCallback(one) for one in callbacks.callbacks if not isinstance(one, left)]


def _tree(value: Any) -> Tree:
    """A value with its arrays as tensors."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {_ARRAY: torch.from_numpy(value.copy())}
    if type(value) is dict:
        return {key: _tree(one) for key, one in value.items()}
    return type(value)(map(_tree, value)) if type(value) in (list, tuple) else value


def _own(tree: Tree) -> Any:
    """The value that it was."""
    if isinstance(tree, Mapping):
        if [*tree] == [_ARRAY]:
            return tree[_ARRAY].numpy()
        return {key: _own(one) for key, one in tree.items()}
    return type(tree)(map(_own, tree)) if isinstance(tree, list | tuple) else tree


def _is_same(one: Tree, other: Tree) -> bool:
    (tensors, values), (others, other_values) = flattened(one), flattened(other)
    return values == other_values and all(
        torch.equal(tensor, others[name]) for name, tensor in tensors.items()
    )
