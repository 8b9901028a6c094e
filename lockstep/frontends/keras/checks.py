"""What must hold of a Keras model for its training to be distributed."""

import os
from typing import Any

import keras

from lockstep.cluster.environment import find_place
from lockstep.errors import ModelError, OptionError, Problems, problem
from lockstep.frontends.keras.names import METHODS
from lockstep.train.trainer import StrategyLike

# Methods that say what a step is: here it is made of the model's call, its losses and its metrics.
_STEPS = (
    "train_step",
    "test_step",
    "predict_step",
    "make_train_function",
    "make_test_function",
    "make_predict_function",
    "compute_loss",
    "compute_metrics",
)


def check_model(model: Any) -> None:
    """Refuse what only a step of Keras's own, on one device, would do.

    Raises:
        ModelError: with all that is in the way.
    """
    problems = Problems()
    for name in (*_STEPS, *METHODS):
        if getattr(type(model), name) is not getattr(keras.Model, name):
            problems.add(
                "A step is distributed by parts of the batch, so the model must have Keras's own "
                f"{name}.",
                received=f"{type(model).__name__}.{name}",
                fix=_FIXES.get(
                    name,
                    "Leave it out, or train a plain PyTorch model with "
                    "lockstep.Trainer(train_step=...).",
                ),
            )
    if model.compiled and model.jit_compile:
        problems.add(
            "Models of Keras are called as they are, without torch.compile.",
            received="compile(jit_compile=True)",
            fix="Leave jit_compile out.",
        )
    if model.compiled and model.steps_per_execution > 1:
        problems.add(
            "Keras's PyTorch backend makes one step at a time.",
            received=f"compile(steps_per_execution={model.steps_per_execution})",
            fix="Leave steps_per_execution out.",
        )
    policies = {layer.dtype_policy.name for layer in model._flatten_layers()}
    if "mixed_float16" in policies:
        problems.add(
            "Mixed precision is bfloat16 here, which needs no scaled loss.",
            received="the policy mixed_float16",
            fix='Use keras.mixed_precision.set_global_policy("mixed_bfloat16").',
        )
    problems.raise_if_any(ModelError)


_FIXES = {
    "compute_loss": "Pass the loss to compile, and add what else counts with add_loss in call.",
    "compute_metrics": "Pass metrics to compile.",
}


def check_alone(strategy: StrategyLike) -> None:
    """Refuse to train on one host what others believe to train on theirs, too.

    Raises:
        OptionError: a launcher has started several processes.
    """
    place = None if strategy.reach == "one process" else find_place(os.environ)
    if place is not None:
        raise OptionError(
            problem(
                "Keras models train on one host, by one script.",
                received=f"{place.num_hosts} hosts with {place.num_processes} processes here, as "
                f"{place.launcher} says",
                fix="Start the script once; lockstep.Trainer trains PyTorch models on many hosts.",
            )
        )
