"""Checks of a Keras model, and of arguments of its methods, before it trains on many devices."""

import operator
import warnings
from collections.abc import Mapping
from typing import Any

import keras

from lockstep.errors import ModelError, OptionError, Problems, level_of_user
from lockstep.frontends.keras.bound_methods import METHODS

# Methods that run steps: Lockstep runs them itself.
_RUNNING = ("make_train_function", "make_test_function", "make_predict_function")
_STEPS = ("train_step", "test_step", "compute_metrics")


def prepare_model(model: Any) -> None:
    """Change options of a model that Lockstep does not support, with a warning for each.

    Raises:
        ModelError: see ``check_model``.
    """
    check_model(model)
    if model.compiled and model.jit_compile:
        model.jit_compile = False
        _warn("Keras models are not compiled. Proceeding with `jit_compile=False`.")
    half = [one for one in model._flatten_layers() if one.dtype_policy.name == "mixed_float16"]
    for layer in half:
        layer.dtype_policy = keras.DTypePolicy("mixed_bfloat16")
    if half:
        _warn("Mixed precision is bfloat16 here: mixed_float16 becomes mixed_bfloat16.")
    if model.compiled and isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        model.optimizer = model.optimizer.inner_optimizer
        if not half:
            _warn("Losses are not scaled: bfloat16 needs no LossScaleOptimizer.")


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=level_of_user())


def check_model(model: Any) -> None:
    """Refuse models that need a step of Keras's own, on one device.

    Raises:
        ModelError: with all reasons.
    """
    problems = Problems()
    for name in (*_RUNNING, *METHODS):
        if getattr(type(model), name) is not getattr(keras.Model, name):
            problems.add(
                f"Steps run on parts of each batch, so the model must have Keras's own {name}.",
                received=f"{type(model).__name__}.{name}",
                fix="Put what a step does into train_step, test_step or predict_step.",
            )
    if model.compiled and model.steps_per_execution > 1:
        problems.add(
            "Keras's PyTorch backend makes one step at a time.",
            received=f"compile(steps_per_execution={model.steps_per_execution})",
            fix="Leave steps_per_execution out.",
        )
    problems.raise_if_any(ModelError)


def has_custom_loss(model: Any) -> bool:
    """Whether a model has a ``compute_loss`` of its own."""
    return type(model).compute_loss is not keras.Model.compute_loss


def has_custom_steps(model: Any) -> bool:
    """Whether steps are not just the model's call, its losses, metrics and optimizer.

    True for a model without trainable variables, which lacks the last.
    """
    return bool(custom_steps(model)) or not model.trainable_variables


def custom_steps(model: Any) -> list[str]:
    """Names of the methods of a step that the model overrides."""
    kind = type(model)
    return [name for name in _STEPS if getattr(kind, name) is not getattr(keras.Model, name)]


def check_turnable(model: Any) -> None:
    """Refuse models whose own code would see samples along another dim than ``batch_dim`` says.

    Raises:
        ModelError: the model has a step or a loss of its own, or nothing to train.
    """
    if has_custom_steps(model) or has_custom_loss(model):
        raise ModelError(
            "With `batch_dim`, a model must train by Keras's own steps and losses.",
            received=f"{type(model).__name__}, with a train_step, test_step, compute_metrics or "
            "compute_loss of its own, or with nothing to train",
            fix="Put a keras.layers.Permute around it, and pass data with samples first.",
        )


def check_integers(maybe: Mapping[str, Any] | None = None, /, **numbers: Any) -> None:
    """Refuse numbers of steps or epochs that are no integers; those in ``maybe`` may be None.

    Raises:
        OptionError: one is no integer.
    """
    problems = Problems()
    for name, value in {**numbers, **(maybe or {})}.items():
        if not (_is_integer(value) or (value is None and name not in numbers)):
            problems.add(
                f"`{name}` must be an integer.", received=f"{name}={value!r}", fix="Pass one."
            )
    problems.raise_if_any(OptionError)


def check_batch_sizes(**sizes: Any) -> None:
    """Refuse invalid batch sizes; None and 0 mean, as in Keras, that none is given.

    Raises:
        OptionError: one is invalid.
    """
    problems = Problems()
    for name, value in sizes.items():
        if value is None or (_is_integer(value) and value >= 0 and value is not True):
            continue
        problems.add(
            f"`{name}` must be an integer of at least 1.",
            received=f"{name}={value!r}",
            fix="Pass a positive integer.",
        )
    problems.raise_if_any(OptionError)


def _is_integer(value: object) -> bool:
    try:
        operator.index(value)  # type: ignore[arg-type]  # raises for other types
    except TypeError:
        return False
    return True
