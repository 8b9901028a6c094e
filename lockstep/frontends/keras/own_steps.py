"""Steps that a model defines itself: ``train_step``, ``test_step`` or ``compute_metrics``.

A step is run on every part of a batch, as it is (``share_steps``). What it hands to optimizers is
summed over the parts; what it hands to metrics is put together. For that it must be a mean over the
samples, or a sum, which is tried on a few samples and their halves (``step_trial``), before training
begins and now and then after that.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.trainers.data_adapters import data_adapter_utils

from lockstep.data.sources import Batch
from lockstep.errors import ModelError
from lockstep.units import first_few

_STEPS = ("train_step", "test_step", "compute_metrics")


def has_own_steps(model: Any) -> bool:
    """Whether steps are more than the model's call, its losses and its metrics."""
    return defines_steps(type(model))


def defines_steps(kind: type[Any]) -> bool:
    """Whether a class of models defines steps of its own."""
    return any(getattr(kind, name) is not getattr(keras.Model, name) for name in _STEPS)


@dataclass(kw_only=True)
class OwnSteps:
    """What is known of a model's own steps.

    Attributes:
        optimizers: those that the steps apply, in the order in which they were first seen.
        sums: what is a sum over samples and not a mean, as ``step_trial`` names it.
    """

    optimizers: list[Any] = field(default_factory=list)
    sums: set[object] = field(default_factory=set)

    def number_of(self, optimizer: Any) -> int:
        """The optimizer's turn.

        Raises:
            ModelError: it is not known.
        """
        for number, one in enumerate(self.optimizers):
            if one is optimizer:
                return number
        raise ModelError(
            "What updates the weights must be known before training begins.",
            received=f"an optimizer {optimizer.name!r}, which no step has applied before",
            fix="Build it beforehand: self.optimizer.build(variables).",
        )

    def add_built(self, model: Any) -> None:
        """Also know optimizers that the model has and that share no variables with the others."""
        taken = {id(one) for own in self.optimizers for one in own._trainable_variables}
        for one in vars(model).values():
            if isinstance(one, BaseOptimizer) and one.built and one not in self.optimizers:
                if taken.isdisjoint(map(id, one._trainable_variables)):
                    self.optimizers.append(one)
                    taken.update(map(id, one._trainable_variables))

    def check(self) -> None:
        """Refuse optimizers that update the same variables.

        Raises:
            ModelError: with these.
        """
        seen: dict[int, Any] = {}
        shared = [
            one.path
            for optimizer in self.optimizers
            for one in optimizer._trainable_variables
            if seen.setdefault(id(one), optimizer) is not optimizer
        ]
        if shared:
            raise ModelError(
                "Every variable must be updated by one optimizer.",
                received=f"several for {first_few(shared)}",
                fix="Give each optimizer variables of its own: d_optimizer.build("
                "discriminator.trainable_variables).",
            )


def data_of(batch: Batch) -> Any:
    """A batch as Keras gives it to a step."""
    targets, weights = batch.targets
    return data_adapter_utils.pack_x_y_sample_weight(batch.inputs[0], targets, weights)


def variables_of(optimizers: Iterable[Any]) -> Sequence[Any]:
    """All that some optimizers update."""
    return [one for optimizer in optimizers for one in optimizer._trainable_variables]
