"""Keras objects on their way to a helper.

Keras pickles a model by writing a ``.keras`` file of it. That file knows nothing of classes that
the script defines, and holds copies of the weights. Helpers get objects as they are instead, by
their attributes, with variables whose values lie in the memory that all ranks map.

What stays behind is what only the driver needs: of a model, what ``compile`` has made.
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

# Made by ``Layer.__new__`` around methods of the same name, for layers that are still to be built.
_WRAPPERS = ("build", "quantize")

# The losses that layers have added.
_OF_LAST_CALL = ("_losses", "_loss_ids")

# What ``compile`` and ``fit`` give a model, and callbacks set of it.
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

# What a layer looks words and numbers up in: TensorFlow's, of this process.
_TABLES = ("lookup_table", "token_counts", "token_document_counts")

_Fill = Callable[[Any, Any], None]


def reduce(obj: Any) -> Any:
    """How an object of Keras's is pickled; see ``parallel.transfer.serialization.reducing``."""
    fill: _Fill
    state: Any
    if isinstance(obj, IndexLookup):
        fill, state = _fill_lookup, (kept_attributes(obj), obj.get_vocabulary(False))
    elif isinstance(obj, KerasSaveable):
        fill, state = _fill, kept_attributes(obj)
    elif isinstance(obj, TrackedList):
        fill, state = _fill_list, (vars(obj), list(obj))
    elif isinstance(obj, TrackedDict | TrackedOrderedDict):
        fill, state = _fill_dict, (vars(obj), dict(obj))
    elif isinstance(obj, TrackedSet):
        fill, state = _fill_set, (vars(obj), list(obj))
    elif type(obj) is Tracker:
        # It sees new variables and layers. A helper gets all that there are, and makes no new ones.
        return Tracker, ({},)
    elif type(obj) is DynamicBackend:
        # An empty one looks for its attributes with the help of an attribute.
        return DynamicBackend, (obj.name,)
    else:
        return NotImplemented
    blank = _blank_functional if isinstance(obj, Functional) else _blank
    return blank, (type(obj),), state, None, None, fill


def kept_attributes(obj: KerasSaveable) -> dict[str, Any]:
    """What a helper gets of an object."""
    if isinstance(obj, BaseOptimizer) and obj.built:
        variables = obj._trainable_variables  # its slots are in the store
        return {**vars(unbuilt(obj)), "built": True, "_trainable_variables": variables}
    if not isinstance(obj, Layer):
        return dict(vars(obj))
    left = left_attributes(obj)
    kept = {name: value for name, value in vars(obj).items() if name not in left}
    return {**kept, "_losses": [], "_loss_ids": set()}


def left_attributes(obj: KerasSaveable) -> frozenset[str]:
    """The names of attributes that a helper does not get, or gets anew."""
    kind: Any = type(obj)
    return _left_of(kind)


@lru_cache
def _left_of(kind: Any) -> frozenset[str]:
    if not issubclass(kind, Layer):
        return frozenset()
    left: tuple[str, ...] = (*_WRAPPERS, *_OF_LAST_CALL)
    if issubclass(kind, Trainer):  # a layer that is one can be trained without being a Model
        left = (*left, *COMPILED, "_lockstep", *METHODS)
    elif issubclass(kind, IndexLookup):
        left = (*left, *_TABLES)
    return frozenset(left)


def _blank(kind: Any) -> Any:
    """An object without attributes; ``__new__`` of Keras's layers would give it some."""
    return kind.__new__(kind) if issubclass(kind, list | dict | set) else object.__new__(kind)


def _blank_functional(kind: Any) -> Any:
    """Of a class that has ``Functional`` among its bases since its first object was made."""
    if not issubclass(kind, Functional):
        inject_functional_model_class(kind)
    return _blank(kind)


def _fill(obj: Any, attributes: dict[str, Any]) -> None:
    vars(obj).update(attributes)


def _fill_lookup(obj: Any, state: tuple[dict[str, Any], list[Any]]) -> None:
    _fill(obj, state[0])
    obj.lookup_table = obj._lookup_table_from_tokens(state[1])


def _fill_list(obj: Any, state: tuple[dict[str, Any], list[Any]]) -> None:
    _fill(obj, state[0])
    list.extend(obj, state[1])


def _fill_dict(obj: Any, state: tuple[dict[str, Any], dict[Any, Any]]) -> None:
    _fill(obj, state[0])
    dict.update(obj, state[1])


def _fill_set(obj: Any, state: tuple[dict[str, Any], list[Any]]) -> None:
    _fill(obj, state[0])
    set.update(obj, state[1])
