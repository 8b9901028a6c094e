"""Pickling of Keras objects for helpers.

Keras pickles a model as a ``.keras`` file, which lacks classes of the script and has copies of the
weights. Helpers get the attributes of objects instead, with variables whose values lie in the
memory that all ranks map. Attributes that only rank 0 needs are omitted: those that ``compile``
sets on a model.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from keras.src.layers.layer import Layer
from keras.src.layers.preprocessing.index_lookup import IndexLookup
from keras.src.models.functional import Functional
from keras.src.models.model import inject_functional_model_class
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.saving.keras_saveable import KerasSaveable
from keras.src.trainers.trainer import Trainer
from keras.src.utils.backend_utils import DynamicBackend
from keras.src.utils.tracking import (
    TrackedDict,
    TrackedList,
    TrackedOrderedDict,
    TrackedSet,
    Tracker,
)

from lockstep.frontends.keras.bound_methods import METHODS
from lockstep.frontends.keras.optim.optimizer_copy import unbuilt

# Wrappers of methods that ``Layer.__new__`` makes, for layers that are not built yet.
_WRAPPERS = ("build", "quantize")

# The losses that layers have added.
_OF_LAST_CALL = ("_losses", "_loss_ids")

# Attributes that ``compile``, ``fit`` and callbacks set on a model.
COMPILED = (
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
    "stop_evaluating",
    "stop_predicting",
    "stop_training",
    "test_function",
    "train_function",
)

# Look-up tables of TensorFlow's, which belong to this process.
_TABLES = ("lookup_table", "token_counts", "token_document_counts")

_Fill = Callable[[Any, Any], None]

# Keras's containers, and what adds contents to each without being tracked.
_CONTAINERS: dict[type[Any], _Fill] = {
    TrackedList: list.extend,
    TrackedDict: dict.update,
    TrackedOrderedDict: dict.update,
    TrackedSet: set.update,
}


def reduce(obj: Any) -> Any:
    """How an object of Keras's is pickled; see ``parallel.transfer.serialization.reducing``."""
    fill: _Fill
    state: Any
    if isinstance(obj, IndexLookup):
        fill, state = _fill_lookup, (sent_attributes(obj), obj.get_vocabulary(False))
    elif isinstance(obj, KerasSaveable):
        fill, state = _fill, sent_attributes(obj)
    elif type(obj) in _CONTAINERS:
        contents = dict(obj) if isinstance(obj, dict) else list(obj)
        fill, state = _fill_container, (vars(obj), contents)
    elif type(obj) is Tracker:
        # It records new variables and layers; a helper makes none.
        return Tracker, ({},)
    elif type(obj) is DynamicBackend:
        # Without attributes, its ``__getattr__`` would call itself.
        return DynamicBackend, (obj.name,)
    else:
        return NotImplemented
    blank = _blank_functional if isinstance(obj, Functional) else _blank
    return blank, (type(obj),), state, None, None, fill


def sent_attributes(obj: KerasSaveable) -> dict[str, Any]:
    """The attributes of an object that a helper gets."""
    if isinstance(obj, BaseOptimizer) and obj.built:
        variables = obj._trainable_variables  # without slots, which are in the store
        return {**vars(unbuilt(obj)), "built": True, "_trainable_variables": variables}
    if not isinstance(obj, Layer):
        return dict(vars(obj))
    left = omitted_attributes(obj)
    kept = {name: value for name, value in vars(obj).items() if name not in left}
    return {**kept, "_losses": [], "_loss_ids": set()}


def omitted_attributes(obj: KerasSaveable) -> frozenset[str]:
    """The names of attributes that a helper does not get, or makes again."""
    kind: Any = type(obj)
    return _omitted_by(kind)


@lru_cache
def _omitted_by(kind: Any) -> frozenset[str]:
    if not issubclass(kind, Layer):
        return frozenset()
    left: tuple[str, ...] = (*_WRAPPERS, *_OF_LAST_CALL)
    if issubclass(kind, Trainer):  # a layer that is one can be trained without being a Model
        left = (*left, *COMPILED, "_lockstep", *METHODS)
    elif issubclass(kind, IndexLookup):
        left = (*left, *_TABLES)
    return frozenset(left)


def _blank(kind: Any) -> Any:
    """An object without attributes; ``__new__`` of Keras's layers would set some."""
    return kind.__new__(kind) if issubclass(kind, list | dict | set) else object.__new__(kind)


def _blank_functional(kind: Any) -> Any:
    """As ``_blank``, of a class that gets ``Functional`` as a base with its first object."""
    if not issubclass(kind, Functional):
        inject_functional_model_class(kind)
    return _blank(kind)


def _fill(obj: Any, attributes: dict[str, Any]) -> None:
    vars(obj).update(attributes)


def _fill_lookup(obj: Any, state: tuple[dict[str, Any], list[Any]]) -> None:
    _fill(obj, state[0])
    obj.lookup_table = obj._lookup_table_from_tokens(state[1])


def _fill_container(obj: Any, state: tuple[dict[str, Any], Any]) -> None:
    _fill(obj, state[0])
    _CONTAINERS[type(obj)](obj, state[1])
