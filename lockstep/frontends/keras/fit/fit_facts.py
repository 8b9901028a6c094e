"""What the result of a ``fit`` of a Keras model depends on: see ``train.resume.fit_facts``."""

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from lockstep.frontends.keras.optim.optimizer_copy import options_of
from lockstep.train.input.data_adapter import DataPipeline
from lockstep.train.input.same_data import fingerprint
from lockstep.train.resume.fit_facts import Facts, described, plain

# Of optimizers and layers: no option of what they compute.
_NAMES = ("name", "built", "iterations", "trainable", "training", "dtype", "supports_jit")


def facts_of_fit(
    trainer: Any, feed: DataPipeline, validation: DataPipeline | None, **asked: Any
) -> Facts:
    """What a checkpoint says of a ``fit``.

    Args:
        trainer: which is going to train.
        feed: the training data.
        validation: what is evaluated after epochs.
        asked: arguments of the ``fit``.
    """
    model = trainer.model.model
    compiled = model._compile_loss
    return {
        **asked,
        "batch_size": feed.batch_size,
        "steps_per_epoch": feed.steps_per_epoch,
        "seed": trainer.seed,
        "data": fingerprint(feed.source),
        "validation_data": None if validation is None else fingerprint(validation.source),
        "precision": trainer.precision,
        **_told("loss", None if compiled is None else compiled._user_loss),
        "loss_weights": None if compiled is None else plain(compiled._user_loss_weights),
        **_optimizer_facts(model.optimizer),
        **_layer_facts(model),
    }


def _told(name: str, thing: Any) -> Facts:
    """What something is, and what it was made with; of several, by their names."""
    if isinstance(thing, list | tuple):
        thing = dict(enumerate(thing))
    if isinstance(thing, Mapping):
        each = [_told(f"{name}[{key!r}]", one) for key, one in thing.items()]
        return {key: value for facts in each for key, value in facts.items()}
    return {**described(name, thing), **_config(name, thing)}


def _config(name: str, thing: Any) -> Facts:
    """What one of Keras's own objects was made with."""
    if not (type(thing).__module__.startswith("keras.") and hasattr(thing, "get_config")):
        return {}
    config = thing.get_config().items()
    return {f"{name}.{key}": plain(value) for key, value in config if key not in _NAMES}


def _optimizer_facts(optimizer: Any) -> Facts:
    rate = optimizer._learning_rate
    options = {key: plain(value) for key, value in options_of(optimizer).items()}
    if isinstance(rate, keras.Variable):
        if rate.dtype == "float32":  # as the user has written it
            options["learning_rate"] = float(str(np.float32(options["learning_rate"])))
        rates: Facts = {"learning_rate": "a number"}
    else:
        rates = _told("learning_rate", rate)
    return {
        "optimizer": type(optimizer).__name__,
        **rates,
        **{
            f"optimizer.{key}": value
            for key, value in options.items()
            if key not in _NAMES and not key.startswith("_")
        },
    }


def _layer_facts(model: Any) -> Facts:
    """Options of Keras's own layers that are no weights: a dropout's rate, a padding."""
    return {
        f"layer {number} ({type(layer).__name__}).{key}": value
        for number, layer in enumerate(model._flatten_layers())
        for key, value in vars(layer).items()
        if type(layer).__module__.startswith("keras.src.layers")
        and isinstance(value, bool | int | float | str)
        and key not in _NAMES
        and not key.startswith("_")
    }
