"""The workload of a Plan: the same on all ranks, except for the memory of its tensors."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from lockstep.data.batch_dims import SAMPLES_FIRST, BatchDims
from lockstep.parallel.data_parallel.gradient_rules import GradientRules
from lockstep.parallel.data_parallel.step_functions import StepFunction
from lockstep.parallel.groups import ParameterGroup
from lockstep.parallel.loss.share_losses import LossAdapter
from lockstep.parallel.pipeline.partition import Partition
from lockstep.parallel.updater_interface import Updater
from lockstep.plan.spec import Plan


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and its training or evaluation.

    Attributes:
        plan: the Plan.
        model: the model; with helpers its parameters are in the store. Parameters of other ranks
            may be on the meta device.
        loss: the adapted loss; None for predictions.
        updater: the optimizer; None without training.
        groups: the parameters, grouped by the ranks that have them.
        partitions: of the model into stages, by training mode; none without a pipeline.
        rules: for gradients.
        seed: of all random streams.
        functions: the user's train_step functions, in order.
        dims: of the samples in the model's inputs and outputs.
    """

    plan: Plan
    model: nn.Module
    loss: LossAdapter | None
    updater: Updater | None
    groups: tuple[ParameterGroup, ...]
    partitions: Mapping[bool, Partition]
    rules: GradientRules
    seed: int
    functions: tuple[StepFunction, ...] = ()
    dims: BatchDims = SAMPLES_FIRST
