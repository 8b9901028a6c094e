"""Keras objects on their way to a helper.

Keras pickles a model by writing a ``.keras`` file of it. That file knows nothing of classes that
the script defines, and holds copies of the weights. Helpers get objects as they are instead, by
their attributes, with variables whose values lie in the memory that all ranks map.

What stays behind is what only the driver needs: of a model, what ``compile`` has made.
"""

from collections.abc import Callable
from typing import Any

from keras.src.layers.layer import Layer
from keras.src.models.model import Model
from keras.src.saving.keras_saveable import KerasSaveable
from keras.src.utils.tracking import (
    TrackedDict,
    TrackedList,
    TrackedOrderedDict,
    TrackedSet,
    Tracker,
)

from lockstep.frontends.keras.names import METHODS

# Made by ``Layer.__new__`` around methods of the same name, for layers that are still to be built.
_WRAPPERS = ("build", "quantize")

# What ``compile`` and ``fit`` give a model.
_COMPILED = (
    "_compile_config",
    "_compile_loss",
    "_compile_metrics",
    "_compiled_trainable_state",
    "_eval_epoch_iterator",
    "_loss_tracker",
    "history",
    "loss",
    "optimizer",
    "predict_function",
    "test_function",
    "train_function",
)

_Fill = Callable[[Any, Any], None]


def reduce(obj: Any) -> Any:
    """How an object is pickled, if it is one of Keras's; see ``parallel.parcel.reducing``."""
    fill: _Fill
    state: Any
    if isinstance(obj, KerasSaveable):
        fill, state = _fill, _attributes(obj)
    elif isinstance(obj, TrackedList):
        fill, state = _fill_list, (vars(obj), list(obj))
    elif isinstance(obj, TrackedDict | TrackedOrderedDict):
        fill, state = _fill_dict, (vars(obj), dict(obj))
    elif isinstance(obj, TrackedSet):
        fill, state = _fill_set, (vars(obj), list(obj))
    elif type(obj) is Tracker:
        # It knows objects by their address, which is another one elsewhere.
        fill, state = _fill, {**vars(obj), "stored_ids": {name: set() for name in obj.config}}
    else:
        return NotImplemented
    return _blank, (type(obj),), state, None, None, fill


def _attributes(obj: KerasSaveable) -> dict[str, Any]:
    if not isinstance(obj, Layer):
        return dict(vars(obj))
    left = (*_WRAPPERS, *_COMPILED, "_lockstep", *METHODS) if isinstance(obj, Model) else _WRAPPERS
    kept = {name: value for name, value in vars(obj).items() if name not in left}
    return {**kept, "_losses": [], "_loss_ids": set()}  # those of the last call


def _blank(kind: Any) -> Any:
    """An object without attributes; ``__new__`` of Keras's layers would give it some."""
    return kind.__new__(kind) if issubclass(kind, list | dict | set) else object.__new__(kind)


def _fill(obj: Any, attributes: dict[str, Any]) -> None:
    vars(obj).update(attributes)


def _fill_list(obj: Any, state: tuple[dict[str, Any], list[Any]]) -> None:
    _fill(obj, state[0])
    list.extend(obj, state[1])


def _fill_dict(obj: Any, state: tuple[dict[str, Any], dict[Any, Any]]) -> None:
    _fill(obj, state[0])
    dict.update(obj, state[1])


def _fill_set(obj: Any, state: tuple[dict[str, Any], list[Any]]) -> None:
    _fill(obj, state[0])
    set.update(obj, state[1])
