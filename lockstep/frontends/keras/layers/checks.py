"""What must hold of a Keras model for its training to be distributed."""

import operator
import warnings
from collections.abc import Mapping
from typing import Any

import keras

from lockstep.errors import ModelError, OptionError, Problems, level_of_user
from lockstep.frontends.keras.bound_methods import METHODS

# Methods that say how steps are run, which is done here.
_RUNNING = ("make_train_function", "make_test_function", "make_predict_function")
_STEPS = ("train_step", "test_step", "compute_metrics")


def prepare_model(model: Any) -> None:
    """Have a model train as it can here, with a warning where it was to train otherwise.

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
    """Refuse what only a step of Keras's own, on one device, would do.

    Raises:
        ModelError: with all that is in the way.
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


def has_own_loss(model: Any) -> bool:
    """Whether a model has a ``compute_loss`` of its own."""
    return type(model).compute_loss is not keras.Model.compute_loss


def has_own_steps(model: Any) -> bool:
    """Whether steps are more than the model's call, its losses and its metrics.

    Of a model with nothing to train they are less.
    """
    kind = type(model)
    has_own = any(getattr(kind, name) is not getattr(keras.Model, name) for name in _STEPS)
    return has_own or not model.trainable_variables


def check_turnable(model: Any) -> None:
    """Refuse what would see data turned where samples are not first.

    Raises:
        ModelError: a step or a loss of the model's own; or nothing to train, which Keras's steps
            are for.
    """
    if has_own_steps(model) or has_own_loss(model):
        raise ModelError(
            "With `batch_dim`, a model must train by Keras's own steps and losses.",
            received=f"{type(model).__name__}, with a train_step, test_step, compute_metrics or "
            "compute_loss of its own, or with nothing to train",
            fix="Put a keras.layers.Permute around it, and pass data with samples first.",
        )


def check_integers(maybe: Mapping[str, Any] | None = None, /, **numbers: Any) -> None:
    """Refuse what cannot count steps or epochs; those that come first may be None.

    Raises:
        OptionError: something is no integer.
    """
    problems = Problems()
    for name, value in {**numbers, **(maybe or {})}.items():
        if not (_is_integer(value) or (value is None and name not in numbers)):
            problems.add(
                f"`{name}` must be an integer.", received=f"{name}={value!r}", fix="Pass one."
            )
    problems.raise_if_any(OptionError)


def check_batch_sizes(**sizes: Any) -> None:
    """Refuse what is no batch size; None and 0 are, as in Keras, for what nobody has said.

    Raises:
        OptionError: something is none.
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
        operator.index(value)  # type: ignore[arg-type]  # that is the question
    except TypeError:
        return False
    return True
