"""Custom steps: a model's own ``train_step``, ``test_step`` or ``compute_metrics``.

A step runs unchanged on every part of a batch (``share_steps``). Gradients that it applies are
summed over the parts; what it passes to metrics is joined. So both must be means or sums over the
samples. A trial on a few samples and their halves checks this (``step_trial``), before training
begins and now and then afterwards.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.trainers.data_adapters import data_adapter_utils

from lockstep.data.map_style.sources import Batch
from lockstep.errors import ModelError, OptionError
from lockstep.formatting import first_few
from lockstep.frontends.keras.layers.checks import custom_steps
from lockstep.frontends.keras.layers.dry_run import values_restored
from lockstep.frontends.keras.model import KerasModel
from lockstep.plan.averaging import AveragedUpdate
from lockstep.plan.spec import Plan

# Attributes that ``compile`` sets and steps use; helpers get them with ``CustomSteps``.
_COMPILED = ("_compile_loss", "_compile_metrics", "_loss_tracker", "optimizer")


@dataclass(kw_only=True)
class CustomSteps:
    """What is known of a model's custom steps.

    Attributes:
        optimizers: those that the steps apply, in the order of their first use.
        sums: keys of calls (see ``step_trial``) whose values are sums over samples, not means.
        means: keys of those whose values are means.
        compiled: attributes that ``compile`` has given the model.
    """

    optimizers: list[Any] = field(default_factory=list)
    sums: set[tuple[str, object]] = field(default_factory=set)
    means: set[tuple[str, object]] = field(default_factory=set)
    compiled: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Any) -> "CustomSteps":
        """Those of a compiled model, before they are tried."""
        return cls(compiled={name: vars(model)[name] for name in _COMPILED if name in vars(model)})

    def number_of(self, optimizer: Any) -> int:
        """The optimizer's number.

        Raises:
            ModelError: the optimizer is unknown.
        """
        for number, one in enumerate(self.optimizers):
            if one is optimizer:
                return number
        raise ModelError(
            "Every optimizer of a step must be known before training begins.",
            received=f"an optimizer {optimizer.name!r}, which no step has applied before",
            fix="Build it beforehand: self.optimizer.build(variables).",
        )

    def add_built(self, model: Any) -> None:
        """Add built optimizers of the model that share no variables with the known ones."""
        taken = {id(one) for own in self.optimizers for one in own._trainable_variables}
        for one in vars(model).values():
            own = one._trainable_variables if isinstance(one, BaseOptimizer) else []
            if own and taken.isdisjoint(map(id, own)):
                self.optimizers.append(one)
                taken.update(map(id, own))

    def check(self) -> None:
        """Refuse optimizers that update the same variables, and sums beside means.

        Raises:
            ModelError: with the variables.
        """
        seen: dict[int, Any] = {}
        shared = [
            one.path
            for optimizer in self.optimizers
            for one in optimizer._trainable_variables
            if seen.setdefault(id(one), optimizer) is not optimizer
        ]
        if {"apply"} <= {kind for kind, _ in self.sums} & {kind for kind, _ in self.means}:
            raise ModelError(
                "The gradients that a step applies must all be of sums over the samples, or all of "
                "means.",
                received="some of sums",
                fix="Use ops.mean in each loss.",
            )
        if shared:
            raise ModelError(
                "Every variable must be updated by one optimizer.",
                received=f"several for {first_few(shared)}",
                fix="Give each optimizer variables of its own: d_optimizer.build("
                "discriminator.trainable_variables).",
            )


def data_of(batch: Batch) -> Any:
    """A batch as Keras passes it to a step."""
    targets, weights = batch.targets
    return data_adapter_utils.pack_x_y_sample_weight(batch.inputs[0], targets, weights)


def check_plan(plan: Plan, model: Any) -> None:
    """Refuse Plans that give a rank other than one part of each batch, or parts of gradients.

    Raises:
        ModelError: the Plan has stages of the model.
        OptionError: the Plan does.
    """
    if plan.pipeline is not None:
        raise stages_refused(model)
    if plan.sharding is not None and plan.sharding.divides_parameters:
        raise OptionError(
            "A custom step reads gradients after backward, where a device has parts of them only.",
            received="sharded parameters",
            fix='Use FullyShardedStrategy(level="gradients"), or leave the step to Keras.',
        )
    received = None
    if isinstance(plan.update, AveragedUpdate):
        received = "replicas of LocalSGDStrategy"
    elif plan.num_shares != plan.num_ranks:
        received = f"{plan.num_shares} shares on {plan.num_ranks} devices"
    if received is not None:
        raise OptionError(
            "A custom step runs on one part of each batch per device.",
            received=received,
            fix="Use MirroredStrategy without num_shares, or leave train_step and test_step to "
            "Keras: compute_loss may be the model's own.",
        )


def check_call(module: KerasModel, batch: Batch) -> None:
    """Check that a planner can time a model with custom steps, which need no ``call``.

    Args:
        module: the model, which is restored.
        batch: some samples.

    Raises:
        ModelError: its ``call`` does not take the data.
    """
    try:
        with torch.no_grad(), values_restored(module.variables.values()):
            module(*batch.inputs)
    except Exception as error:
        raise ModelError(
            "AutoStrategy times a model's `call` on the data, which need not be what train_step "
            "does with it.",
            received=f"{type(error).__name__} in the call of {type(module.model).__name__}: "
            f"{str(error).strip().partition(chr(10))[0]}",
            fix="Use MirroredStrategy, or give the model a `call` that takes the inputs of its "
            "data.",
        ) from error


def stages_refused(model: Any) -> ModelError:
    """The error of devices that divide a model, for one with custom steps."""
    own = " and ".join(custom_steps(model))
    return ModelError(
        "In a pipeline, and under tensor parallelism, a model must train by Keras's own steps: a "
        "train_step, test_step or compute_metrics calls all of the model, and each device has a "
        "part of it.",
        received=f"{type(model).__name__} with {own or 'no trainable variables'}",
        fix="Use MirroredStrategy or another strategy whose devices have the whole model; or put "
        "the computation into `call` and `compute_loss`, and leave the step to Keras.",
    )
