"""Facts on which the result of a Keras ``fit`` depends: see ``train.resume.fit_facts``."""

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from lockstep.frontends.keras.optim.optimizer_copy import options_of
from lockstep.train.input.data_adapter import DataPipeline
from lockstep.train.input.same_data import fingerprint
from lockstep.train.resume.fit_facts import Facts, described, plain

# Options of optimizers and layers that do not change what they compute.
_NAMES = ("name", "built", "iterations", "trainable", "training", "dtype", "supports_jit")


def facts_of_fit(
    trainer: Any, feed: DataPipeline, validation: DataPipeline | None, **options: Any
) -> Facts:
    """The facts of a ``fit`` that a checkpoint has.

    Args:
        trainer: of the model.
        feed: the training data.
        validation: the data for evaluation; None without.
        options: arguments of the ``fit``.
    """
    model = trainer.model.model
    compiled = model._compile_loss
    return {
        **options,
        "batch_size": feed.batch_size,
        "steps_per_epoch": feed.steps_per_epoch,
        "seed": trainer.runner.seed,
        "data": fingerprint(feed.source),
        "validation_data": None if validation is None else fingerprint(validation.source),
        "precision": trainer.runner.precision,
        **_object_facts("loss", None if compiled is None else compiled._user_loss),
        "loss_weights": None if compiled is None else plain(compiled._user_loss_weights),
        **_optimizer_facts(model.optimizer),
        **_layer_facts(model),
    }


def _object_facts(name: str, thing: Any) -> Facts:
    """The kind of an object, and its arguments; of several objects, by their names."""
    if isinstance(thing, list | tuple):
        thing = dict(enumerate(thing))
    if isinstance(thing, Mapping):
        each = [_object_facts(f"{name}[{key!r}]", one) for key, one in thing.items()]
        return {key: value for facts in each for key, value in facts.items()}
    return {**described(name, thing), **_config_facts(name, thing)}


def _config_facts(name: str, thing: Any) -> Facts:
    """The arguments of one of Keras's own objects."""
    if not (type(thing).__module__.startswith("keras.") and hasattr(thing, "get_config")):
        return {}
    config = thing.get_config().items()
    return {f"{name}.{key}": plain(value) for key, value in config if key not in _NAMES}


def _optimizer_facts(optimizer: Any) -> Facts:
    rate = optimizer._learning_rate
    options = {key: plain(value) for key, value in options_of(optimizer).items()}
    if isinstance(rate, keras.Variable):
        if rate.dtype == "float32":  # as the user wrote it
            options["learning_rate"] = float(str(np.float32(options["learning_rate"])))
        rates: Facts = {"learning_rate": "a number"}
    else:
        rates = _object_facts("learning_rate", rate)
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
    """Options of Keras's own layers, such as a dropout's rate or a padding."""
    return {
        f"layer {number} ({type(layer).__name__}).{key}": value
        for number, layer in enumerate(model._flatten_layers())
        for key, value in vars(layer).items()
        if type(layer).__module__.startswith("keras.src.layers")
        and isinstance(value, bool | int | float | str)
        and key not in _NAMES
        and not key.startswith("_")
    }
